"""Reads a file with an LLMConfig of Ray Serve LLM, and makes a Serve config of this project's application from it.
Never knows what a field of an LLMConfig means: `serve_app.llm_config` does."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from serve_app.front.command.base_config import base_config
from serve_app.front.config_file import ConfigRefused, read_config
from serve_app.llm_config.convert import convert
from serve_app.llm_config.several import together
from serve_app.llm_config.taking import Note, Taking, merge
from serve_app.settings.application import AppSettings

RAY_BUILDER = "ray.serve.llm:build_openai_app"
_MODELS = "llm_configs"
_EXPECTED = (
    f"expected a Serve config with `import_path: {RAY_BUILDER}`, or a mapping with `{_MODELS}:` or with "
    "`model_loading_config:`"
)
_INGRESS, _INGRESS_CLASS = "ingress_deployment_config", "ingress_cls_config"
_KEPT = ("name", "route_prefix", "runtime_env", "logging_config")
"""Keys of an application that mean the same for ours."""
_ENVIRONMENT = "runtime_env"


@dataclass(frozen=True, slots=True)
class Converted:
    config: dict[str, Any]
    """A Serve config."""
    notes: list[Note]


def convert_file(path: Path, model_id: str | None) -> Converted:
    """Convert the file at `path`. `model_id`: the only LLMConfig to convert; None: all of them.

    Raises:
        ConfigRefused: it is no such file, or has no such model, or what it asks for is beyond the limits of a setting.
        The message has a line for each reason.
    """
    content = _read(path)
    if "applications" not in content:
        application, args = None, content if _MODELS in content else {_MODELS: [content]}
    else:
        config = copy.deepcopy(read_config(path).content)
        number = _number_of(path, config["applications"])
        application = config["applications"][number]
        args = application.get("args") or {}
    chosen = _chosen(path, args, model_id)
    taking = together({name: convert(one, _base) for name, one in chosen.items()})
    _read_serving(taking, args, application or {})
    made = base_config("", on_gpu=taking.on_gpu)
    ours = made["applications"][0]
    ours |= {name: application[name] for name in _KEPT if application and name in application}
    _settle_environment(taking, ours, chosen)
    ours["args"] = taking.args
    _validate(path, taking)
    if application is None:
        return Converted(made, taking.notes)
    config["applications"][number] = ours  # the rest keeps Ray's defaults, such as every address to listen on
    return Converted(config, taking.notes)


def _base(on_gpu: bool) -> dict[str, Any]:
    args: dict[str, Any] = base_config("", on_gpu=on_gpu)["applications"][0]["args"]
    return args


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigRefused(f"{path}: {error.strerror}: {_EXPECTED}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigRefused(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    known = ("applications", _MODELS, "model_loading_config")
    if not isinstance(content, dict) or not any(key in content for key in known):
        raise ConfigRefused(f"{path}: {_EXPECTED}")
    return content


def _number_of(path: Path, applications: list[dict[str, Any]]) -> int:
    """Find the application that Ray's builder makes."""
    paths = [str(app["import_path"]) for app in applications]
    found = [number for number, name in enumerate(paths) if name in (RAY_BUILDER, RAY_BUILDER.replace(":", "."))]
    if len(found) == 1:
        return found[0]
    has = f"{len(found)} applications have it" if found else f"there are {', '.join(paths)}"
    raise ConfigRefused(f"{path}: expected one application with `import_path: {RAY_BUILDER}`; {has}")


def _chosen(path: Path, args: Any, model_id: str | None) -> dict[str, dict[str, Any]]:
    """Return the LLMConfigs to convert, by their model_id."""
    given = args.get(_MODELS) if isinstance(args, dict) else None
    if not isinstance(given, list) or not given:
        raise ConfigRefused(f"{path}: {_MODELS}: expected a list of at least one LLMConfig, or paths to files with one")
    inline = [_inline(path, one) for one in given]
    names = [str(_name_of(one)) for one in inline]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigRefused(f"{path}: {_MODELS}: two have the model_id {twice[0]}")
    models = dict(zip(names, inline, strict=True))
    if model_id is None:
        return models
    if model_id not in models:
        raise ConfigRefused(f"--model: expected one of {', '.join(models)} (given: {model_id!r})")
    return {model_id: models[model_id]}


def _inline(path: Path, given: Any) -> dict[str, Any]:
    """Read an LLMConfig that is given by its path, which Ray takes from its current directory."""
    if isinstance(given, str):
        beside = path.parent / given
        place = beside if beside.is_file() else Path(given)
        if "model_loading_config" not in (content := _read(place)):
            raise ConfigRefused(f"{place}: expected an LLMConfig, with `model_loading_config:`")
        return content
    if not isinstance(given, dict) or "model_loading_config" not in given:
        raise ConfigRefused(f"{path}: {_MODELS}: expected a mapping with `model_loading_config:`, or a path")
    return given


