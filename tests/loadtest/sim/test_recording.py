"""What is recorded of a simulated request is what a client of a real server would see."""

from __future__ import annotations

import pytest

from engine.protocol import EngineError, ErrorCode, Finished, FinishReason, Scheduled, Token, Usage
from loadtest.sim.recording import Recording
from loadtest.timeline import FAILED, OK, REJECTED
from serve_app.errors.api_error import ApiError, overloaded, to_api_error


def seen(*tokens_s: float, error: ApiError | None = None) -> Recording:
    """Record a request that was due at 10 s and whose first chunk began at 10.2 s."""
    made = Recording(10.0, num_prompt_tokens=7)
    made.note(Scheduled("r", 3), 10.2)
    for at_s in tokens_s:
        made.note(Token("r", 1), at_s)
    made.error = error
    return made


def test_times_run_from_when_a_request_was_due_and_each_token_is_an_arrival() -> None:
    answer = seen(10.5, 10.55, 10.65).ended(10.65)
    assert answer.outcome == OK
    assert answer.ttft_ms == pytest.approx(500)
    assert answer.tpot_ms == pytest.approx(75)
    assert list(answer.gaps_ms()) == pytest.approx([50, 100])
    assert answer.e2e_ms == pytest.approx(650)
    assert answer.queue_ms == pytest.approx(200)
    assert (answer.prompt_tokens, answer.output_tokens, answer.lag_ms) == (7, 3, 0.0)


def test_an_answer_that_moves_has_waited_until_it_began_for_the_first_time() -> None:
    made = seen(10.5)
    made.note(Scheduled("r.2", 9), 11.0)
    assert made.ended(12.0).queue_ms == pytest.approx(200)
    assert made.num_cached_tokens == 3


def test_how_an_answer_ended_is_recorded() -> None:
    made = seen(10.5)
    made.note(Finished("r", FinishReason.LENGTH, Usage(7, 1, 3)), 10.5)
    assert made.ended(10.5).finish_reason == "length"


def test_what_is_refused_before_its_first_token_says_when_to_come_again() -> None:
    answer = Recording(10.0, 7, error=overloaded("requests", 4, 2.0)).ended(10.0)
    assert (answer.outcome, answer.retry_after, answer.e2e_ms, answer.queue_ms) == (REJECTED, True, None, None)
    assert answer.error == (
        "503: The request queue is full: this ingress replica takes 4 requests at a time "
        "(admission.max_concurrent_requests)."
    )


@pytest.mark.parametrize(
    ("code", "tokens_s", "outcome"),
    [
        (ErrorCode.QUEUE_FULL, (), REJECTED),
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, (), FAILED),
        (ErrorCode.ENGINE_DEAD, (10.5,), FAILED),  # its status was sent long ago, so the stream breaks
    ],
)
def test_a_failure_is_what_the_servers_own_table_and_the_clients_own_rule_make_of_it(
    code: ErrorCode, tokens_s: tuple[float, ...], outcome: str
) -> None:
    assert seen(*tokens_s, error=to_api_error(EngineError(code, "no"))).ended(11.0).outcome == outcome
