"""Finds what is wrong with a config as far as it can be known at once: keys, values, what excludes what, missing files.
Never downloads, converts or starts anything, and never loads torch: `check --explain` asks the engine's own check."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoints.model_cache import ModelError
from engine.checkpoints.model_name import ready_directory
from engine.host.cores import refused_threads
from serve_app.front.arguments import Arguments
from serve_app.front.config_file import ConfigRefused, ServeConfig, read_config, refuse_tls
from serve_app.front.haproxy import HAProxyUnusable, private_haproxy
from serve_app.front.modules import check_modules
from serve_app.front.preflight import Application, read_applications
from serve_app.front.proxy_env import ENABLE
from serve_app.front.this_machine import (
    check_sampling,
    check_tokenizer,
    missing_adapters,
    missing_files,
    missing_tier_keys,
    why_missing,
)
from serve_app.front.threads import thread_warnings
from serve_app.settings.ranks import ONE_NODE

_FILES_OF_TLS = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")


@dataclass(frozen=True, slots=True)
class Findings:
    """`problems` and `warnings`: a line each. `applications`: this project's own, if their settings are right."""

    problems: list[str]
    applications: list[Application]
    warnings: list[str]


def find_problems(path: Path) -> Findings:
    """Check the Serve config at `path` and everything that it names on this machine."""
    problems: list[str] = []
    applications: list[Application] = []
    config: ServeConfig | None = None

    def collect(look: Callable[[], object]) -> None:
        try:
            look()
        except ConfigRefused as refusal:
            problems.extend(str(refusal).splitlines())

    def read() -> None:
        nonlocal config
        config = read_config(path)

    collect(read)
    if config is not None:
        found = config
        collect(lambda: _check_tls(found))
        collect(lambda: check_modules(found, Arguments.read(["run", str(path)], os.environ)))
        collect(lambda: applications.extend(read_applications(found)))
    for application in applications:
        refusals = list(missing_files(application))
        for model in application.each_model():
            refusals += [
                *missing_adapters(model),
                *missing_tier_keys(model),
                *_too_many_threads(model),
                *_refused_models(model),
            ]
        problems.extend(line for refusal in refusals for line in str(refusal).splitlines())
    return Findings(problems, applications, [] if problems else thread_warnings(applications))


def _check_tls(config: ServeConfig) -> None:
    """Raises ConfigRefused: the server would have HAProxy in front, which has no TLS, or a file of TLS is not there."""
    http = config.content.get("http_options") or {}
    for key in _FILES_OF_TLS:
        if http.get(key) is not None and (why := why_missing(str(http[key]))) is not None:
            where = config.where("http_options", key)
            raise ConfigRefused(f"{where}: http_options.{key}: there is no file {http[key]}{why}")
    try:
        refuse_tls(config)
    except ConfigRefused:
        if os.environ.get(ENABLE, "1") == "1" and _haproxy_runs():
            raise


def _haproxy_runs() -> bool:
    try:
        with private_haproxy(os.environ):
            return True
    except HAProxyUnusable:
        return False


def _too_many_threads(model: Application) -> Iterator[ConfigRefused]:
    """Yield the refusal that the engine's own check, for which torch would be loaded, has for its threads."""
    engine = model.settings.engine
    if engine.executor != "torch" or engine.num_threads is None:
        return
    if model.settings.tensor_parallel_placement != ONE_NODE:  # they are the threads of several machines
        return
    if (refusal := refused_threads(engine.num_threads)) is not None:
        yield model.refused(f"engine.{refusal}", "engine", "num_threads")


def _refused_models(application: Application) -> Iterator[ConfigRefused]:
    """Yield a refusal for each model that has no known form, is not there, or lacks a file. What a hub has, and what a
    GGUF file holds, is not known before it is prepared."""
    settings = application.settings
    if settings.engine.executor != "torch":
        return
    weights = settings.engine.load_format != "dummy"
    models = {"model": settings.model, "engine.speculative.model": settings.engine.speculative.model}
    for name, model in models.items():
        if model is None:
            continue
        try:
            directory = ready_directory(model, weights=weights, thorough=False, **settings.gguf_form)
            if directory is not None and name == "model":
                check_tokenizer(application, directory)
                check_sampling(application, directory)
        except ModelError as error:
            yield application.refused(f"{name}: {' '.join(str(error).split())}", *name.split("."))
        except ConfigRefused as refusal:
            yield refusal
