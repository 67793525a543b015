"""Owns the contract of reading an answer into blocks: a further token costs the same, however long the block is.
Never tests what the blocks are; the APIs' tests do."""

from __future__ import annotations

import tracemalloc

import pytest

from serve_app.api.generation.blocks import BlockReader
from serve_app.api.generation.chat_reader import ChatReader
from serve_app.parsing.reasoning import ReasoningParser


@pytest.mark.parametrize(
    ("first", "piece", "kind"),
    [("\U0001f600", " word", "text"), (" ", " \n", "text"), ("<think>\U0001f600", " word", "reasoning")],
    ids=["text", "white space before a text", "thoughts"],
)
def test_a_blocks_text_is_not_copied_at_every_token(first: str, piece: str, kind: str) -> None:
    """With one character beyond ASCII, the 32,000th token of a stream took 50 times as long as the first."""
    reader = BlockReader(ChatReader(ReasoningParser() if kind == "reasoning" else None, None))
    size, num_bytes = 4000, 0
    reader.read(first + piece * size, last=False)
    tracemalloc.start()
    try:
        for _ in range(size):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            reader.read(piece, last=False)
            num_bytes += tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert num_bytes < size * 3000, "allocated in all; each copy would be of 4,000 pieces or more"
    reader.read("end", last=True)
    (block,) = reader.blocks
    assert (block.kind, block.text) == (kind, f"{first.removeprefix('<think>')}{piece * 2 * size}end")
    assert block.as_opened().text == ""
