"""Contracts of loads of adapters that fail, or that meet an unload, with several engine and ingress replicas.
Never starts Ray: a broadcast calls the names and adapters of scripted replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from engine.protocol import AdapterRef, EngineError
from serve_app.adapters.named_adapters import NamedAdapters
from serve_app.adapters.names import AdapterNames
from serve_app.channel.handle_client import HandleClient
from serve_app.engines import versions
from tests.serve_app.harness import MODEL
from tests.support.conditions import until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_deployments", {})


def ref(path: str) -> AdapterRef:
    """Return the adapter that a load of this directory under the name `a` results in."""
    return AdapterRef("a", path, f"digest of {path}")


class Pause:
    """Holds up the calls about one directory until `end` is set."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_reached = False
        self.end = asyncio.Event()

    async def wait(self) -> None:
        self.is_reached = True
        await self.end.wait()


class Cache:
    """An engine's adapters in memory."""

    def __init__(self) -> None:
        self.pause: Pause | None = None

    async def load(self, path: str) -> str:
        if self.pause is not None and self.pause.path == path:
            await self.pause.wait()
        return ref(path).digest

    def unload(self, digest: str) -> None:
        return


class Engine:
    """One engine replica."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cache = Cache()
        engine: Any = SimpleNamespace(adapters=self.cache)
        self.named = NamedAdapters(engine)

    async def adapters(self) -> tuple[str, list[AdapterRef]]:
        return self.name, self.named.known

    async def load_adapter(self, name: str, path: str) -> tuple[str, AdapterRef | EngineError]:
        try:
            return self.name, await self.named.load(name, path)
        except EngineError as error:
            return self.name, error

    async def restore_adapter(self, *arguments: Any) -> None:
        self.named.restore(*arguments)

    async def unload_adapter(self, name: str) -> None:
        self.named.unload(name)


class Ingress:
    """One ingress replica. It cannot be told of the directory of `deaf_to`."""

    def __init__(self) -> None:
        self.names = AdapterNames(MODEL)
        self.deaf_to: Pause | None = None

    async def set_adapter(self, name: str, adapter: AdapterRef | None) -> None:
        if adapter is None:
            self.names.remove(name)
        elif self.deaf_to is not None and self.deaf_to.path == adapter.path:
            await self.deaf_to.wait()
            raise TimeoutError
        else:
            self.names.put(adapter)

    async def restore_adapter(self, loaded: AdapterRef, before: AdapterRef | None) -> None:
        self.names.restore(loaded, before)


def deployment(replicas: Sequence[Any]) -> Any:
    """Make a handle whose broadcast reaches every replica, also if one fails."""

    def broadcast(method: str, *arguments: Any) -> Any:
        async def results_async() -> list[Any]:
            calls = (getattr(replica, method)(*arguments) for replica in replicas)
            answers = await asyncio.gather(*calls, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
            return answers

        return SimpleNamespace(results_async=results_async)

    return SimpleNamespace(broadcast=broadcast)


@dataclass
class Server:
    """Two engine and two ingress replicas. `client`: of any ingress replica."""

    engines: list[Engine] = field(default_factory=lambda: [Engine("e1"), Engine("e2")])
    ingresses: list[Ingress] = field(default_factory=lambda: [Ingress(), Ingress()])

    @property
    def client(self) -> HandleClient:
        none: Any = None
        return HandleClient(deployment(self.engines), deployment(self.ingresses), none, none)

    async def load(self, path: str) -> AdapterRef:
        """Load the directory in place, at the first ingress replica."""
        return await self.client.load_adapter("a", path, self.ingresses[0].names.get("a"))

    async def change_elsewhere(self, then: str | None) -> None:
        """Unload the adapter at another ingress replica, and load the directory `then`."""
        await self.client.unload_adapter("a")
        if then is not None:
            await self.client.load_adapter("a", then, None)

    def check(self, path: str | None) -> None:
        """Assert that all replicas have the adapter of this directory, or none."""
        has = None if path is None else ref(path)
        assert self.in_ingresses == [has] * 2
        assert self.in_engines == [[] if has is None else [has]] * 2

    @property
    def in_engines(self) -> list[list[AdapterRef]]:
        return [engine.named.known for engine in self.engines]

    @property
    def in_ingresses(self) -> list[AdapterRef | None]:
        return [ingress.names.get("a") for ingress in self.ingresses]


async def test_a_load_that_fails_leaves_ingress_replicas_the_adapter_that_no_engine_knows_any_more() -> None:
    """Regression: engines that have restarted know nothing of it, and the undo took it from every ingress replica."""
    at = Server()
    for ingress in at.ingresses:
        ingress.names.put(ref("/before"))
    at.ingresses[1].deaf_to = pause = Pause("/after")
    pause.end.set()
    with pytest.raises(EngineError, match="A replica does not answer"):
        await at.load("/after")
    assert at.in_ingresses == [ref("/before")] * 2
    assert at.in_engines == [[], []]


async def test_a_load_that_is_undone_takes_back_what_it_has_put_in_place() -> None:
    at = Server()
    await at.load("/before")
    at.ingresses[1].deaf_to = pause = Pause("/after")
    pause.end.set()
    with pytest.raises(EngineError, match="A replica does not answer"):
        await at.load("/after")
    at.check("/before")


CHANGES = pytest.mark.parametrize("then", [None, "/other"])


@CHANGES
async def test_what_another_ingress_replica_changes_while_engines_load_is_not_undone(then: str | None) -> None:
    """Regression: an adapter that was unloaded while another was loaded in its place was back in the engines."""
    at = Server()
    await at.load("/before")
    at.engines[1].cache.pause = pause = Pause("/after")
    loading = asyncio.create_task(at.load("/after"))
    await until(lambda: pause.is_reached)
    await at.change_elsewhere(then)
    pause.end.set()
    with pytest.raises(EngineError, match="a was unloaded"):
        await loading
    at.check(then)


@CHANGES
async def test_what_another_ingress_replica_changes_while_ingress_replicas_are_told_is_not_undone(
    then: str | None,
) -> None:
    """Regression: as above, in the ingress replicas."""
    at = Server()
    await at.load("/before")
    at.ingresses[1].deaf_to = pause = Pause("/after")
    loading = asyncio.create_task(at.load("/after"))
    await until(lambda: pause.is_reached)
    await at.change_elsewhere(then)
    pause.end.set()
    with pytest.raises(EngineError, match="A replica does not answer"):
        await loading
    at.check(then)


async def test_the_undo_of_a_load_leaves_another_load_of_the_name_alone() -> None:
    """Regression: it withdrew every load of the name that was under way."""
    at = Server()
    for engine in at.engines:
        engine.cache.pause = Pause("/other")
    pauses = [engine.cache.pause for engine in at.engines]
    other = asyncio.create_task(at.client.load_adapter("a", "/other", None))
    await until(lambda: all(pause is not None and pause.is_reached for pause in pauses))
    at.ingresses[1].deaf_to = deaf = Pause("/after")
    deaf.end.set()
    with pytest.raises(EngineError, match="A replica does not answer"):
        await at.load("/after")
    for pause in pauses:
        assert pause is not None
        pause.end.set()
    await other
    at.check("/other")
