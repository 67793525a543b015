"""Owns the check of `serveConfigV2`, which is only a string to Kubernetes, against Ray Serve's schema, and of its
`args` against our settings. Never builds an application."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from k8s.validate.manifests import Doc, Finding, at, name_of
from serve_app.front.preflight import deployments_of, our_applications
from serve_app.settings.application import AppSettings

FIELD = "spec.serveConfigV2"


def config_of(doc: Doc) -> Doc:
    """Return the Serve config inside a RayService. Raises yaml.YAMLError, or ValueError if it is not a mapping."""
    config = yaml.safe_load(at(doc, FIELD, ""))
    if not isinstance(config, dict):
        raise ValueError("must be a Serve config")
    return config


def settings_of(doc: Doc) -> AppSettings:
    """Return the settings of our application. Raises ValueError unless there is exactly one."""
    applications = [args for _, _, args in our_applications(config_of(doc))]
    if len(applications) != 1:
        raise ValueError(f"must have one application of ours, but it has {len(applications)}")
    return AppSettings.model_validate(applications[0])


def check(doc: Doc) -> list[Finding]:
    """Find what Serve or our application's builder would refuse, by the field inside the string."""
    from ray.serve.schema import ServeDeploySchema  # imported here, since it takes seconds

    try:
        config = config_of(doc)
        ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        return _findings(doc, "", error)
    except (yaml.YAMLError, ValueError) as error:
        return [Finding(name_of(doc), FIELD, str(error))]
    if unknown := list(_unknown(ServeDeploySchema, config, "")):
        return [
            Finding(name_of(doc), f"{FIELD}: {path}", "is no field of Serve's, which ignores it") for path in unknown
        ]
    try:
        settings = settings_of(doc)
    except ValidationError as error:
        return _findings(doc, "args.", error)
    except ValueError as error:
        return [Finding(name_of(doc), FIELD, str(error))]
    return list(_missing_deployments(doc, config, settings))


def _missing_deployments(doc: Doc, config: Doc, settings: AppSettings) -> Iterator[Finding]:
    """Find deployments that our application does not have, for which Serve refuses all of it."""
    made = deployments_of(settings)
    for app in config["applications"]:
        for number, deployment in enumerate(app.get("deployments", [])):
            if any(our_applications({"applications": [app]})) and deployment["name"] not in made:
                problem = f"must be one of {', '.join(made)}, but it is {deployment['name']}"
                yield Finding(name_of(doc), f"{FIELD}: deployments.{number}.name", problem)


def _unknown(model: type[BaseModel], value: Doc, path: str) -> Iterator[str]:
    """Yield the paths of keys that Serve's models do not have. Some models accept and drop unknown keys."""
    for name, item in value.items():
        here = f"{path}.{name}".lstrip(".")
        if name not in model.model_fields:
            yield here
            continue
        for inner in _models_in(model.model_fields[name].annotation):
            for i, part in enumerate(item if isinstance(item, list) else [item]):
                if isinstance(part, dict):
                    yield from _unknown(inner, part, f"{here}[{i}]" if isinstance(item, list) else here)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the first model in a field's type, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)][:1]


def _findings(doc: Doc, prefix: str, error: ValidationError) -> list[Finding]:
    return [Finding(name_of(doc), f"{FIELD}: {prefix}{_path(one['loc'])}", one["msg"]) for one in error.errors()]


def _path(parts: tuple[Any, ...]) -> str:
    return ".".join(map(str, parts))
