"""Owns the contract of answers within a grammar: every token follows it, and no step waits. Long: each way to fail.
The fake executor's tokens are bytes here, so a request's answer is its text."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import llguidance.numpy
import pytest

from engine.async_engine import AsyncEngine
from engine.batch import grammar
from engine.batch.grammar import MAX_COMPILED, Grammars, MaskLimits
from engine.batch.mask_workers import MaskWorkers
from engine.build.engine import FAKE_EOS_TOKEN_ID, FAKE_VOCAB_SIZE, build_engine
from engine.compilation import Compilation
from engine.config import EngineConfig, SchedulerConfig
from engine.protocol import (
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    RequestRejected,
    SamplingParams,
    Submission,
    Token,
)
from engine.step import GrammarError, GrammarRow, RowFailure, RowKind
from tests.support.engines import RecordingCore

PROMPT = list(b"A question, of some length.")
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def of_schema(schema: dict[str, Any]) -> str:
    return "start: %json " + json.dumps(schema | {"x-guidance": COMPACT})


PERSON = of_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
WORDS = "start: /(alpha|beta|gamma)( (alpha|beta|gamma)){2,5}/"


PATIENT = MaskLimits(60.0, 60.0)
"""No answer ends because this machine was slow for a moment: where processor time is stolen, a mask of a millisecond
has been late."""


def grammar_core(workers: MaskWorkers | None = None, limits: MaskLimits = PATIENT, **options: Any) -> RecordingCore:
    settings = {"vocab_size": FAKE_VOCAB_SIZE, "eos_token_ids": (FAKE_EOS_TOKEN_ID,), "max_num_batched_tokens": 64}
    grammars = Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID, workers, limits)
    alphabet = tuple(b"abcdefghijklmnopqrstuvwxyz ")
    return RecordingCore(**{**settings, **options}, alphabet=alphabet, grammars=grammars)


@pytest.fixture
def engine() -> Any:
    engine = build_engine("none", EngineConfig(executor="fake", max_grammar_bytes=5000))
    yield engine
    engine.shutdown()


def text_of(core: RecordingCore, request_id: str) -> str:
    return bytes(core.tokens(request_id)).decode()


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        list(person) == ["name", "age", "tags"]
        and len(person["name"]) <= 12
        and 0 <= person["age"] <= 150
        and set(person["tags"]) <= {"red", "green"}
    )


# --- the matcher -----------------------------------------------------------------------------------------------------


def allowed(grammars: Grammars, row: GrammarRow) -> list[set[int]]:
    words, failed = grammars.masks([row])
    assert not failed
    return [{t for t in range(FAKE_VOCAB_SIZE) if mask[t // 32] >> (t % 32) & 1} for mask in words.tolist()]


def test_masks_follow_the_answer_and_the_drafts_and_allow_the_end_only_where_the_grammar_ends() -> None:
    grammars = Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID)
    row = GrammarRow("a", 'start: "ab" | "ac" | "abd"', tuple(b"a"), tuple(b"b"))
    assert allowed(grammars, row) == [set(b"bc"), {ord("d"), FAKE_EOS_TOKEN_ID}]


def test_masks_behind_the_end_of_the_answer_are_nobodys_concern() -> None:
    grammars = Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID)
    row = GrammarRow("a", 'start: "ab"', tuple(b"a"), (ord("b"), *[FAKE_EOS_TOKEN_ID] * 3))
    assert allowed(grammars, row)[:2] == [set(b"b"), {FAKE_EOS_TOKEN_ID}]


def test_a_forgotten_answer_is_replayed() -> None:
    """Preemption and migration rely on this: the matcher is rebuilt from the answer's tokens."""
    grammars = Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID)
    grammar = "start: /[ab]{3}c/"
    for length in range(4):
        row = GrammarRow("a", grammar, tuple(b"aba"[:length]))
        kept = allowed(grammars, row)
        grammars.forget("a")
        assert allowed(grammars, row) == kept == [set(b"ab" if length < 3 else b"c")]


