"""Contracts of adapters in an engine: which are in memory, which requests hold them, and which prefixes they share."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from torch import Tensor

from engine.async_engine import AsyncEngine
from engine.config import ConfigError, FakeConfig
from engine.core.core import EngineCore
from engine.fake.adapters import FakeAdapters
from engine.fake.executor import FakeExecutor
from engine.models.native_adapters import NativeAdapters
from engine.protocol import AdapterRef, ErrorCode, Finished, RequestRejected, SamplingParams, Submission, Token
from tests.golden.models import make_executor
from tests.support.compiler import needs_compiler
from tests.support.conditions import until
from tests.support.engines import resolved_config
from tests.support.tiny_adapters import save_adapter
from tests.support.tiny_models import make_model, save_model

PROMPT = tuple(range(1, 22))
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


class Fake:
    """An engine over the fake executor, and directories that count as adapters there."""

    def __init__(self, directory: Path, **overrides: Any) -> None:
        config = resolved_config(**{"max_loras": 3} | overrides)
        self.host = FakeAdapters()
        executor = FakeExecutor(
            config.num_kv_blocks,
            config.block_size,
            range(32),
            config=FakeConfig(step_delay_ms=5),  # otherwise a long answer has ended before anything is done beside it
            verify_prefix=True,
            adapters=self.host,
        )
        self.engine = AsyncEngine(EngineCore(executor, config))
        self.directory = directory
        self.num_requests = 0

    def write(self, name: str, contents: str = "") -> str:
        path = self.directory / name
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(contents or name)
        return str(path)

    async def load(self, name: str, contents: str = "") -> AdapterRef:
        path = self.write(name, contents)
        return AdapterRef(name, path, await self.engine.adapters.load(path))

    def submission(self, adapter: AdapterRef | None, params: SamplingParams = SHORT) -> Submission:
        self.num_requests += 1
        return Submission(str(self.num_requests), PROMPT, params, adapter=adapter)

    async def answer(self, adapter: AdapterRef | None, params: SamplingParams = SHORT) -> tuple[list[int], int]:
        """Return the answer's tokens, and how many tokens of the prompt were cached."""
        return await answer(self.engine, self.submission(adapter, params))


async def answer(engine: AsyncEngine, submission: Submission) -> tuple[list[int], int]:
    found: list[int] = []
    async with aclosing(engine.stream(submission)) as items:
        async for events in items:
            for event in events:
                if isinstance(event, Token):
                    found.append(event.token_id)
                elif isinstance(event, Finished):
                    return found, event.usage.cached_tokens
    raise AssertionError("the stream ended without a terminal event")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Fake]]:
    made: list[Fake] = []

    def fake(**overrides: Any) -> Fake:
        made.append(Fake(tmp_path, **overrides))
        return made[-1]

    yield fake
    for one in made:
        one.engine.shutdown()


