"""Owns the contract of reading an answer into blocks: their order is the answer's, however it was cut, and a further
token costs the same, however long the block is.
Never tests how the APIs show the blocks; their own tests do."""

from __future__ import annotations

import tracemalloc

import pytest

from engine.protocol import TokenLogprobs
from serve_app.api.generation.blocks import BlockReader, Grown
from serve_app.api.generation.chat_reader import ChatReader
from serve_app.api.generation.completion import Piece
from serve_app.api.generation.logprobs import ScoredToken
from serve_app.api.generation.scored_blocks import ScoredBlocks
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.parsing.reasoning import ReasoningParser
from serve_app.parsing.reasoning_parsers import reasoning_parser
from serve_app.parsing.tools import TOOL_PARSERS

QWEN = "<tool_call>\n<function=f>\n{}<parameter=a>\nx\n</parameter>\n{}</function>\n</tool_call>"


def blocks(text: str, size: int, tools: str, reasoning: str) -> list[tuple[str, str]]:
    """Return each block's kind and text, of an answer that comes in pieces of this size."""
    reader = BlockReader(ChatReader(reasoning_parser(reasoning, ""), TOOL_PARSERS[tools]()))
    for at in range(0, len(text), size):
        reader.read(text[at : at + size], last=False)
    reader.read("", last=True)
    return [(block.kind, block.text) for block in reader.blocks]


@pytest.mark.parametrize(
    ("tools", "text", "content"),
    [
        ("qwen3_coder", QWEN.format("I call it.\n", ""), "\nI call it."),
        ("qwen3_coder", QWEN.format("", "</parameter>\n"), "\n</parameter>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value>\nso\n</tool_call>", "\nso"),
    ],
)
def test_text_between_a_calls_parameters_is_a_block_after_the_call(tools: str, text: str, content: str) -> None:
    """The parameters after it became a part of it, and the call had none of them."""
    for size in (1, 4, len(text)):
        assert blocks(text, size, tools, "qwen3") == [("call", '{"a": "x"}'), ("text", content)]


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (QWEN.format("", "so\n"), ["\nso", " on", " and on", ""]),
        (QWEN.format("", "so")[:-24], ["", "", "", "\nso on and on"]),
    ],
    ids=["ended", "left open"],
)
def test_text_waits_only_while_a_call_goes_on(call: str, shown: list[str]) -> None:
    reader = BlockReader(ChatReader(None, TOOL_PARSERS["qwen3_coder"]()))
    read = [reader.read(piece, last=not piece) for piece in (call, " on", " and on", "")]
    texts = [[step.text for step in steps if isinstance(step, Grown) and step.block.kind == "text"] for steps in read]
    assert ["".join(found) for found in texts] == shown


def analysis(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"


HARMONY_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f'{analysis("a")}{PREAMBLE}{analysis("b")}{HARMONY_CALL}{{"a": "x"}}',
            [("reasoning", "a"), ("text", "I look."), ("reasoning", "b"), ("call", '{"a": "x"}')],
        ),
        (
            f'{HARMONY_CALL}{{"a": "x"}}<|call|><|start|>assistant{analysis("a")}{HARMONY_CALL}{{}}',
            [("call", '{"a": "x"}'), ("reasoning", "a"), ("call", "{}")],
        ),
        (f"{PREAMBLE}{analysis('a')}{FINAL}b", [("text", "I look."), ("reasoning", "a"), ("text", "b")]),
        (f"{analysis('a')}{analysis('b')}{PREAMBLE}{FINAL}c", [("reasoning", "a\nb"), ("text", "I look.\nc")]),
        (f"{HARMONY_CALL}<|call|><|start|>assistant{FINAL}b", [("call", "{}"), ("text", "b")]),
        (
            f'{HARMONY_CALL}{{"a": <|end|><|start|>assistant{analysis("b")}{FINAL}"c"}}',
            [("call", '{"a": '), ("reasoning", "b"), ("text", '"c"}')],
        ),
        (f'{HARMONY_CALL}{{"a": {FINAL}"c"}}', [("call", '{"a": '), ("text", '"c"}')]),
    ],
)
def test_blocks_are_in_the_order_of_harmonys_messages_however_an_answer_is_cut(
    text: str, expected: list[tuple[str, str]]
) -> None:
    """All thoughts of a piece came first, so a piece that ended a call and began a thought broke the call in two."""
    for size in (*range(1, 40), len(text)):
        assert blocks(text, size, "openai", "openai_gptoss") == expected