def test_forced_tokens_are_what_must_follow() -> None:
    grammars = Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID)
    row = GrammarRow("a", 'start: ("yes" | "no") ", sure"', ())
    allowed(grammars, row)
    assert bytes(grammars.forced("a", tuple(b"y"))) == b"es, sure"
    assert grammars.forced("a", (FAKE_EOS_TOKEN_ID,)) == (), "an answer that has ended"


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('start: %json {"type": "str"}', "Invalid type: str"),
        ("start: /(/", "unclosed group"),
        ("start: elsewhere", "unknown name"),
        ("", "Empty grammar"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_reason(grammar: str, says: str) -> None:
    grammars = Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID)
    with pytest.raises(GrammarError, match=re.escape(says)):
        grammars.compile(grammar)
    grammars.compile(WORDS)


def test_the_compiled_grammars_that_are_kept_are_the_latest_used() -> None:
    grammars = Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID)
    grammars.compile(WORDS)
    for number in range(MAX_COMPILED + 10):
        grammars.compile(f'start: "{number}"')
        assert grammars.is_compiled(WORDS), "which counts as used"
    assert not grammars.is_compiled('start: "0"')
    assert len(grammars._compiled) == MAX_COMPILED
    assert allowed(grammars, GrammarRow("a", 'start: "0"', ())) == [{ord("0")}], "one that was dropped is made again"


def test_the_compiled_grammars_that_are_kept_have_so_many_characters_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as large as their texts, and those of a thousand tools have half a million characters."""
    texts = [f'start: "{number}" // {"x" * 100}' for number in range(5)]
    monkeypatch.setattr(grammar, "MAX_COMPILED_CHARS", 2 * len(texts[0]))
    grammars = Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID)
    for text in texts:
        grammars.compile(text)
    assert list(grammars._compiled) == texts[-2:]
    large = f'start: "a" // {"x" * 1000}'
    grammars.compile(large)
    assert list(grammars._compiled) == [large], "the newest is kept, however large: a step is about to need it"


# --- the answer, whatever the schedule does --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_speculative_tokens": 3},
        {"num_speculative_tokens": 7, "max_num_batched_tokens": 128},
        {"overlap": True},
        {"overlap": True, "num_speculative_tokens": 4, "max_num_batched_tokens": 128},
        {"max_num_batched_tokens": 9, "max_num_seqs": 8},
        {"block_size": 2, "num_kv_blocks": 80},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_keeps_to_its_own_grammar(options: dict[str, Any], temperature: float) -> None:
    core = grammar_core(**options)
    for i in range(6):
        core.send(f"p{i}", PROMPT, max_tokens=120, temperature=temperature, seed=i, grammar=PERSON)
        core.send(f"w{i}", PROMPT, max_tokens=60, temperature=temperature, seed=i, grammar=WORDS)
        core.send(f"f{i}", PROMPT, max_tokens=20, temperature=temperature, seed=i)
    core.run()
    plain = grammar_core()
    plain.send("f3", PROMPT, max_tokens=20, temperature=temperature, seed=3)
    plain.run()
    assert core.tokens("f3") == plain.tokens("f3"), "a neighbour without a grammar is not touched"
    for i in range(6):
        assert is_person(text_of(core, f"p{i}"))
        assert re.fullmatch("(alpha|beta|gamma)( (alpha|beta|gamma)){2,5}", text_of(core, f"w{i}"))
        assert core.finished(f"p{i}").reason is core.finished(f"w{i}").reason is FinishReason.STOP


def test_preempted_answers_go_on_in_their_grammar_and_are_those_of_an_idle_engine() -> None:
    greedy_admission = SchedulerConfig(reserve_mode="prompt")
    idle = grammar_core(num_kv_blocks=1000)
    tight = grammar_core(block_size=2, num_kv_blocks=75, scheduler=greedy_admission)
    for core in (idle, tight):
        for i in range(8):
            core.send(f"p{i}", [i, *PROMPT], max_tokens=100, temperature=1.0, seed=i, grammar=PERSON)
        core.run()
    assert tight.load().num_preemptions > 0
    assert idle.load().num_preemptions == 0
    for i in range(8):
        assert tight.tokens(f"p{i}") == idle.tokens(f"p{i}")
        assert is_person(text_of(tight, f"p{i}"))


def test_another_engine_goes_on_in_the_grammar_from_any_token() -> None:
    whole = grammar_core()
    whole.send("a", PROMPT, max_tokens=100, temperature=1.0, seed=7, grammar=PERSON)
    whole.run()
    answer = whole.tokens("a")
    for cut in (1, 2, len(answer) // 2, len(answer) - 1):
        other = grammar_core(num_speculative_tokens=3)
        begun = [*PROMPT, *answer[:cut]]
        other.send("a.2", begun, max_tokens=100 - cut, temperature=1.0, seed=7, grammar=PERSON, num_answer_tokens=cut)
        other.run()
        assert [*answer[:cut], *other.tokens("a.2")] == answer


def test_forced_tokens_save_steps_and_change_nothing() -> None:
    plain, drafting = grammar_core(), grammar_core(num_speculative_tokens=7)
    for core in (plain, drafting):
        core.send("a", PROMPT, max_tokens=100, temperature=1.0, seed=3, grammar=PERSON, logprobs=2)
        core.run()
    assert drafting.tokens("a") == plain.tokens("a")
    assert [event for event in drafting.events["a"] if isinstance(event, Token)] == [
        event for event in plain.events["a"] if isinstance(event, Token)
    ], "and so do the log-probabilities"
    rows = [row for plan in drafting.plans for row in plan.rows if row.kind is RowKind.DECODE]
    fixed = len('"name": , "age": , "tags": ')
    assert len(rows) <= len(plain.tokens("a")) - fixed + 2 * 3 + 1, "fixed text is read eight tokens at a time"


@pytest.mark.parametrize(
    "controls",
    [
        {"allowed_token_ids": (ord("z"),)},
        {"bad_words": ((ord("a"),), (ord("b"),), (ord("g"),))},
        {"min_tokens": 59},
    ],
    ids=str,
)
def test_the_grammar_has_the_last_word(controls: dict[str, Any]) -> None:
    core = grammar_core()
    core.send("a", PROMPT, max_tokens=60, grammar=WORDS, **controls)
    core.run()
    assert re.fullmatch("(alpha|beta|gamma)( (alpha|beta|gamma)){2,5}", text_of(core, "a"))


def test_a_grammar_that_becomes_too_much_work_fails_its_own_request_alone() -> None:
    """The grammar compiles, but its second mask takes more work than one token may cost. That is the client's mistake,
    not the engine's fault."""
    core = grammar_core()
    for name in "abc":
        core.send(name, PROMPT, max_tokens=60, grammar=f"start: /{'.?' * 300}/" if name == "b" else WORDS)
    core.run()
    (failure,) = (event for event in core.events["b"] if isinstance(event, Failed))
    assert failure.code is ErrorCode.GRAMMAR_LIMIT_EXCEEDED
    assert re.fullmatch(
        "The grammar became more work than the limits allow .*: .*too many expressions.*", failure.message
    )
    assert text_of(core, "a") == text_of(core, "c")


