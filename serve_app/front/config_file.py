"""Reads a `serve run` config file: its YAML, its keys, and the line of each.
Never knows the meaning of our application's `args`: `preflight` does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from serve_app.front.config_kinds import APPLICATION_KINDS, ARGS, HTTP_KINDS, TOP_KINDS, Kind

# Ray's schema accepts any key, and ignores those that it does not know. A test compares these lists with it.
# fmt: off
TOP_KEYS = (
    "proxy_location", "http_options", "grpc_options", "controller_options", "logging_config", "tracing_config",
    "applications", "target_capacity",
)
HTTP_KEYS = (
    "host", "port", "root_path", "request_timeout_s", "keep_alive_timeout_s", "ssl_keyfile", "ssl_certfile",
    "ssl_keyfile_password", "ssl_ca_certs",
)
APPLICATION_KEYS = (
    "name", "route_prefix", "import_path", "runtime_env", "host", "port", "deployments", "autoscaling_policy", "args",
    "logging_config", "external_scaler_enabled",
)
DEPLOYMENT_KEYS = (
    "name", "num_replicas", "max_ongoing_requests", "max_queued_requests", "backpressure_config", "user_config",
    "autoscaling_config", "graceful_shutdown_wait_loop_s", "graceful_shutdown_timeout_s", "health_check_period_s",
    "health_check_timeout_s", "ray_actor_options", "placement_group_bundles", "placement_group_strategy",
    "placement_group_bundle_label_selector", "max_replicas_per_node", "logging_config", "request_router_config",
    "gang_scheduling_config", "deployment_actors", "rolling_update_percentage", "max_surge_percent",
)
ACTOR_KEYS = (
    "runtime_env", "num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "label_selector",
    "fallback_strategy",
)
AUTOSCALING_KEYS = (
    "min_replicas", "initial_replicas", "max_replicas", "target_ongoing_requests", "metrics_interval_s",
    "look_back_period_s", "smoothing_factor", "upscale_smoothing_factor", "downscale_smoothing_factor",
    "upscaling_factor", "downscaling_factor", "downscale_delay_s", "downscale_to_zero_delay_s", "upscale_delay_s",
    "aggregation_function", "policy",
)
GRPC_KEYS = ("port", "grpc_servicer_functions", "request_timeout_s", "enable_reflection")
# fmt: on
_IN_A_DEPLOYMENT = {"ray_actor_options": ACTOR_KEYS, "autoscaling_config": AUTOSCALING_KEYS}
_OF_THE_SERVER = ("host", "port")
"""Keys that Ray knows in an application, but only to refuse them there."""
PROXIES = ("Disabled", "HeadOnly", "EveryNode")
_UNIQUE = {"name": "default", "route_prefix": "/"}
"""Keys whose value may stand in one application only, with what Ray takes without them."""
_ANCHORS = "x-"
"""The prefix of top-level keys with YAML anchors for the rest of the file, as in Compose files."""
EXPECTED = "expected a Serve config, a mapping with `applications:`, as in this project's config.yaml"

_TOO_DEEP = "{path}: expected a Serve config, but it is nested too deeply, or a part of it contains itself."


class ConfigRefused(Exception):
    """The config cannot be served. The message has one line per reason."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A config with the places of its values in the file."""

    path: Path
    content: dict[str, Any]
    root: yaml.Node

    def where(self, *keys: str | int) -> str:
        """Return the file and the line of a value, or of the innermost existing value on the path to it."""
        node, line = self.root, self.root.start_mark.line
        for key in keys:
            entry = dict(_items(node)).get(key)
            if entry is None:
                break
            line, node = entry
        return f"{self.path}, line {line + 1}"

    @property
    def applications(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.content["applications"]
        return found


def address_of(config: ServeConfig) -> tuple[str, int]:
    """Return the host and the port on which the config asks to listen."""
    http = config.content.get("http_options") or {}
    return http.get("host", "0.0.0.0"), _port_in(http) or 0


def has_proxies(config: ServeConfig) -> bool:
    """Whether the config has any proxies for HTTP."""
    return config.content.get("proxy_location") != "Disabled"


def _port_in(http: dict[str, Any]) -> int | None:
    """Read the port as Ray does, also from a string of digits; None if it is not a port."""
    port = http.get("port", 8000)
    if isinstance(port, str) and port.isascii() and port.isdecimal():
        port = int(port)
    return port if isinstance(port, int) and not isinstance(port, bool) and 1 <= port <= 65535 else None


def _items(node: yaml.Node) -> Iterator[tuple[str | int, tuple[int, yaml.Node]]]:
    """Yield each key or index with the line of its entry, and its value."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key.value, (key.start_mark.line, value)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield number, (value.start_mark.line, value)


def read_config(path: Path) -> ServeConfig:
    """Read a config.

    Raises:
        ConfigRefused: the file does not exist, or is not YAML, or not a Serve config. The message has the line, and
        what was expected.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigRefused(f"{path}: {error.strerror}: expected the YAML file of a Serve config.") from None
    except UnicodeDecodeError:
        raise ConfigRefused(f"{path} is not text in UTF-8: expected the YAML file of a Serve config.") from None
    try:
        root, content = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigRefused(_not_yaml(path, error)) from None
    except RecursionError:
        raise ConfigRefused(_TOO_DEEP.format(path=path)) from None
    except ValueError as error:  # from a value with the form of a date or number that is none, such as 2026-02-30
        raise ConfigRefused(f"{path}: not YAML: {error}. A value with special characters needs quotes.") from None
    if root is None or content is None:
        raise ConfigRefused(f"{path} is empty: {EXPECTED}.")
    if not isinstance(content, dict):
        raise ConfigRefused(f"{path}, line {root.start_mark.line + 1}: {EXPECTED}.")
    config = ServeConfig(path, content, root)
    try:
        problems = list(_problems(config))
    except RecursionError:  # from an alias of what it stands in
        raise ConfigRefused(_TOO_DEEP.format(path=path)) from None
    if problems:
        raise ConfigRefused("\n".join(problems))
    return config


def refuse_tls(config: ServeConfig) -> None:
    """Raises ConfigRefused: the config has settings for TLS, which Ray does not give to HAProxy: the port would speak
    plain HTTP, and clients would send their keys over it."""
    for key, value in (config.content.get("http_options") or {}).items():
        if key.startswith("ssl_") and value is not None:
            raise ConfigRefused(
                f"{config.where('http_options', key)}: http_options.{key}: HAProxy in front of this server has no TLS: "
                "end TLS in front of it, such as in a load balancer, or set RAY_SERVE_ENABLE_HA_PROXY=0 for Ray's own "
                "proxy, which has it"
            )


def _not_yaml(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = "" if mark is None else f", line {mark.line + 1}"
    parts = filter(None, (getattr(error, "context", None), getattr(error, "problem", None)))
    problem = ", ".join(parts) or " ".join(str(error).split())
    return f"{path}{line}: not YAML: {problem}. A value with special characters needs quotes; indent with spaces."


def _problems(config: ServeConfig) -> Iterator[str]:
    content = config.content
    yield from _twice(config, config.root)
    served = {key: value for key, value in content.items() if not str(key).startswith(_ANCHORS)}
    unknown = list(_unknown(config, (), served, TOP_KEYS))
    yield from unknown
    yield from _of_another_kind(config, (), content, TOP_KINDS)
    if (proxies := content.get("proxy_location", PROXIES[0])) not in PROXIES:
        expected = f"expected one of {', '.join(PROXIES)}"
        yield f"{config.where('proxy_location')}: proxy_location: {expected} (given: {proxies!r})"
    if not isinstance(http := content.get("http_options", {}), dict):
        yield f"{config.where('http_options')}: http_options: expected a mapping with `port:` (given: {http!r})"
    else:
        yield from _unknown(config, ("http_options",), http, HTTP_KEYS)
        yield from _of_another_kind(config, ("http_options",), http, HTTP_KINDS)
        yield from _in_http_options(config, http)
        if _port_in(http) is None:
            where = config.where("http_options", "port")
            yield f"{where}: http_options.port: expected a number from 1 to 65535 (given: {http['port']!r})"
    yield from _unknown_inside(config, (), content, {"grpc_options": GRPC_KEYS})
    if unknown and "applications" not in content:  # probably misspelt, and reported as that already
        return
    applications = content.get("applications")
    if not isinstance(applications, list) or not applications:
        given = "" if applications is None else f" (given: {applications!r})"
        yield f"{config.where('applications')}: applications: expected a list of at least one application{given}"
        return
    for number, application in enumerate(applications):
        yield from _in_application(config, number, application)
    for key, default in _UNIQUE.items():
        yield from _repeated(config, key, [app.get(key, default) for app in applications if isinstance(app, dict)])


def _repeated(config: ServeConfig, key: str, values: list[Any]) -> Iterator[str]:
    for number, value in enumerate(values):
        if value is not None and value in values[:number]:
            other = f"application {values.index(value)} has it already: expected another for each application"
            where = config.where("applications", number, key)
            yield f"{where}: applications.{number}.{key}: {other} (given: {value!r})"


def _in_http_options(config: ServeConfig, http: dict[str, Any]) -> Iterator[str]:
    host, timeout_s = http.get("host", ""), http.get("request_timeout_s")
    if not isinstance(host, str):
        yield f"{config.where('http_options', 'host')}: http_options.host: expected a name or address (given: {host!r})"
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
        where = config.where("http_options", "request_timeout_s")
        yield f"{where}: http_options.request_timeout_s: expected a number of seconds above 0 (given: {timeout_s!r})"


def _in_application(config: ServeConfig, number: int, application: Any) -> Iterator[str]:
    place = ("applications", number)
    if not isinstance(application, dict):
        yield f"{config.where(*place)}: applications.{number}: expected a mapping with `import_path:`"
        return
    yield from _unknown(config, place, application, APPLICATION_KEYS)
    path = application.get("import_path")
    if not isinstance(path, str) or not _is_import_path(path):
        example = "expected `module:attribute`, such as serve_app.app:build"
        given = "" if path is None else f" (given: {path!r})"
        yield f"{config.where(*place, 'import_path')}: applications.{number}.import_path: {example}{given}"
    prefix = application.get("route_prefix")
    if prefix is not None and not _is_prefix(prefix):
        expected = "expected a path that begins with `/` and does not end with one, such as /v2, or `/` alone"
        where = config.where(*place, "route_prefix")
        yield f"{where}: applications.{number}.route_prefix: {expected} (given: {prefix!r})"
    yield from _of_another_kind(config, place, application, APPLICATION_KINDS)
    yield from _in_deployments(config, (*place, "deployments"), application.get("deployments"))
    for key in _OF_THE_SERVER:
        if key in application:
            yield (
                f"{config.where(*place, key)}: applications.{number}.{key}: stands in http_options, for all "
                f"applications (given: {application[key]!r})"
            )


def _in_deployments(config: ServeConfig, place: tuple[str | int, ...], deployments: Any) -> Iterator[str]:
    for number, deployment in enumerate(deployments if isinstance(deployments, list) else ()):
        if isinstance(deployment, dict):
            yield from _unknown(config, (*place, number), deployment, DEPLOYMENT_KEYS)
            yield from _unknown_inside(config, (*place, number), deployment, _IN_A_DEPLOYMENT)


def _is_import_path(path: str) -> bool:
    """Whether Ray takes this for one."""
    module, _, attribute = path.rpartition(":" if ":" in path else ".")
    return bool(module and attribute) and ":" not in module


def _is_prefix(prefix: Any) -> bool:
    """Whether Ray takes this for a path. It knows no wildcards."""
    if not isinstance(prefix, str) or not prefix.startswith("/") or "{" in prefix or "}" in prefix:
        return False
    return prefix == "/" or not prefix.endswith("/")


def _of_another_kind(
    config: ServeConfig, place: tuple[str | int, ...], mapping: dict[Any, Any], kinds: Mapping[str, Kind]
) -> Iterator[str]:
    for key, kind in kinds.items():
        if key in mapping and not kind.takes(value := mapping[key]):
            yield f"{config.where(*place, key)}: {'.'.join(map(str, (*place, key)))}: {kind.refusal(value)}"


def _unknown(
    config: ServeConfig, place: tuple[str | int, ...], mapping: dict[Any, Any], known: Sequence[str]
) -> Iterator[str]:
    may_be_a_setting = known in (TOP_KEYS, APPLICATION_KEYS)
    besides = f"; settings of an application stand under its `{ARGS}`" if may_be_a_setting else ""
    for key in mapping:
        if key not in known:
            close = get_close_matches(str(key), known, n=1)
            meant = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}{besides}"
            yield f"{config.where(*place, key)}: unknown key {'.'.join(map(str, (*place, key)))}: {meant}"


def _unknown_inside(
    config: ServeConfig, place: tuple[str | int, ...], mapping: dict[Any, Any], inner: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Report unknown keys of the mappings in a mapping. `inner`: the key of each, and the keys that it may have."""
    for key, known in inner.items():
        if isinstance(value := mapping.get(key), dict):
            yield from _unknown(config, (*place, key), value, known)


def _twice(config: ServeConfig, node: yaml.Node) -> Iterator[str]:
    """Report repeated keys: YAML's readers silently keep the last one."""
    seen: dict[str | int, int] = {}
    for key, (line, value) in _items(node):
        if key in seen:
            yield f"{config.path}, line {line + 1}: {key} stands on line {seen[key] + 1} already: expected it once"
        seen[key] = line
        yield from _twice(config, value)