def run(work: Awaitable[None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(main())


def test_a_prefix_is_shared_by_the_requests_of_one_adapter_and_by_no_others(make: Callable[..., Fake]) -> None:
    async def work() -> None:
        fake = make()
        a, b = await fake.load("a"), await fake.load("b")
        texts = {}
        for adapter in (None, a, b):
            texts[adapter], cached = await fake.answer(adapter)
            assert cached == 0, adapter
        assert len({tuple(text) for text in texts.values()}) == 3
        for adapter in (b, a, None):
            assert await fake.answer(adapter) == (texts[adapter], 20)

    run(work())


def test_two_names_of_equal_files_share_their_prefixes(make: Callable[..., Fake]) -> None:
    async def work() -> None:
        fake = make()
        a, b = await fake.load("a", "same"), await fake.load("b", "same")
        text, _ = await fake.answer(a)
        assert await fake.answer(b) == (text, 20)
        assert fake.host.kept == {a.digest}

    run(work())


def test_other_weights_under_the_same_name_do_not_find_the_old_ones_kv_and_running_requests_keep_theirs(
    make: Callable[..., Fake],
) -> None:
    async def work() -> None:
        fake = make()
        old = await fake.load("a", "old")
        alone, _ = await fake.answer(old, LONG)
        await fake.engine.reset_prefix_cache()
        async with aclosing(fake.engine.stream(fake.submission(old, LONG))) as stream:
            first = await anext(stream)
            fake.engine.adapters.unload(old.digest)
            new = await fake.load("a", "new")
            assert fake.host.kept == {old.digest, new.digest}
            text, cached = await fake.answer(new)
            assert cached == 0
            assert text != alone[: len(text)]
            rest = [event async for events in stream for event in events]
        assert [event.token_id for event in (*first, *rest) if isinstance(event, Token)] == alone
        assert fake.host.kept == {new.digest}, "the old one left with its last request"

    run(work())


def test_the_least_recently_used_adapter_makes_room_and_is_read_again_when_it_is_asked_for(
    make: Callable[..., Fake],
) -> None:
    async def work() -> None:
        fake = make(max_loras=2, enable_prefix_caching=False)
        a, b = await fake.load("a"), await fake.load("b")
        texts = {adapter: await fake.answer(adapter) for adapter in (b, a)}
        c = await fake.load("c")
        assert fake.host.kept == {a.digest, c.digest}
        assert await fake.answer(b) == texts[b]
        assert fake.host.kept == {b.digest, c.digest}

    run(work())


def test_an_adapter_whose_files_have_changed_is_not_read_in_the_place_of_the_one_that_was_asked_for(
    make: Callable[..., Fake],
) -> None:
    async def work() -> None:
        fake = make(max_loras=1)
        a = await fake.load("a")
        await fake.load("b")
        fake.write("a", "changed")
        with pytest.raises(RequestRejected, match="have changed since it was loaded") as refused:
            await fake.answer(a)
        assert refused.value.code is ErrorCode.ADAPTER_UNAVAILABLE

    run(work())


def test_what_running_requests_use_is_never_evicted_and_the_load_is_refused(make: Callable[..., Fake]) -> None:
    async def work() -> None:
        fake = make(max_loras=1)
        a = await fake.load("a")
        async with aclosing(fake.engine.stream(fake.submission(a, LONG))) as stream:
            await anext(stream)
            with pytest.raises(RequestRejected, match=r"1 adapters in memory \(max_loras\)") as refused:
                await fake.load("b")
            assert refused.value.limit == 1
            assert fake.host.kept == {a.digest}
        await until(lambda: fake.engine.load().num_running == 0)
        b = await fake.load("b")
        assert fake.host.kept == {b.digest}

    run(work())


def test_64_adapters_loaded_and_used_and_unloaded_leave_nothing_behind(make: Callable[..., Fake]) -> None:
    async def work() -> None:
        fake = make(max_loras=64)
        refs = [await fake.load(f"a{number}") for number in range(64)]
        answers = await asyncio.gather(*(fake.answer(ref) for ref in refs))
        assert len({tuple(tokens) for tokens, _ in answers}) == 64
        assert len(fake.host.kept) == 64
        for ref in refs:
            fake.engine.adapters.unload(ref.digest)
            fake.engine.adapters.unload(ref.digest)
        assert fake.host.kept == set()
        assert fake.engine.adapters.loaded == ()
        assert fake.engine.adapters._held == {}

    run(work())


def test_an_adapter_is_there_at_the_end_of_a_long_compilation(
    make: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It made room for another meanwhile, and its request was refused although no request held the room."""

    async def work() -> None:
        fake = make(max_loras=1)
        a, b = await fake.load("a"), await fake.load("b")

        async def compile_long(_: str) -> None:
            await fake.engine.adapters.have(b)

        monkeypatch.setattr(fake.engine._compilation, "compile", compile_long)
        await fake.engine.make_ready(replace(fake.submission(a), sampling=SamplingParams(grammar="start: /a/")))
        assert fake.engine.adapters.loaded == (a.digest,)

    run(work())


def test_an_adapter_that_makes_room_before_its_request_hears_of_it_is_read_again(
    make: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        fake = make(max_loras=1)
        a, b = await fake.load("a"), await fake.load("b")
        cache, load, paths = fake.engine.adapters, fake.engine.adapters._load, list[str]()

        def load_both(host: Any, path: str, digest: str | None) -> str:
            paths.append(path)
            found = load(host, path, digest)
            if len(paths) == 1:
                load(host, b.path, b.digest)
            return found

        monkeypatch.setattr(cache, "_load", load_both)
        await fake.answer(a)
        assert paths == [a.path, a.path]

    run(work())


def test_an_engine_without_adapters_refuses_them_by_its_setting(make: Callable[..., Fake]) -> None:
    async def work() -> None:
        fake = make(max_loras=0)
        for asked in (fake.engine.adapters.load("x"), fake.answer(AdapterRef("a", "x", "00"))):
            with pytest.raises(RequestRejected, match="max_loras is 0"):
                await asked

    run(work())


def test_an_executor_that_computes_no_adapters_is_refused_at_start() -> None:
    config = resolved_config(max_loras=1)
    with pytest.raises(ConfigError, match="max_loras is 1, but this model's executor has no adapters"):
        EngineCore(FakeExecutor(config.num_kv_blocks, config.block_size, range(32)), config)


# --- with weights -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=[pytest.param("native", marks=needs_compiler), "torch_cpu"])
def real(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[AsyncEngine, Any]]:
    """An engine, and what keeps its adapters."""
    save_model("llama", tmp_path / "model")
    settings = {"num_threads": 1, "max_loras": 64, "kernels": request.param}
    executor, resolved = make_executor(tmp_path / "model", "float32", **settings)
    engine = AsyncEngine(EngineCore(executor, resolved))
    yield engine, executor.model.adapters
    engine.shutdown()


def factors(host: Any, digest: str) -> list[Tensor]:
    """A tensor of each matrix that an adapter in memory adapts."""
    if isinstance(host, NativeAdapters):
        return host._kept[digest]._kept[::2]
    return [delta.a for delta in host._adapters[digest].values()]


def test_64_adapters_of_a_model_leave_no_weights_behind(real: tuple[AsyncEngine, Any], tmp_path: Path) -> None:
    engine, host = real
    base = make_model("llama")
    alive: WeakSet[Any] = WeakSet()

    async def work() -> None:
        refs = []
        for number in range(64):
            path = str(save_adapter(base, tmp_path / str(number), seed=number))
            refs.append(AdapterRef(str(number), path, await engine.adapters.load(path)))
            alive.update(factors(host, refs[-1].digest))
        submissions = [Submission(ref.name, PROMPT, SHORT, adapter=ref) for ref in refs]
        answers = await asyncio.gather(*(answer(engine, submission) for submission in submissions))
        assert len({tuple(tokens) for tokens, _ in answers}) > 32
        assert len(alive) == 64 * 3 * 4
        assert host.num_bytes > 0
        for ref in refs:
            engine.adapters.unload(ref.digest)

    run(work())
    gc.collect()
    assert (host.num_bytes, len(alive)) == (0, 0)


def test_a_fault_of_one_adapter_s_rows_is_theirs_alone(real: tuple[AsyncEngine, Any], tmp_path: Path) -> None:
    """The weights are finite but give no finite logit; the neighbours in their steps continue."""
    engine, _ = real
    base = make_model("llama")

    async def work() -> None:
        path = str(save_adapter(base, tmp_path / "huge", size=1e37))
        huge = AdapterRef("huge", path, await engine.adapters.load(path))
        plain, _ = await answer(engine, Submission("plain", PROMPT, SHORT))
        failing = Submission("huge", PROMPT, SHORT, adapter=huge)
        both = await asyncio.gather(
            answer(engine, failing), answer(engine, Submission("beside", PROMPT, SHORT)), return_exceptions=True
        )
        assert isinstance(both[0], AssertionError)
        assert not isinstance(both[1], BaseException)
        assert both[1][0] == plain
        for number in range(4):  # in the blocks that it has left, too
            after, _ = await answer(engine, Submission(f"after {number}", (*PROMPT, number), SHORT))
            await engine.reset_prefix_cache()
            again, _ = await answer(engine, Submission(f"again {number}", (*PROMPT, number), SHORT))
            assert after == again
            assert len(after) == 6

    run(work())
