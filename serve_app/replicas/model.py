"""Opens one model in an ingress replica: its tokenizer, its gate, and its engines' client and end of the token channel.
Never serves HTTP, and never decides which model a request is for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pydantic_core
import ray
from ray.serve.handle import DeploymentHandle

from engine.checkpoints.prepare import prepare_model
from engine.config import ResolvedConfig
from engine.protocol import AdapterRef
from serve_app.adapters.names import AdapterNames
from serve_app.admission.fleet_forecast import fleet_forecast
from serve_app.admission.gate import Gate
from serve_app.admission.room import Room
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.channel.handle_client import HandleClient
from serve_app.channel.migration import Migration
from serve_app.channel.roll_call import call_the_roll
from serve_app.channel.token_receiver import TokenReceiver
from serve_app.engines.engine_client import ServedModel
from serve_app.engines.engine_count import num_engines
from serve_app.images.intake import ImageIntake
from serve_app.metrics.channel_counts import ChannelCounts
from serve_app.metrics.ingress_recorder import IngressRecorder
from serve_app.metrics.store_counts import StoreCounts
from serve_app.parsing.choice import chosen_parser
from serve_app.parsing.reasoning_parsers import suggest_reasoning_parser
from serve_app.parsing.tools import suggest_tool_parser
from serve_app.settings.application import AppSettings
from serve_app.settings.features import refused_images
from serve_app.settings.limits import GatePolicy

_ASSUMED_MODEL_LEN = 4096
"""The context of a model that has not been awake and whose files do not say it; only shown in the list of models."""


@dataclass(slots=True)
class TextSide:
    """What is read of a model without its engines."""

    tokenizer: Tokenizer
    created: int
    """When its files were written, in seconds since 1970."""
    longest: int
    """About the tokens of its context."""


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model, as if it were the only one. `client` reaches its engines; `roll_call` runs until it is cancelled."""

    settings: AppSettings
    engine: DeploymentHandle
    text: TextSide
    client: HandleClient
    gate: Gate
    names: AdapterNames
    recorder: IngressRecorder
    roll_call: asyncio.Future[None]

    @property
    def deployment(self) -> str:
        return str(self.engine.deployment_name)

    async def learn(self, resolved: ResolvedConfig) -> None:
        """Take what an engine serves.

        Raises:
            EngineError: an engine does not say which adapters it has.
            ValueError: the settings do not fit the model.
        """
        self.client.serves(resolved.max_request_tokens)
        self.names.become(_served_model(self.settings, self.text, resolved))
        for adapter in await self.client.adapters() if resolved.max_loras else ():
            self.names.put(adapter)


def open_model(
    settings: AppSettings,
    text: TextSide,
    engine: DeploymentHandle,
    ingress: DeploymentHandle,
    policy: GatePolicy,
    room: Room | None,
    stored: StoreCounts,
) -> OpenModel:
    """Open a model of which no engine has told anything yet. `engine`, `ingress`: the handles of its engines and of
    this deployment. `room`: what several models share; None if this one is alone."""
    counts, deployment = ChannelCounts(), str(engine.deployment_name)
    receiver = TokenReceiver(
        ray.util.get_node_ip_address(),
        settings.max_unread_tokens,
        counts,
        engine_silence_s=settings.engine_silence_s,
        deployment=deployment,
    )
    migration = Migration(settings.max_migrations, settings.migration_timeout_s, text.longest, counts)
    gate = Gate(policy, partial(num_engines, deployment), forecast=partial(fleet_forecast, deployment), room=room)
    client = HandleClient(
        # Calls by value use gRPC, which takes two thirds of the time of Ray's streaming actor calls to set up.
        engine.options(_by_reference=False),
        ingress,
        receiver,
        migration,
        lambda: gate.num_waiting,
        may_sleep=settings.may_sleep,
        large=engine,
        deployment=deployment,
        model_id=None if room is None else settings.model_id,
    )
    names = AdapterNames(
        _served_model(settings, text, None),
        # Found by their names before an engine has read them; no request gets further with these.
        [AdapterRef(name, path, "") for name, path in settings.lora_adapters.items()],
        other_names=settings.model_names[1:],
        aliases=settings.model_aliases,
    )
    recorder = IngressRecorder(gate, counts, stored, deployment)
    roll_call = asyncio.ensure_future(call_the_roll(engine, receiver))
    return OpenModel(settings, engine, text, client, gate, names, recorder, roll_call)


def _served_model(settings: AppSettings, text: TextSide, resolved: ResolvedConfig | None) -> ServedModel:
    """`resolved`: None before an engine has told; then nothing is known of images, and little of the context."""
    template = text.tokenizer.chat_template.source if text.tokenizer.chat_template else None
    return ServedModel(
        id=settings.model_id,
        max_model_len=text.longest if resolved is None else resolved.max_request_tokens,
        created=text.created,
        tool_parser=chosen_parser("tool_parser", settings.tool_parser, template, suggest_tool_parser),
        pooling=None if settings.pooling == "none" else settings.pooling,
        reasoning_parser=chosen_parser(
            "reasoning_parser", settings.reasoning_parser, template, suggest_reasoning_parser
        ),
        images=None if resolved is None else _image_intake(settings, resolved),
        targets=settings.engine.targets if resolved is None else resolved.targets,
    )


def _image_intake(settings: AppSettings, resolved: ResolvedConfig) -> ImageIntake | None:
    kind = next((kind for kind in resolved.inputs if kind.name == "image"), None)
    if kind is None and (refusal := refused_images(settings.images, settings.model_id)):
        raise ValueError(refusal)
    return None if kind is None else ImageIntake(kind, settings.images)


def read_text_side(settings: AppSettings) -> TextSide:
    """Read the model's tokenizer. Its creation time is when its GGUF file, or else its config.json, was written. It is
    the same in replicas that read the same file, and not in those with a cache of their own, or with the packaged
    default, which has no file but its prepared form."""
    if settings.engine.executor == "fake":
        tokenizer = Tokenizer.byte_level(images=settings.engine.fake.images)
        return TextSide(tokenizer, 0, settings.engine.max_model_len or _ASSUMED_MODEL_LEN)
    path = prepare_model(settings.model, weights=settings.engine.load_format != "dummy", **settings.tokenizer_form)
    written = Path(settings.model).expanduser() if settings.model.endswith(".gguf") else path / "config.json"
    longest = settings.engine.max_model_len or _trained_length(path / "config.json")
    return TextSide(Tokenizer.from_dir(path), int(written.stat().st_mtime), longest)


def _trained_length(config: Path) -> int:
    found = pydantic_core.from_json(config.read_bytes())
    text = found.get("text_config", found)
    length = text.get("max_position_embeddings")
    return length if isinstance(length, int) else _ASSUMED_MODEL_LEN
