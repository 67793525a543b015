"""Owns the digests that tell two versions of an engine deployment apart, as engine and ingress replicas compute them.
Never asks another process: both have the settings that they were deployed with."""

from __future__ import annotations

from hashlib import blake2b

from engine.checkpoints.model_name import Form, read_name
from engine.checkpoints.prepare import prepare_model
from engine.parallel.model_digest import file_digest, model_digest
from serve_app.engines.versions import EngineVersion
from serve_app.settings.application import AppSettings

_DIGEST_BYTES = 8
"""They travel in every report of every engine."""
_NUMBERS = ("executor", "load_format", "dtype", "quantize", "activations", "kv_cache_dtype")
"""The engine's settings that say in which numbers the model computes. Those that choose kernels, or how steps are made,
keep an answer what it is, or nearly, so that it may continue where they differ."""
_SCRIPT = ("reply", "recurrent_state", "images")
"""The same of the fake executor."""


def wanted_version(settings: AppSettings, num_sharing: int) -> EngineVersion:
    """Return what the settings of one model say of its engines; their `files` stay open. `num_sharing`: the most
    engines of all models, by which they divide a machine's memory and threads."""
    engine = settings.replica_engine
    numbers = [getattr(engine, name) for name in _NUMBERS]
    script = [getattr(engine.fake, name) for name in _SCRIPT]
    model = _digest(settings.model, *numbers, *script)
    place = (num_sharing, sorted(settings.engine_resources.items()))
    return EngineVersion(model, _digest(settings.model, engine, sorted(settings.lora_adapters.items()), place))


def files_digest(settings: AppSettings) -> str:
    """Return the digest of the model's files on this machine; empty where there are none, or the name says what they
    are. Of a GGUF file it is the file's own: it has two forms, and machines may differ in which they read.

    Raises:
        ModelError: the model cannot be found or read.
        OSError: a file cannot be read.
    """
    if settings.engine.executor == "fake" or settings.engine.load_format == "dummy":
        return ""
    name = read_name(settings.model)
    if name.form is Form.DEFAULT:
        return ""
    if name.form is Form.GGUF:
        return file_digest(name.path)[: 2 * _DIGEST_BYTES]
    directory = prepare_model(settings.model, progress=False, **settings.gguf_form)
    return model_digest(directory)[: 2 * _DIGEST_BYTES]


def _digest(*facts: object) -> str:
    return blake2b(repr(facts).encode(), digest_size=_DIGEST_BYTES).hexdigest()
