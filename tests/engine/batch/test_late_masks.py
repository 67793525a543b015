"""Owns the promise that no step waits for long for another answer's grammar, and that no other answer changes by it.
Never waits itself: which thread's time is over is the test's to say."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from functools import partial
from typing import Any

import llguidance.numpy
import pytest

from engine.batch import grammar
from engine.batch.grammar import DEFAULT_LIMITS, Grammars
from engine.batch.mask_workers import MaskWorkers
from engine.build.engine import FAKE_EOS_TOKEN_ID, FAKE_VOCAB_SIZE
from engine.protocol import ErrorCode, Failed, Token
from tests.engine.batch.test_grammar import PROMPT, WORDS, grammar_core, text_of
from tests.support.engines import RecordingCore

FIXED = 'start: "a1b2c3" /[a-z]{9}/ "d4e5f6" /[a-z]{9}/'


def undisturbed(drafts: int) -> RecordingCore:
    core = grammar_core(num_speculative_tokens=drafts)
    core.send("a", PROMPT, max_tokens=60, grammar=WORDS)
    core.run()
    return core


@pytest.mark.parametrize("drafts", [0, 7])
def test_a_mask_that_takes_too_long_fails_the_answers_of_its_grammar_alone(
    drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: every stream waited for it, half a second a token with 300 alternatives behind a first letter."""
    gate, late = threading.Event(), set[threading.Thread]()
    name = "fill_next_token_bitmask_par_with_draft_tokens" if drafts else "fill_next_token_bitmask_par"
    fill = getattr(llguidance.numpy, name)

    def slow(alone: Any, work: Any, filled: Any) -> None:
        match = core._executor._grammars._matches.get("b")  # type: ignore[attr-defined]
        if match is not None and match.count >= 2 and work[0][0] is match.matcher:
            late.add(threading.current_thread())
            gate.wait()
        fill(alone, work, filled)

    monkeypatch.setattr(llguidance.numpy, name, slow)
    workers = MaskWorkers(1, clock=lambda thread: 100.0 * (thread in late), look_s=0.001)
    core = grammar_core(limits=DEFAULT_LIMITS, num_speculative_tokens=drafts, workers=workers)
    try:
        for name, text in (("a", WORDS), ("b", FIXED), ("c", WORDS), ("d", FIXED)):
            core.send(name, PROMPT, max_tokens=60, grammar=text)
        core.run()
    finally:
        gate.set()
    for name in "bd":
        (failure,) = (event for event in core.events[name] if isinstance(event, Failed))
        assert failure.code is ErrorCode.GRAMMAR_LIMIT_EXCEEDED
        assert "more than 0.1 s of a processor (grammar_mask_timeout_s)" in failure.message
    assert text_of(core, "a") == text_of(core, "c") == text_of(undisturbed(drafts), "a") != ""
    core.send("e", PROMPT, max_tokens=60, grammar=FIXED)
    core.run()
    assert text_of(core, "e").startswith("a1b2c3"), "it is compiled anew, and shares no lock with what still runs"


@pytest.mark.parametrize("drafts", [0, 7])
def test_an_answer_whose_masks_are_slow_one_after_another_fails_alone(
    drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a grammar just below the limit of one mask held up every step of an answer of any length."""
    spent: dict[threading.Thread, float] = defaultdict(float)

    def slow(fill: Any, alone: Any, work: Any, filled: Any) -> None:
        match = core._executor._grammars._matches.get("b")  # type: ignore[attr-defined]
        if match is not None and work[0][0] is match.matcher:
            spent[threading.current_thread()] += 0.09 * (1 + sum(len(given) for given in work[0][2:]))
        fill(alone, work, filled)

    for name in ("fill_next_token_bitmask_par", "fill_next_token_bitmask_par_with_draft_tokens"):
        monkeypatch.setattr(llguidance.numpy, name, partial(slow, getattr(llguidance.numpy, name)))
    monkeypatch.setattr(grammar, "thread_time", lambda: 0.0)
    core = grammar_core(
        limits=DEFAULT_LIMITS, num_speculative_tokens=drafts, workers=MaskWorkers(1, clock=spent.__getitem__)
    )
    letters = "start: /[a-z]{60}/"
    for request, text in (("a", WORDS), ("b", letters), ("c", letters)):
        core.send(request, PROMPT, max_tokens=60, grammar=text)
    core.run()
    (failure,) = (event for event in core.events["b"] if isinstance(event, Failed))
    assert failure.code is ErrorCode.GRAMMAR_LIMIT_EXCEEDED
    assert "more than 0.01 s of a processor a token on average (grammar_mask_average_s)" in failure.message
    num_before = sum(isinstance(event, Token) for event in core.events["b"])
    assert num_before == 12, "each mask was 0.08 s above the average, of 1 s in all"
    assert len(text_of(core, "c")) == 60, "nothing was wrong with its own masks"
    assert text_of(core, "a") == text_of(undisturbed(drafts), "a") != ""


def test_the_time_of_consuming_and_of_forced_tokens_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(grammar, "thread_time", lambda: 0.05 * next(clock))  # each call of the library takes so long
    core = grammar_core(limits=DEFAULT_LIMITS, workers=MaskWorkers(1, clock=lambda thread: 0.0))
    core.send("a", PROMPT, max_tokens=60, grammar="start: /[a-z]{60}/")
    core.run()
    (failure,) = (event for event in core.events["a"] if isinstance(event, Failed))
    assert "grammar_mask_average_s" in failure.message


def test_cheap_tokens_make_up_for_dear_ones() -> None:
    grammars = Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID)
    match = grammar._Match(grammar._Template(None), None)  # type: ignore[arg-type]
    grammars._charge(match, 0.5, num_masks=1)
    for _ in range(20):
        grammars._charge(match, 0.001, num_masks=1)
        grammars._charge(match, 0.001)
    assert match.excess_s == pytest.approx(0.49 - 20 * 0.008)
    grammars._charge(match, 0.0, num_masks=1000)
    assert match.excess_s == 0.0
