"""The blocking library: from any thread, also beside a running event loop, and to the end of the program."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from chunkserve import Answer, Engine, RequestError, RequestFailed, RequestRefused
from tests.test_architecture import run_python

HI = [{"role": "user", "content": "hi"}]
TIMEOUT_S = 10  # only ever reached by a failure


@pytest.fixture(autouse=True)
def threads() -> Callable[[], set[str]]:
    """Name the engine's threads that have begun since, beside those of other tests in this process."""
    before = set(threading.enumerate())

    def begun() -> set[str]:
        names = {thread.name for thread in set(threading.enumerate()) - before}
        return {name for name in names if name.startswith(("chunkserve", "engine-steps"))}

    return begun


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine("m", executor="fake", fake={"reply": "Hello there."}) as engine:
        yield engine


@pytest.fixture
def endless() -> Iterator[Engine]:
    with Engine("m", executor="fake", fake={"step_delay_ms": 5.0}) as engine:
        yield engine


def num_running(engine: Engine) -> int:
    running = engine._inner._running
    assert running is not None
    return len(running.engine._streams)


def wait_for(engine: Engine, count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while num_running(engine) != count:
        assert time.monotonic() < deadline, num_running(engine)
        time.sleep(0.005)


def test_it_answers_whole_and_in_chunks(engine: Engine) -> None:
    assert engine.generate("hi").text == engine.chat(HI).text == "Hello there."
    assert "".join(chunk.text for chunk in engine.stream("hi")) == "Hello there."
    assert "".join(chunk.text for chunk in engine.stream_chat(HI)) == "Hello there."
    assert engine.detokenize(engine.tokenize("hi")) == "hi"
    assert engine.config.kernels == "fake"


def test_many_prompts_come_back_in_their_order_with_errors_in_place(engine: Engine) -> None:
    answers = engine.generate_all(iter(["a", "x" * 5000, [98, 99]]), max_tokens=5)
    assert [type(answer) for answer in answers] == [Answer, RequestRefused, Answer]
    assert [answer.prompt_token_ids for answer in answers if isinstance(answer, Answer)] == [(97,), (98, 99)]
    assert [isinstance(answer, RequestError) or answer.text for answer in engine.chat_all([HI] * 3)] == [
        "Hello there."
    ] * 3


def test_one_prompt_is_no_list_of_prompts(engine: Engine) -> None:
    with pytest.raises(RequestRefused, match="prompts: should be several, but it is one text"):
        engine.generate_all("hello")


def test_threads_share_an_engine(engine: Engine) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda number: engine.chat(HI, seed=number).text, range(32)))
    assert texts == ["Hello there."] * 32


def test_it_works_beside_a_running_event_loop(engine: Engine) -> None:
    """As in a notebook's cell."""

    async def cell() -> str:
        return engine.chat(HI).text

    assert asyncio.run(cell()) == "Hello there."


def test_closing_a_stream_ends_its_request(endless: Engine) -> None:
    chunks = endless.stream_chat(HI, ignore_eos=True)
    next(chunks)
    assert num_running(endless) == 1
    chunks.close()
    wait_for(endless, 0)


def test_a_stream_that_is_forgotten_ends_its_request(endless: Engine) -> None:
    chunks = endless.stream_chat(HI, ignore_eos=True)
    next(chunks)
    del chunks
    wait_for(endless, 0)


def test_a_stream_that_is_collected_on_the_loops_own_thread_ends_its_request(endless: Engine) -> None:
    """The garbage collector runs in any thread. There, waiting for the end would wait for itself."""
    held = [endless.stream_chat(HI, ignore_eos=True)]
    next(held[0])

    async def forget() -> None:
        held.clear()

    endless._loop.call(forget())
    wait_for(endless, 0)


