"""Owns what is known of other people's images at the versions that compose.yaml pins, with where that was read.
Never asks an image: none is here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Image:
    """`flags`, `variables`: the command-line flags and environment variables that it reads, of those that we may set.
    `programs`: those in the image that a health check may start. `own_check`: it brings a health check."""

    port: int
    flags: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()
    programs: frozenset[str] = frozenset()
    own_check: bool = False


IMAGES = {
    # docs/command-line/prometheus.md and Dockerfile of Prometheus 3.14.0; its base is busybox, which has wget.
    "prom/prometheus:v3.14.0": Image(
        9090,
        flags=frozenset(
            {
                "--config.file",
                "--storage.tsdb.path",
                "--storage.tsdb.retention.time",
                "--storage.tsdb.retention.size",
                "--web.listen-address",
                "--web.external-url",
                "--log.level",
            }
        ),
        programs=frozenset({"wget"}),
    ),
    # conf/defaults.ini of Grafana 13, whose [section] and key make GF_SECTION_KEY; its base is Alpine, which has wget.
    "grafana/grafana:13.2.3": Image(
        3000,
        variables=frozenset(
            {
                "GF_AUTH_ANONYMOUS_ENABLED",
                "GF_AUTH_ANONYMOUS_ORG_ROLE",
                "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION",
                "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH",
                "GF_ANALYTICS_REPORTING_ENABLED",
                "GF_ANALYTICS_CHECK_FOR_UPDATES",
                "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES",
                "GF_PLUGINS_PREINSTALL_DISABLED",
            }
        ),
        programs=frozenset({"wget"}),
    ),
    # open_webui/env.py and config.py of the package open-webui 0.11.4, and HEALTHCHECK of the image's Dockerfile.
    "ghcr.io/open-webui/open-webui:v0.11.4-slim": Image(
        8080,
        variables=frozenset(
            {
                "OPENAI_API_BASE_URL",
                "OPENAI_API_KEY",
                "ENABLE_OLLAMA_API",
                "ENABLE_PERSISTENT_CONFIG",
                "WEBUI_AUTH",
                "WEBUI_SECRET_KEY",
                "BYPASS_EMBEDDING_AND_RETRIEVAL",
                "ENABLE_TITLE_GENERATION",
                "ENABLE_TAGS_GENERATION",
                "ENABLE_FOLLOW_UP_GENERATION",
                "ENABLE_VERSION_UPDATE_CHECK",
            }
        ),
        own_check=True,
    ),
}