def test_an_answer_that_leaves_its_grammar_is_a_fault_of_the_engine() -> None:
    grammars = Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID)
    _, failed = grammars.masks([GrammarRow("a", WORDS, tuple(b"alpine")), GrammarRow("b", WORDS, tuple(b"alpha"))])
    assert failed == {0: RowFailure(f"The grammar does not allow token {ord('i')}, which the answer has.")}
    assert failed[0].code is ErrorCode.STEP_FAILED


class PanicException(BaseException):
    """The panic as the library raises it."""


def test_a_panic_of_the_library_fails_the_request_that_caused_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with llguidance 1.9.1. The panic is not an Exception:
    it would end the thread that runs the steps, and every stream would hang."""
    fill = llguidance.numpy.fill_next_token_bitmask_par

    def panicking(workers: Any, work: Any, filled: Any) -> None:
        match = core._executor._grammars._matches.get("b")  # type: ignore[attr-defined]
        if match is not None and any(matcher is match.matcher for matcher, _ in work):
            raise PanicException("byte index 12 is not a char boundary")
        fill(workers, work, filled)

    monkeypatch.setattr("llguidance.numpy.fill_next_token_bitmask_par", panicking)
    core = grammar_core()
    for name in "abc":
        core.send(name, PROMPT, max_tokens=60, grammar=WORDS)
    core.run()
    assert isinstance(core.events["b"][-1], Failed)
    assert core.events["b"][-1].code is ErrorCode.GRAMMAR_LIMIT_EXCEEDED
    assert text_of(core, "a") == text_of(core, "c") != ""


def test_a_panic_while_a_grammar_is_compiled_is_a_refusal(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def panicking(*args: Any, **options: Any) -> None:
        raise PanicException

    monkeypatch.setattr("llguidance.LLMatcher", panicking)
    with pytest.raises(RequestRejected, match="cannot be worked with"):
        asyncio.run(ask(engine, WORDS))
    monkeypatch.undo()
    asyncio.run(ask(engine, WORDS))


def test_what_ends_the_step_thread_ends_every_stream(engine: AsyncEngine) -> None:
    async def ended() -> Any:
        def panicking(plan: Any) -> None:
            raise PanicException

        engine._core._executor.launch = panicking  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            return [event async for event in engine.generate(PROMPT, SamplingParams(max_tokens=2))][-1]

    failure = asyncio.run(ended())
    assert (type(failure), failure.code) == (Failed, ErrorCode.ENGINE_DEAD)


# --- before a request is queued --------------------------------------------------------------------------------------


async def ask(engine: AsyncEngine, grammar: str, **options: Any) -> tuple[str, Finished]:
    params = SamplingParams(**{"max_tokens": 120, "temperature": 1.0, "seed": 1, "grammar": grammar, **options})
    events = [event async for event in engine.generate(PROMPT, params)]
    assert isinstance(events[-1], Finished)
    return bytes(event.token_id for event in events if isinstance(event, Token)).decode(), events[-1]


def test_a_request_with_a_grammar_is_answered_in_it(engine: AsyncEngine) -> None:
    text, finished = asyncio.run(ask(engine, PERSON))
    assert is_person(text)
    assert finished.stop_token_id == FAKE_EOS_TOKEN_ID


@pytest.mark.parametrize(
    ("grammar", "options", "param", "says"),
    [
        ("start: /(/", {}, "grammar", "unclosed group"),
        ("start: /a/ //" + "x" * 5000, {}, "grammar", "5000 bytes (max_grammar_bytes), but it has 5013"),
        (WORDS, {"ignore_eos": True}, "ignore_eos", "cannot be combined"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_and_nothing_is_queued(
    engine: AsyncEngine, grammar: str, options: dict[str, Any], param: str, says: str
) -> None:
    refused = []
    engine.observe(_Refusals(refused))
    with pytest.raises(RequestRejected, match=re.escape(says)) as caught:
        asyncio.run(ask(engine, grammar, **options))
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_PARAMETER, param)
    assert refused == [ErrorCode.INVALID_PARAMETER]
    assert engine.load().num_waiting == engine.load().num_running == 0


class _Refusals:
    def __init__(self, codes: list[ErrorCode]) -> None:
        self.rejected = codes.append

    def submitted(self, submission: Submission) -> None: ...

    def stepped(self, facts: Any, events: Any) -> None: ...


class _Held:
    """Knows one grammar, and holds back the compilation of others until its gate is open."""

    def __init__(self, known: str | None = None) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.compiled: list[str] = []
        self._known = known

    def is_compiled(self, grammar: str) -> bool:
        return grammar == self._known

    def compile(self, grammar: str) -> None:
        self.entered.set()
        self.gate.wait()
        self.compiled.append(grammar)


def test_while_one_grammar_is_compiled_steps_go_on_and_the_wait_for_it_is_bounded() -> None:
    engine = build_engine("none", EngineConfig(executor="fake", grammar_timeout_s=0.05))
    held = _Held()
    engine._compilation = Compilation(held, engine.config)

    async def both() -> None:
        with pytest.raises(RequestRejected, match=re.escape("was not compiled within 0.05 s")):
            await ask(engine, WORDS)
        free = [event async for event in engine.generate(PROMPT, SamplingParams(max_tokens=8))]
        assert isinstance(free[-1], Finished)

    try:
        asyncio.run(both())
    finally:
        held.gate.set()
        engine.shutdown()


def test_a_grammar_that_is_compiled_already_does_not_wait_for_another_one_that_is_being_compiled() -> None:
    held = _Held("known")
    compilation = Compilation(held, build_engine("none", EngineConfig(executor="fake")).config)

    async def both() -> None:
        new = asyncio.ensure_future(compilation.compile("new"))
        await asyncio.to_thread(held.entered.wait)
        await compilation.compile("known")
        assert not new.done()
        held.gate.set()
        await new

    try:
        asyncio.run(both())
    finally:
        held.gate.set()
        compilation.shutdown()
    assert held.compiled == ["new"]


def test_an_executor_without_grammars_refuses_them(engine: AsyncEngine) -> None:
    engine._compilation = Compilation(None, engine.config)
    with pytest.raises(RequestRejected, match="cannot keep to a grammar"):
        asyncio.run(ask(engine, WORDS))
