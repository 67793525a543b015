"""Checks this machine before `serve run` starts Ray on it: port, files, modules, memory, kernels.
Never checks anything for a cluster that already runs, because its engines may be on other machines."""

from __future__ import annotations

import os
import pickle
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from engine.build.check import COMMAND, REFUSED
from engine.checkpoints.prepare import ModelError, prepare_model
from engine.config import ResolvedConfig
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.auth.keys import Keys, KeysFileError
from serve_app.front.arguments import Arguments
from serve_app.front.config_file import ConfigRefused, ServeConfig, address_of, has_proxies
from serve_app.front.modules import check_modules
from serve_app.front.preflight import Application
from serve_app.replicas.default_sampling import default_sampling
from serve_app.settings.features import refused_images
from serve_app.settings.ranks import ONE_NODE
from serve_app.tracing.export import MissingExporter, check_exporter


@contextmanager
def checking(config: ServeConfig, applications: list[Application], arguments: Arguments) -> Iterator[list[EngineCheck]]:
    """Run the quick checks, and start the engines' checks, which load torch, in processes of their own.

    Raises:
        ConfigRefused: the port is not free, or a file or module that an application needs does not exist.
    """
    check_port(config)
    check_modules(config, arguments)
    for application in applications:
        _check_ingress(application)
    checks: list[EngineCheck] = []
    try:
        checks += [EngineCheck.start(model) for application in applications for model in application.each_model()]
        yield checks
    finally:
        for check in checks:
            check.end()


def check_port(config: ServeConfig) -> None:
    """Raises ConfigRefused: the config's address is unknown here, or not free."""
    if not has_proxies(config):
        return
    host, port = address_of(config)
    where = config.where("http_options", "port")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # sockets may be in TIME_WAIT
            probe.bind(address)
            probe.listen(1)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: not a name
        host_at = config.where("http_options", "host")
        told = getattr(error, "strerror", None) or "not a host name"
        raise ConfigRefused(f"{host_at}: http_options.host: {told} (given: {host!r})") from None
    except OSError as error:
        raise ConfigRefused(
            f"{where}: http_options.port {port} on {host} is not free: {error.strerror}. Stop what listens there, or "
            "choose another port."
        ) from None


def _check_ingress(application: Application) -> None:
    """Check what an ingress replica would only find when it starts."""
    for refusal in missing_files(application):
        raise refusal
    for model in application.each_model():
        for refusal in (*missing_adapters(model), *missing_tier_keys(model)):
            raise refusal
        settings = model.settings
        if settings.engine.executor == "torch":
            prepared = prepare_model(settings.model, weights=False, progress=False, **settings.tokenizer_form)
            check_tokenizer(model, prepared)
            check_sampling(model, prepared)


def missing_files(application: Application) -> Iterator[ConfigRefused]:
    """Yield a refusal for each file or library that an ingress replica would miss when it starts."""
    settings = application.settings
    try:
        check_exporter(settings.tracing)
    except MissingExporter as error:
        yield application.refused(f"tracing.exporter: {error}", "tracing", "exporter")
    try:
        Keys.load(settings.auth)
    except KeysFileError as error:
        yield application.refused(str(error), "auth", "keys_file")


def missing_adapters(model: Application) -> Iterator[ConfigRefused]:
    """Yield a refusal for each directory of an adapter that is not there."""
    settings = model.settings
    for name, directory in settings.lora_adapters.items():
        if settings.engine.executor == "torch" and (why := why_missing(directory, stat.S_IFDIR)) is not None:
            yield model.refused(f"lora_adapters.{name}: there is no directory {directory}{why}", "lora_adapters", name)


def missing_tier_keys(model: Application) -> Iterator[ConfigRefused]:
    """Yield a refusal if the file with the key of a disk tier is not there. The engine's check reads it."""
    path = model.settings.engine.kv_tiers.disk_key_file
    if path is not None and (why := why_missing(path)) is not None:
        setting = ("engine", "kv_tiers", "disk_key_file")
        yield model.refused(f"{'.'.join(setting)}: there is no file {path}{why}", *setting)


def why_missing(path: str, kind: int = stat.S_IFREG) -> str | None:
    """Return None if there is a file at `path`, or a directory if that is the `kind`; else "", or why nobody knows."""
    try:
        return None if stat.S_IFMT(os.stat(path).st_mode) == kind else ""
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no path, as with a null character
        return ""
    except OSError as error:  # such as a directory that this user may not look into
        return f": {error.strerror}"


def check_sampling(application: Application, model_dir: Path) -> None:
    """Raises ConfigRefused: the model's generation_config.json is to be used and cannot be."""
    try:
        default_sampling(application.settings.default_sampling, model_dir)
    except ModelError as error:
        raise application.refused(f"default_sampling.source: {error}", "default_sampling", "source") from error


def check_tokenizer(application: Application, model_dir: Path) -> None:
    """Raises ConfigRefused: the tokenizer or chat template of an application's model cannot be used."""
    try:
        Tokenizer.from_dir(model_dir)
    except (FileNotFoundError, ValueError) as error:
        raise application.refused(f"model: {error}", "model") from error


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """Finds out in a process of its own whether an application's engines could start here."""

    application: Application
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, application: Application) -> EngineCheck:
        settings = application.settings
        hidden = {} if settings.engine_num_gpus else {"CUDA_VISIBLE_DEVICES": ""}  # as Ray hides GPUs from such engines
        ranks_apart = settings.tensor_parallel_placement != ONE_NODE
        with TemporaryFile() as request:
            pickle.dump((settings.model, settings.replica_engine, application.total_engines, ranks_apart), request)
            request.seek(0)
            process = subprocess.Popen(
                COMMAND,
                stdin=request,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **hidden},
                text=True,
            )
        return cls(application, process)

    def finish(self) -> ResolvedConfig:
        """Wait for the answer, and return the config that the engines would serve.

        Raises:
            ConfigRefused: the engines could not start.
        """
        said, problem = self.process.communicate()
        if status := self.process.returncode:
            lines = problem.strip().splitlines()
            last = lines[-1] if lines else f"the check of the engine ended with status {status}"
            setting = last.split()[0] if status == REFUSED else ""  # most refusals begin with the setting's name
            raise self.application.refused(f"engine: {last}", "engine", *setting.split("."))
        resolved: ResolvedConfig = pickle.loads(bytes.fromhex(said.splitlines()[-1]))
        settings = self.application.settings
        refusal = refused_images(settings.images, settings.model_id)
        if refusal and "image" not in [kind.name for kind in resolved.inputs]:
            raise self.application.refused(refusal, "images")
        return resolved

    def end(self) -> None:
        """Stop the process; its answer is no longer needed."""
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.kill()
        self.process.wait()
