"""Owns what is checked and prepared before `serve run` starts Ray: our applications' settings, and their models.
Never starts anything. Without it a misspelt setting is found by a Ray task, and told in a page of its tracebacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from engine.prepare import ModelError, prepare_model
from serve_app.settings import AppSettings

BUILDER = "serve_app.app:build"


class ConfigRefused(Exception):
    """The config cannot be served. The message has a line for each reason."""


def preflight(config_path: Path) -> None:
    """Check every application of ours in a `serve run` config, and prepare its models with visible progress.

    Raises:
        ConfigRefused: settings are wrong, by name, limit and value; or a model cannot be prepared.
    """
    for name, args in our_applications(yaml.safe_load(config_path.read_text())):
        settings = _validated(f"{config_path}, application {name}", args)
        if settings.engine.executor == "torch":
            _prepare(f"{config_path}, application {name}", settings)


def our_applications(config: Any) -> Iterator[tuple[str, Any]]:
    """(name, args) of the applications that our builder makes. What is no Serve config is left to Ray to refuse."""
    applications = config.get("applications") if isinstance(config, dict) else None
    for app in applications or []:
        if isinstance(app, dict) and str(app.get("import_path")).replace(".build", ":build") == BUILDER:
            yield str(app.get("name", "default")), app.get("args") or {}


def _validated(where: str, args: Any) -> AppSettings:
    try:
        return AppSettings.model_validate(args)
    except ValidationError as error:
        raise ConfigRefused("\n".join(_reason(where, detail) for detail in error.errors())) from None


def _reason(where: str, detail: Any) -> str:
    path = ".".join(str(part) for part in ("args", *detail["loc"]))
    hidden = isinstance(detail["input"], dict) or "auth" in detail["loc"]  # somebody's key, in the place of its digest
    given = "" if hidden else f" (given: {detail['input']!r})"
    return f"{where}: {path}: {detail['msg']}{given}"


def _prepare(where: str, settings: AppSettings) -> None:
    models = {"model": settings.model, "engine.speculative.model": settings.engine.speculative.model}
    for setting, model in models.items():
        try:
            if model is not None:
                prepare_model(model, weights=settings.engine.load_format != "dummy")
        except ModelError as error:
            raise ConfigRefused(f"{where}: args.{setting}: {error}") from error
