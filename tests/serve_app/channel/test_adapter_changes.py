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

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_deployments", {})


def ref(path: str) -> AdapterRef:
    """Return the adapter that a load of this directory under the name `a` results in."""
    return AdapterRef("a", path, f"digest of {path}")


class Cache:
    """An engine's adapters in memory. A load waits for `may_load`."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def load(self, path: str) -> str:
        self.num_waiting += 1
        await self.may_load.wait()
        self.num_waiting -= 1
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
    """One ingress replica."""

    def __init__(self) -> None:
        self.names = AdapterNames(MODEL)
        self.is_deaf = False

    async def set_adapter(self, name: str, adapter: AdapterRef | None) -> None:
        if self.is_deaf:
            raise TimeoutError
        if adapter is None:
            self.names.remove(name)
        else:
            self.names.put(adapter)


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
    at.ingresses[1].is_deaf = True
    with pytest.raises(EngineError, match="A replica does not answer"):
        await at.load("/after")
    assert at.in_ingresses == [ref("/before")] * 2
    assert at.in_engines == [[], []]
