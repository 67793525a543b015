"""Checks our applications' settings and prepares their models before `serve run` starts Ray.
Never starts anything. Without it, a Ray task would find a misspelt setting, and report it in a page of tracebacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from engine.checkpoints.prepare import ModelError, prepare_model
from serve_app.front.config_file import ConfigRefused, ServeConfig
from serve_app.settings.application import AppSettings
from serve_app.settings.misspelt import meant

BUILDER = "serve_app.app:build"
RENAMED = {"attention_backend": "engine.attention"}
"""Settings of earlier versions, by what they are called now."""
INGRESS, STORE = "Ingress", "ResponsesStore"
"""What the builder makes besides the engines' deployments, the last with several ingress replicas that keep responses.
A test compares it."""


@dataclass(frozen=True, slots=True)
class Application:
    """One of this project's applications in a config, or one of its models. `number`: its index among all
    applications. `route_prefix`: None if only its handle leads to it. `place`: the path below `args` at which a model's
    own settings stand. `total_engines`: the most engines of all models of the application."""

    config: ServeConfig
    number: int
    name: str
    route_prefix: str | None
    settings: AppSettings
    place: tuple[str | int, ...] = ()
    total_engines: int = 1

    def refused(self, problem: str, *setting: str) -> ConfigRefused:
        """Make a refusal with file, line and application before the problem, which begins with the setting's name.
        `setting`: its path below `args`, or below the model's own settings."""
        where = _where(self.config, self.number, self.name, (*self.place, *setting))
        return ConfigRefused(f"{where}: {'.'.join(map(str, ('args', *self.place)))}.{problem}")

    def each_model(self) -> list[Application]:
        """Return the application once for each of its models, as if that were served alone."""
        alone = self.settings.each_model()
        places = [("models", number) for number in range(len(alone))] if self.settings.models else [()]
        return [replace(self, settings=one, place=place) for one, place in zip(alone, places, strict=True)]


def preflight(config: ServeConfig) -> list[Application]:
    """Check this project's applications in a `serve run` config, and prepare their models with visible progress.

    Raises:
        ConfigRefused: settings are wrong (the message has name, limit and value), or a model cannot be prepared.
    """
    applications = read_applications(config)
    for application in applications:
        for model in application.each_model():
            if model.settings.engine.executor == "torch":
                _prepare(model)
    return applications


def read_applications(config: ServeConfig) -> list[Application]:
    """Read the applications that this project's builder makes; others are left to Ray.

    Raises:
        ConfigRefused: settings are wrong; the message has name, limit and value.
    """
    found, refusals = list[Application](), list[str]()
    for number, app in enumerate(config.applications):
        try:
            found += _read_one(config, number, app)
        except ConfigRefused as refusal:
            refusals.append(str(refusal))
    if refusals:
        raise ConfigRefused("\n".join(refusals))
    return found


def _read_one(config: ServeConfig, number: int, app: dict[str, Any]) -> Iterator[Application]:
    for name, prefix, args in our_applications({"applications": [app]}):
        settings = _validated(config, number, name, args)
        application = Application(config, number, name, prefix, settings, total_engines=settings.total_engines)
        _check_deployments(application, app.get("deployments") or ())
        yield application


def deployments_of(settings: AppSettings) -> list[str]:
    """Return the names of the deployments that the builder makes."""
    return [INGRESS, *settings.engine_names, *([STORE] if settings.shares_responses else [])]


def _check_deployments(application: Application, deployments: Any) -> None:
    """Ray would only miss one when it deploys the application."""
    made = deployments_of(application.settings)
    for number, deployment in enumerate(deployments if isinstance(deployments, list) else ()):
        name = deployment.get("name") if isinstance(deployment, dict) else deployment
        if name not in made:
            where = application.config.where("applications", application.number, "deployments", number, "name")
            raise ConfigRefused(
                f"{where}, application {application.name}: deployments.{number}.name: expected one of "
                f"{', '.join(made)} (given: {name!r})"
            )


def our_applications(config: Any) -> Iterator[tuple[str, str | None, Any]]:
    """Yield (name, route prefix, args) of the applications that our builder makes. `config` may be invalid."""
    applications = config.get("applications") if isinstance(config, dict) else None
    for app in applications or []:
        if isinstance(app, dict) and str(app.get("import_path")).replace(".build", ":build") == BUILDER:
            prefix = app.get("route_prefix", "/")
            yield str(app.get("name", "default")), None if prefix is None else str(prefix), app.get("args") or {}


def _validated(config: ServeConfig, number: int, name: str, args: Any) -> AppSettings:
    try:
        return AppSettings.model_validate(args)
    except ValidationError as error:
        reasons = (
            f"{_where(config, number, name, detail['loc'])}: {_reason(detail)}"
            for detail in error.errors(include_url=False)
        )
        raise ConfigRefused("\n".join(reasons)) from None


def _where(config: ServeConfig, number: int, name: str, setting: tuple[str | int, ...]) -> str:
    return f"{config.where('applications', number, 'args', *setting)}, application {name}"


def _reason(detail: Any) -> str:
    path = ".".join(str(part) for part in ("args", *detail["loc"]))
    hidden = isinstance(detail["input"], dict) or "auth" in detail["loc"]  # may be a key instead of its digest
    given = "" if hidden else f" (given: {detail['input']!r})"
    unknown = detail["type"] in ("unexpected_keyword_argument", "extra_forbidden")
    problem = _unknown(detail["loc"]) if unknown else detail["msg"].removeprefix("Value error, ")
    return f"{path}: {problem}{given}"


def _unknown(setting: tuple[str | int, ...]) -> str:
    """Say what a setting may have been meant for that there is not, or is not any more."""
    if (now := RENAMED.get(str(setting[-1]))) is not None:
        return f"no such setting any more: it is {now}"
    likely = meant(setting)
    return f"no such setting here; did you mean {likely}?" if likely else "no such setting here"


def _prepare(application: Application) -> None:
    settings = application.settings
    models = {"model": settings.model, "engine.speculative.model": settings.engine.speculative.model}
    for setting, model in models.items():
        try:
            if model is not None:
                prepare_model(model, weights=settings.engine.load_format != "dummy", **settings.gguf_form)
        except ModelError as error:
            raise application.refused(f"{setting}: {error}", *setting.split(".")) from error
