"""Opens one model in an ingress replica: its tokenizer, its gate, and its engines' client and end of the token channel.
Never serves HTTP, and never decides which model a request is for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

import ray
from ray.serve.handle import DeploymentHandle

from engine.protocol import AdapterRef
from serve_app.adapters.names import AdapterNames
from serve_app.admission.fleet_forecast import fleet_forecast
from serve_app.admission.gate import Gate
from serve_app.admission.room import Room
from serve_app.channel.handle_client import HandleClient
from serve_app.channel.migration import Migration
from serve_app.channel.roll_call import call_the_roll
from serve_app.channel.token_receiver import TokenReceiver
from serve_app.engines import liveness, versions
from serve_app.engines.engine_count import num_engines
from serve_app.engines.versions import EngineFacts
from serve_app.metrics.channel_counts import ChannelCounts
from serve_app.metrics.ingress_recorder import IngressRecorder
from serve_app.metrics.store_counts import StoreCounts
from serve_app.replicas.learner import Learner
from serve_app.replicas.served_model import TextSide, served_model
from serve_app.replicas.version import wanted_version
from serve_app.settings.application import AppSettings
from serve_app.settings.limits import GatePolicy


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
    learner: Learner
    roll_call: asyncio.Future[None]

    @property
    def deployment(self) -> str:
        return str(self.engine.deployment_name)

    async def ask_adapters(self) -> None:
        """Take the adapters that engines of these settings have.

        Raises:
            EngineError: an engine does not say which adapters it has.
        """
        for adapter in await self.client.adapters():
            self.names.put(adapter)


async def learn(
    facts: EngineFacts, settings: AppSettings, text: TextSide, client: HandleClient, names: AdapterNames
) -> None:
    """Take what an engine serves. One of earlier settings may have adapters that these do not name: they are not taken.

    Raises:
        EngineError: an engine does not say which adapters it has.
        ValueError: the settings do not fit the model.
    """
    client.serves(facts.config.max_request_tokens)
    names.become(served_model(settings, text, facts.config))
    found = await client.adapters() if facts.config.max_loras else []
    same = [one for one in facts.adapters if settings.lora_adapters.get(one.name) == one.path]
    for adapter in found or same:
        names.put(adapter)


def open_model(
    settings: AppSettings,
    text: TextSide,
    engine: DeploymentHandle,
    ingress: DeploymentHandle,
    policy: GatePolicy,
    room: Room | None,
    stored: StoreCounts,
    num_sharing: int,
) -> OpenModel:
    """Open a model of which no engine has told anything yet. `engine`, `ingress`: the handles of its engines and of
    this deployment. `room`: what several models share; None if this one is alone. `num_sharing`: the most engines of
    all models."""
    counts, deployment = ChannelCounts(), str(engine.deployment_name)
    versions.want(wanted_version(settings, num_sharing), deployment)
    receiver = TokenReceiver(
        ray.util.get_node_ip_address(),
        settings.max_unread_tokens,
        counts,
        engine_silence_s=settings.engine_silence_s,
        deployment=deployment,
    )
    migration = Migration(settings.max_migrations, settings.migration_timeout_s, text.longest, counts)
    gate = Gate(
        policy,
        partial(num_engines, deployment),
        forecast=partial(fleet_forecast, deployment),
        room=room,
        num_leaving=partial(liveness.num_leaving_calls, deployment),
    )
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
        served_model(settings, text, None),
        # Found by their names before an engine has read them; no request gets further with these.
        [AdapterRef(name, path, "") for name, path in settings.lora_adapters.items()],
        other_names=settings.model_names[1:],
        aliases=settings.model_aliases,
    )
    recorder = IngressRecorder(gate, counts, stored, deployment)
    roll_call = asyncio.ensure_future(call_the_roll(engine, receiver))
    learner = Learner(engine, partial(learn, settings=settings, text=text, client=client, names=names))
    return OpenModel(settings, engine, text, client, gate, names, recorder, learner, roll_call)