def _name_of(model: dict[str, Any]) -> Any:
    loading = model["model_loading_config"]
    return loading.get("model_id") if isinstance(loading, dict) else None


def _read_serving(taking: Taking, args: dict[str, Any], application: dict[str, Any]) -> None:
    """Read what stands beside the LLMConfigs: the ingress, and Ray's overrides of deployments."""
    ingress = taking.mapping(_INGRESS, args.get(_INGRESS))
    bounds = taking.mapping(f"{_INGRESS}.autoscaling_config", ingress.get("autoscaling_config"))
    asked, least = ingress.get("num_replicas"), bounds.get("min_replicas")
    count = next((one for one in (asked, least) if isinstance(one, int)), None)
    if count is not None:
        taking.put("ingress_replicas", max(1, count))
    fixed = f"the number of ingress replicas is fixed: taken as {max(1, count or 1)}"
    if not isinstance(asked, int | None):  # Ray also takes `auto`
        taking.changed(f"{_INGRESS}.num_replicas", asked, fixed)
    if bounds.get("max_replicas", count) != count or not isinstance(least, int | None):
        taking.changed(f"{_INGRESS}.autoscaling_config", bounds, fixed)
    actor = taking.mapping(f"{_INGRESS}.ray_actor_options", ingress.get("ray_actor_options"))
    if (cpus := actor.get("num_cpus")) is not None:
        taking.put("ingress_num_cpus", cpus)
    taking.leave_out_rest(f"{_INGRESS}.ray_actor_options", actor, {"num_cpus"}, "an ingress replica reserves CPUs")
    known = {"num_replicas", "autoscaling_config", "ray_actor_options"}
    taking.leave_out_rest(_INGRESS, ingress, known, "the ingress is chunkserve's own; `admission` has its limits")
    custom = taking.mapping(_INGRESS_CLASS, args.get(_INGRESS_CLASS))
    if custom and not str(custom.get("ingress_cls", "")).endswith("OpenAiIngress"):
        taking.unsupported(_INGRESS_CLASS, custom, "the ingress is chunkserve's own")
    known = {_MODELS, _INGRESS, _INGRESS_CLASS, "model_loading_config"}
    if _MODELS in args:
        taking.leave_out_rest("args", args, known, "Ray Serve LLM has no such field")
    if (deployments := application.get("deployments")) is not None:
        taking.leave_out("deployments", deployments, "they name Ray Serve LLM's deployments; set the settings instead")


def _settle_environment(taking: Taking, ours: dict[str, Any], models: dict[str, dict[str, Any]]) -> None:
    """Put the runtime environments together, without vLLM's variables. Ray gives an application's to all of it."""
    environment = ours.pop(_ENVIRONMENT, None) or {}
    for model_id, model in models.items():
        deployment = model.get("deployment_config")
        actor = deployment.get("ray_actor_options") if isinstance(deployment, dict) else None
        its_own = actor.get(_ENVIRONMENT) if isinstance(actor, dict) else None
        given = {_ENVIRONMENT: model.get(_ENVIRONMENT), f"ray_actor_options.{_ENVIRONMENT}": its_own}
        for name, one in given.items():
            if not (isinstance(one, dict) and one):
                continue
            path = name if len(models) == 1 else f"{model_id}: {name}"
            before, environment = environment, merge(environment, one)
            if environment == merge(one, before):
                taking.changed(path, one, "taken as the application's, so that ingress replicas have it, too")
            else:
                taking.unsupported(path, one, "another value stands before it, and an application has one environment")
                environment = before
    if isinstance(variables := environment.get("env_vars"), dict):
        kept = {name: value for name, value in variables.items() if not str(name).startswith("VLLM_")}
        environment = {**environment, "env_vars": kept}
        if not kept:
            del environment["env_vars"]
    if environment:
        ours[_ENVIRONMENT] = environment


def _validate(path: Path, taking: Taking) -> None:
    if unnamed := [note for note in taking.notes if note.path.endswith("model_loading_config.model_id")]:
        raise ConfigRefused(f"{path}: {unnamed[0].path}: {unnamed[0].text}")
    try:
        AppSettings.model_validate(taking.args)
    except ValidationError as error:
        lines = (
            f"{path}: it would become {'.'.join(map(str, one['loc'])) or 'settings'}: {one['msg']}"
            for one in error.errors(include_url=False)
        )
        raise ConfigRefused("\n".join(lines)) from None
