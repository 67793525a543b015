"""Owns the promise that no step waits for long for another answer's grammar, and that no other answer changes by it.
Never waits itself: which thread's time is over is the test's to say."""

from __future__ import annotations

import threading
from typing import Any

import llguidance.numpy
import pytest

from engine.batch.mask_workers import MaskWorkers
from engine.protocol import ErrorCode, Failed
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
    core = grammar_core(num_speculative_tokens=drafts, workers=workers)
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
