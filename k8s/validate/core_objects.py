"""Owns the checks of all objects but RayServices: Kubernetes' own kinds against its strict schemas, those of the
Prometheus operator against the fields that we use. Never accepts a kind that nothing checks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import kubernetes_validate
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from k8s.validate.manifests import Doc, Finding, name_of

KUBERNETES = "1.37"
_Duration = Annotated[str, Field(pattern=r"^(\d+(ms|[smhdwy]))+$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Metadata(_Strict):
    name: str
    namespace: str
    labels: dict[str, str] = {}


class _Selector(_Strict):
    matchLabels: dict[str, str] = Field(min_length=1)


class _Endpoint(_Strict):
    port: str = Field(max_length=15)
    path: str = Field("/metrics", pattern="^/")
    interval: _Duration
    scrapeTimeout: _Duration | None = None


class _Namespaces(_Strict):
    matchNames: list[str] = Field(min_length=1)


class _PodMonitorSpec(_Strict):
    namespaceSelector: _Namespaces
    selector: _Selector
    podMetricsEndpoints: list[_Endpoint] = Field(min_length=1)


class PodMonitor(_Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: _Metadata
    spec: _PodMonitorSpec


class _StaticConfig(_Strict):
    targets: list[str] = Field(min_length=1)
    labels: dict[str, str] = {}


class _ScrapeConfigSpec(_Strict):
    jobName: str
    metricsPath: str = Field(pattern="^/")
    scrapeInterval: _Duration
    scrapeTimeout: _Duration
    staticConfigs: list[_StaticConfig] = Field(min_length=1)


class ScrapeConfig(_Strict):
    apiVersion: Literal["monitoring.coreos.com/v1alpha1"]
    kind: Literal["ScrapeConfig"]
    metadata: _Metadata
    spec: _ScrapeConfigSpec


class _Rule(_Strict):
    record: str | None = None
    alert: str | None = None
    expr: str
    for_: _Duration | None = Field(None, alias="for")
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _RuleGroup(_Strict):
    name: str
    interval: _Duration | None = None
    rules: list[_Rule] = Field(min_length=1)


class _PrometheusRuleSpec(_Strict):
    groups: list[_RuleGroup] = Field(min_length=1)


class PrometheusRule(_Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PrometheusRule"]
    metadata: _Metadata
    spec: _PrometheusRuleSpec


_OTHERS: dict[str, type[BaseModel]] = {model.__name__: model for model in (PodMonitor, ScrapeConfig, PrometheusRule)}
"""The fields of the Prometheus operator's kinds that our manifests use. To use another one, look it up in the
operator's documentation and add it here."""


def check(doc: Doc) -> list[Finding]:
    """Find what an API server would refuse, or silently drop, in an object other than a RayService."""
    if (model := _OTHERS.get(str(doc.get("kind")))) is not None:
        return _check_model(model, doc)
    try:
        kubernetes_validate.validate(doc, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [Finding(name_of(doc), _path(list(error.path)), error.message)]
    except kubernetes_validate.SchemaNotFoundError:
        return [Finding(name_of(doc), "kind", f"nothing here checks {doc.get('apiVersion')} {doc.get('kind')}")]
    return []


def _check_model(model: type[BaseModel], doc: Doc) -> list[Finding]:
    try:
        model.model_validate(doc)
    except ValidationError as error:
        return [Finding(name_of(doc), _path(list(one["loc"])), one["msg"]) for one in error.errors()]
    return []


def _path(parts: list[Any]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
