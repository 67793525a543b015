"""Owns what is made of a model's settings by whoever serves it: the tokenizer, the model's facts, a warm engine.
Never imports Ray: the library `chunkserve` serves in its own process."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from uuid import uuid4

import pydantic_core

from engine.async_engine import AsyncEngine
from engine.checkpoints.prepare import prepare_model
from engine.config import EngineConfig, ResolvedConfig
from engine.host.cores import usable_threads
from engine.protocol import EngineError, Failed, SamplingParams, Submission
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import SamplingDefaults, ServedModel
from serve_app.images.intake import ImageIntake
from serve_app.parsing.choice import chosen_parser
from serve_app.parsing.reasoning_parsers import suggest_reasoning_parser
from serve_app.parsing.tools import suggest_tool_parser
from serve_app.replicas.default_sampling import default_sampling, told
from serve_app.settings.application import AppSettings
from serve_app.settings.features import refused_images

logger = logging.getLogger(__name__)

_ASSUMED_MODEL_LEN = 4096
"""The context of a model that has not been awake and whose files do not say it; only shown in the list of models."""


@dataclasses.dataclass(slots=True)
class TextSide:
    """What is read of a model without its engines."""

    tokenizer: Tokenizer
    created: int
    """When its files were written, in seconds since 1970."""
    longest: int
    """About the tokens of its context."""
    sampling: SamplingDefaults = dataclasses.field(default_factory=SamplingDefaults)


def read_text_side(settings: AppSettings, *, progress: bool = True) -> TextSide:
    """Read the model's tokenizer. Its creation time is when its GGUF file, or else its config.json, was written. It is
    the same in replicas that read the same file, and not in those with a cache of their own, or with the packaged
    default, which has no file but its prepared form."""
    if settings.engine.executor == "fake":
        tokenizer = Tokenizer.byte_level(images=settings.engine.fake.images)
        longest = settings.engine.max_model_len or _ASSUMED_MODEL_LEN
        return TextSide(tokenizer, 0, longest, default_sampling(settings.default_sampling, None))
    weights = settings.engine.load_format != "dummy"
    path = prepare_model(settings.model, progress=progress, weights=weights, **settings.tokenizer_form)
    written = Path(settings.model).expanduser() if settings.model.endswith(".gguf") else path / "config.json"
    longest = settings.engine.max_model_len or _trained_length(path / "config.json")
    sampling = default_sampling(settings.default_sampling, path)
    logger.info("%s: what a request does not set: %s", settings.model_id, told(sampling))
    return TextSide(Tokenizer.from_dir(path), int(written.stat().st_mtime), longest, sampling)


def _trained_length(config: Path) -> int:
    found = pydantic_core.from_json(config.read_bytes())
    text = found.get("text_config", found)
    length = text.get("max_position_embeddings")
    return length if isinstance(length, int) else _ASSUMED_MODEL_LEN


def served_model(settings: AppSettings, text: TextSide, resolved: ResolvedConfig | None) -> ServedModel:
    """Return the facts of the model. `resolved`: the config of an engine. None before one has told: then nothing is
    known of images, and little of the context.

    Raises:
        ValueError: the settings have limits of images, and the model takes none.
    """
    found = (text.tokenizer.template_for(tools=tools) for tools in (False, True))
    template, tool_template = (None if one is None else one.source for one in found)
    return ServedModel(
        id=settings.model_id,
        max_model_len=text.longest if resolved is None else resolved.max_request_tokens,
        created=text.created,
        tool_parser=chosen_parser("tool_parser", settings.tool_parser, tool_template, suggest_tool_parser),
        pooling=None if settings.pooling == "none" else settings.pooling,
        reasoning_parser=chosen_parser(
            "reasoning_parser", settings.reasoning_parser, template, suggest_reasoning_parser
        ),
        images=None if resolved is None else _image_intake(settings, resolved),
        targets=settings.engine.targets if resolved is None else resolved.targets,
        sampling=text.sampling,
    )


def _image_intake(settings: AppSettings, resolved: ResolvedConfig) -> ImageIntake | None:
    kind = next((kind for kind in resolved.inputs if kind.name == "image"), None)
    if kind is None and (refusal := refused_images(settings.images, settings.model_id)):
        raise ValueError(refusal)
    return None if kind is None else ImageIntake(kind, settings.images)


def share_threads(engine: EngineConfig, engine_replicas: int) -> EngineConfig:
    """Give each engine its share of the threads that can compute here, unless the config sets their number: replicas
    with one thread per core each would compete for the cores."""
    if engine.num_threads is not None:
        return engine
    threads, _ = usable_threads()
    return dataclasses.replace(engine, num_threads=max(1, threads // engine_replicas))


async def warm_up(engine: AsyncEngine) -> None:
    """Run the largest prefill step and a decode step. The first ones of a process are slow, because threads start and
    operators choose their code, and no request should wait for that. The prompt has a salt of its own: otherwise a
    disk would have it from the start before, and there would be nothing to compute.

    Raises:
        EngineError: the engine cannot serve.
    """
    config = engine.config
    prompt = (0,) * max(1, min(config.max_prefill_tokens, config.max_request_tokens - 2))
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=0, ignore_eos=True, max_tokens=2)
    submission = Submission("warm-up", prompt, sampling, cache_salt=uuid4().hex)
    if config.headless:
        submission = dataclasses.replace(submission, sampling=SamplingParams(max_tokens=0), pooling="last")
    async for events in engine.stream(submission):
        for event in events:
            if isinstance(event, Failed):
                raise EngineError(event.code, f"The engine failed to warm up: {event.message}")
    if not config.kv_tiers.any:  # which a reset would wipe, and they have what engines before this one have computed
        await engine.reset_prefix_cache()