def test_white_space_that_waited_in_a_harmony_message_keeps_its_log_probability() -> None:
    """Regression: the next word was read as its first letter and the rest, and the letter took the scores alone."""
    blocks = BlockReader(ChatReader(reasoning_parser("openai_gptoss", ""), TOOL_PARSERS["openai"]()))
    reader = ScoredBlocks(blocks, Tokenizer.byte_level())
    at = 0
    for number, text in enumerate([FINAL, "Hello", "\n\n", "world", "\n", " ", "again"]):
        reader.read(Piece(text, tokens=(ScoredToken(97, at, TokenLogprobs(97, -float(number))),)))
        at += len(text)
    reader.read(Piece("", "stop", tokens=()))
    (block,) = blocks.blocks
    assert (block.text, [token["logprob"] for token in block.logprobs]) == (
        "Hello\n\nworld\n again",
        [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0],
    )


def test_text_that_the_end_releases_has_its_log_probabilities_though_no_token_comes_with_it() -> None:
    """Regression: a stream that its length ended gave none for the space at its end, and a whole answer did."""
    blocks = BlockReader(ChatReader(None, TOOL_PARSERS["hermes"]()))
    reader = ScoredBlocks(blocks, Tokenizer.byte_level())
    for number, (text, at) in enumerate([("Hello", 0), ("\n", 5), (" ", 6)]):
        reader.read(Piece(text, tokens=(ScoredToken(97, at, TokenLogprobs(97, -float(number))),)))
    grown = [step for step in reader.read(Piece("", "length", tokens=())) if isinstance(step, Grown)]
    assert [(step.text, [token["logprob"] for token in step.logprobs]) for step in grown] == [("\n ", [-1.0, -2.0])]


def last_texts_tokens(pieces: list[str], blocks: BlockReader) -> str:
    """Return the numbers of the pieces, each a token's text, whose scores the last block has."""
    reader = ScoredBlocks(blocks, Tokenizer.byte_level())
    at = 0
    for number, text in enumerate(pieces):
        reader.read(Piece(text, tokens=(ScoredToken(97, at, TokenLogprobs(97, -float(number))),)))
        at += len(text)
    reader.read(Piece("", "length", tokens=()))
    return "".join(f"{-token['logprob']:.0f}" for token in blocks.blocks[-1].logprobs)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["a ", "<", "<", " b"], "0123"),
        (["<", "<t", "<tool", "x"], "0123"),
        (["a", "<t<", "<", "b"], "0123"),
        (["<think>", "a", "</think>", "\n", "<", "<", "b"], "456"),
        (["<think>", "<", "<", "</think>", "<", "b"], "45"),
        (["a", " ", "<tool_call>", "<", "b"], "01234"),
        (["a<", "", "é<", "", "", "🦜 "], "012345"),
    ],
    ids=str,
)
def test_text_that_is_held_back_while_other_text_is_shown_keeps_its_log_probabilities(
    pieces: list[str], expected: str
) -> None:
    """The second `<` of `<<` was taken for the first, and that one's score was lost."""
    blocks = BlockReader(ChatReader(reasoning_parser("qwen3", ""), TOOL_PARSERS["hermes"]()))
    assert last_texts_tokens(pieces, blocks) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["<function=f>", "so", " on"], "12"),
        (["<function=f>", "so", "\n", "on"], "123"),
        (["so", "<function=f>", "\n", "so", " on", " and"], "2345"),
    ],
    ids=str,
)
def test_texts_that_are_released_together_have_their_own_tokens_log_probabilities(
    pieces: list[str], expected: str
) -> None:
    """Regression: the first of them took the last token, and its own ones were dropped."""
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    blocks = BlockReader(ChatReader(None, TOOL_PARSERS["qwen3_coder"]([function])))
    assert last_texts_tokens(pieces, blocks) == expected


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