def test_what_interrupts_a_wait_ends_its_request(endless: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C raises in the waiting thread, in the middle of the wait for a result."""
    from concurrent.futures import Future

    wait = Future.result

    def interrupted(self: Future[object], timeout: float | None = None) -> object:
        wait_for(endless, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        endless.chat(HI, ignore_eos=True)
    monkeypatch.setattr(Future, "result", wait)
    wait_for(endless, 0)
    assert len(endless.chat(HI, max_tokens=3, ignore_eos=True).token_ids) == 3


def test_closing_ends_requests_of_other_threads_and_its_own_threads(
    endless: Engine, threads: Callable[[], set[str]]
) -> None:
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(endless.chat, HI, ignore_eos=True) for _ in range(2)]
        wait_for(endless, 2)
        endless.close()
        for one in asked:
            with pytest.raises(RequestFailed, match="was closed"):
                one.result(TIMEOUT_S)
    for ask in (lambda: endless.chat(HI), lambda: next(endless.stream("hi")), lambda: endless.tokenize("hi")):
        with pytest.raises(RequestFailed, match="was closed"):
            ask()
    endless.close()
    assert threads() == set()


def test_a_second_thread_that_closes_waits_for_the_first(
    endless: Engine, monkeypatch: pytest.MonkeyPatch, threads: Callable[[], set[str]]
) -> None:
    running, ends = endless._inner._running, list[set[str]]()
    assert running is not None
    shutdown = running.shutdown

    def close_and_look() -> None:
        endless.close()
        ends.append(threads())

    second = threading.Thread(target=close_and_look)

    def shutdown_while_another_closes() -> None:
        second.start()
        second.join(0.05)  # time to return too early
        shutdown()

    monkeypatch.setattr(running, "shutdown", shutdown_while_another_closes)
    endless.close()
    second.join(TIMEOUT_S)
    assert ends == [set()]


def test_a_close_that_was_interrupted_can_be_repeated(
    endless: Engine, monkeypatch: pytest.MonkeyPatch, threads: Callable[[], set[str]]
) -> None:
    """Ctrl-C raises in the thread that waits for the step that runs."""
    running = endless._inner._running
    assert running is not None
    shutdown = running.shutdown

    def interrupted() -> None:
        shutdown()
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "shutdown", interrupted)
    with pytest.raises(KeyboardInterrupt):
        endless.close()
    endless.close()
    assert threads() == set()


def test_a_close_after_an_interrupted_one_waits_for_the_step_that_runs() -> None:
    """Regression: it returned at once, and the engine's thread still ran."""
    code = """
import signal, threading
from chunkserve import Engine
engine = Engine("m", executor="fake")
inner = engine._inner._running.engine
step, wait, in_step, may_end, ended = inner._step, inner._has_ended.wait, threading.Event(), threading.Event(), []

def last_step():
    in_step.set()
    may_end.wait(10)
    ended.append("the step ended")
    return step()

def interrupted():
    inner._has_ended.wait = waits
    signal.raise_signal(signal.SIGINT)

def waits():
    may_end.set()
    return wait()

inner._step, inner._has_ended.wait = last_step, interrupted
inner._commands.put(list)
in_step.wait(10)
try:
    engine.close()
except KeyboardInterrupt:
    engine.close()
    print(*ended)
"""
    assert run_python(code) == "the step ended"


def test_a_stream_that_nobody_reads_while_its_engine_closes_does_not_seem_complete(
    endless: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression guard: streams were closed first, and a reader took the end of a closed one for that of the answer."""
    stream = endless.stream_chat(HI, ignore_eos=True)
    next(stream)
    running, read = endless._inner._running, list[object]()
    assert running is not None
    shutdown = running.shutdown

    def read_and_shut_down() -> None:
        shutdown()
        with pytest.raises(RequestFailed, match="was closed") as closed:
            read.extend(stream)
        read.append(closed.value.code)

    monkeypatch.setattr(running, "shutdown", read_and_shut_down)
    endless.close()
    assert read == ["closed"]


def test_streams_that_other_threads_begin_while_an_engine_closes_end_quietly(
    endless: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression guard: one that had begun after all were closed was closed from its inside, and asyncio said so."""
    running, streams = endless._inner._running, [endless.stream_chat(HI, ignore_eos=True) for _ in range(3)]
    assert running is not None
    next(streams[0])
    refuse_more = running.refuse_more

    async def begin_and_refuse_more() -> None:
        with ThreadPoolExecutor(2) as pool:
            begun = [asyncio.wrap_future(pool.submit(next, stream)) for stream in streams[1:]]
            assert len(await asyncio.gather(*begun)) == 2
        await refuse_more()

    monkeypatch.setattr(running, "refuse_more", begin_and_refuse_more)
    endless.close()
    assert "asynchronous generator" not in caplog.text


def test_an_engine_that_is_collected_ends_its_threads(threads: Callable[[], set[str]]) -> None:
    engine = Engine("m", executor="fake")
    assert threads() == {"chunkserve-loop", "engine-steps"}
    del engine
    gc.collect()
    assert threads() == set()


def test_a_start_that_fails_leaves_no_thread(threads: Callable[[], set[str]]) -> None:
    with pytest.raises(ValueError, match="No model '/no/such/model'"):
        Engine("/no/such/model")
    assert threads() == set()


def test_a_program_that_closes_nothing_ends_by_itself_and_says_nothing() -> None:
    code = """
from chunkserve import Engine
engine = Engine("m", executor="fake", fake={"step_delay_ms": 5.0})
chunks = engine.stream_chat([{"role": "user", "content": "hi"}], ignore_eos=True)
print(len(next(chunks).text) >= 0)
"""
    assert run_python(f"import sys\nsys.stderr = sys.stdout\n{code}") == "True"


def test_an_engine_can_be_closed_in_a_forked_process() -> None:
    """There is no thread whose end could be waited for."""
    code = """
import asyncio, os
from chunkserve import AsyncEngine
engine = asyncio.run(AsyncEngine("m", executor="fake").start())
if os.fork() == 0:
    asyncio.run(engine.close())
    print("closed", flush=True)
    os._exit(0)
os.wait()
"""
    assert run_python(code) == "closed"


@pytest.mark.parametrize("kind", ["blocking", "asynchronous"])
def test_an_engine_in_a_forked_process_says_that_it_is_anothers(kind: str) -> None:
    """Its threads are not there: a call would wait for ever."""
    start, ask = 'Engine("m", executor="fake")', 'engine.generate("hi")'
    if kind == "asynchronous":
        start, ask = f"asyncio.run(Async{start}.start())", f"asyncio.run({ask})"
    code = f"""
import asyncio, os
from chunkserve import AsyncEngine, Engine, RequestFailed
engine = {start}
if os.fork() == 0:
    try:
        {ask}
    except RequestFailed as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    assert run_python(code) == "This engine belongs to another process: make one after the fork."
