"""Owns the promise that no answer ends or changes for what others of its grammar did to the lexer that they share.
Never needs a lexer of full size: the limits are those that a dozen short answers reach."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine.batch import grammar
from engine.batch.grammar import Grammars
from engine.batch.mask_workers import MaskWorkers
from engine.build.engine import FAKE_EOS_TOKEN_ID, FAKE_VOCAB_SIZE
from engine.protocol import ErrorCode
from engine.step import GrammarRow, RowFailure
from tests.engine.batch.test_grammar import PATIENT, allowed

MANY_STATES = "start: /(.*[ab].{9})*/"
"""Its lexer needs a state for each combination of letters that an answer may have among its last ten."""


def letters(seed: int, count: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(b"abcd", k=count))


def masks_of(grammars: Grammars, rows: Sequence[GrammarRow]) -> list[list[int]]:
    words, failed = grammars.masks(rows)
    assert not failed
    return words.tolist()


def rows_of_many_states(num_drafts: int) -> list[list[GrammarRow]]:
    """Four answers at a time, a dozen in all; each step is as in an answer of its own."""
    steps = []
    for first in range(0, 12, 4):
        answers = {f"r{number}": letters(number, 60 + num_drafts) for number in range(first, first + 4)}
        for count in range(60):
            steps.append(
                [
                    GrammarRow(name, MANY_STATES, answer[:count], answer[count : count + num_drafts])
                    for name, answer in answers.items()
                ]
            )
    return steps


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_no_answer_ends_or_changes_for_the_lexer_states_that_others_needed(
    num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one lexer served all answers of a grammar for ever. Once it was full, each later answer ended at its
    first token."""
    alone = {name: Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID) for name in map("r{}".format, range(12))}
    steps = rows_of_many_states(num_drafts)
    expected = [[mask for row in step for mask in masks_of(alone[row.request_id], [row])] for step in steps]
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 700)
    shared = Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID)
    templates = set()
    for step, masks in zip(steps, expected, strict=True):
        assert masks_of(shared, step) == masks
        templates |= {shared._matches[row.request_id].template for row in step}
    assert len(templates) > 3, "the limit is one that they reach together"
    for name in alone:
        shared.forget(name)
    assert allowed(shared, GrammarRow("later", MANY_STATES, ()))


def test_no_draft_is_followed_by_any_token_because_the_lexer_has_no_room_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen with two threads: one fills the lexer between a mask of the other and the draft behind it. The library says
    nothing, and left the masks behind that draft open."""
    rows = [GrammarRow(f"r{seed}", MANY_STATES, letters(seed, 41)[:1], letters(seed, 41)[1:]) for seed in (0, 7)]
    expected = masks_of(Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID), rows)
    for most in range(150, 500, 3):
        monkeypatch.setattr(grammar, "MAX_LEXER_STATES", most)
        grammars = Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID, MaskWorkers(2), PATIENT)
        words, failed = grammars.masks(rows)
        for number in {0, 1} - failed.keys():
            masks = slice(41 * number, 41 * (number + 1))
            assert words.tolist()[masks] == expected[masks]


def test_an_answer_that_fills_a_lexer_alone_ends_and_nobody_else_begins_with_that_lexer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 100)
    grammars = Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID)
    failures: list[RowFailure] = []
    for count in range(60):
        _, failed = grammars.masks([GrammarRow("a", MANY_STATES, letters(0, count))])
        failures += failed.values()
        if failed:
            break
    (failure,) = failures
    assert failure.code is ErrorCode.GRAMMAR_LIMIT_EXCEEDED
    assert "too many states" in failure.message
    grammars.forget("a")
    assert not grammars._compiled, "nor does it stay in memory"
    assert allowed(grammars, GrammarRow("b", MANY_STATES, ()))


def test_an_answer_that_needs_too_many_states_ends_however_many_lexers_it_has_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 100)
    grammars = Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID)
    ended: dict[str, int] = {}
    for count in range(200):
        rows = [GrammarRow(name, MANY_STATES, letters(ord(name), count)) for name in "abc" if name not in ended]
        _, failed = grammars.masks(rows)
        ended |= {rows[number].request_id: count for number in failed}
    assert ended.keys() == set("abc")
