"""The comparison of log-probabilities with those of a file in float32: what is compared, and how it is told."""

from __future__ import annotations

import dataclasses
import random

import pytest

from benchmarks.peers.agreement import TEXT_CHARS, agreement, table, texts

TRUE = [{1: -0.1, 2: -2.0, 3: -4.0}, {4: -0.5, 5: -1.0, 6: -3.0}]


def test_what_is_the_definition_is_at_no_distance() -> None:
    found = agreement(TRUE, TRUE)
    assert (found.num_texts, found.same_first, found.mean, found.largest, found.shared) == (2, 1.0, 0.0, 0.0, 1.0)


def test_distances_are_those_of_the_tokens_that_both_name() -> None:
    found = agreement([{1: -0.3, 2: -2.0, 9: -4.0}, {5: -0.9, 4: -1.0, 6: -3.0}], TRUE)
    assert found.same_first == 0.5
    assert found.shared == pytest.approx(5 / 6)
    assert found.mean == pytest.approx((0.2 + 0.0 + 0.5 + 0.1 + 0.0) / 5)
    assert found.largest == pytest.approx(0.5)


def test_another_seed_asks_for_other_texts_of_the_same_kind() -> None:
    first, again, other = (texts(20, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(TEXT_CHARS[0] <= len(text) <= TEXT_CHARS[1] for text in first)


def test_every_server_has_a_line() -> None:
    one = dataclasses.asdict(agreement(TRUE, TRUE))
    lines = table({"servers": {"llama-cpp": one, "chunkserve-stored": one}}).splitlines()
    assert lines[2:] == [
        "| llama.cpp | 100.0 % | 0.000 | 0.000 | 0.000 |",
        "| chunkserve, weights as stored | 100.0 % | 0.000 | 0.000 | 0.000 |",
    ]
