"""Owns the requests that `benchmarks.ingress.stalls` sends: for each way to be large, the largest accepted one.
Never random: a body is the same each time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from serve_app.api.requests.json_size import KEY_ITEMS, MAX_ITEMS
from serve_app.api.text.tokenizer import Tokenizer

MOST_BYTES = 3_900_000
MODEL = "bench"


@dataclass(frozen=True, slots=True)
class Case:
    path: str
    body: bytes


def _words(count: int) -> str:
    """Make words of syllables. Most occur only once, so that the tokenizer's cache of words does not help."""
    draw = Random(1)
    syllables = [consonant + vowel for consonant in "bcdfghjklmnprstvz" for vowel in ("a", "en", "i", "or", "u")]
    return " ".join("".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(count))


def _cut(tokenizer: Tokenizer, num_tokens: int) -> str:
    return tokenizer.decode(tokenizer.encode(_words(num_tokens))[:num_tokens])


def _completion(prompt: Any, **fields: Any) -> Case:
    return _case("/v1/completions", prompt=prompt, max_tokens=4, **fields)


def _chat(messages: list[Any], **fields: Any) -> Case:
    return _case("/v1/chat/completions", messages=messages, max_tokens=4, **fields)


def _case(path: str, **fields: Any) -> Case:
    body = json.dumps({"model": MODEL, **fields}, separators=(",", ":"), ensure_ascii=False)
    return Case(path, body.encode())


_HAN = "".join(chr(0x4E00 + 7919 * i % 0x5000) for i in range(MOST_BYTES // 3))
_MOST_PAIRS = MAX_ITEMS // (2 * KEY_ITEMS + 3) - 8
"""The maximum number of messages or parts, which have two keys each."""
_MOST_LISTS = MAX_ITEMS // (KEY_ITEMS + 3) - 8
_TURN = {"role": "user", "content": "a"}

CASES: dict[str, Callable[[Tokenizer], Case]] = {
    "30k tokens": lambda tokenizer: _completion(_cut(tokenizer, 30_000)),
    "130k tokens": lambda tokenizer: _completion(_cut(tokenizer, 130_000)),
    "3.9 MB of words": lambda _: _completion(_words(600_000)[:MOST_BYTES]),
    "3.9 MB of one letter": lambda _: _completion("a" * MOST_BYTES),
    "3.9 MB of CJK": lambda _: _completion(_HAN),
    "3.9 MB in a chat": lambda _: _chat([{"role": "user", "content": _words(600_000)[:MOST_BYTES]}]),
    "end of 3.9 MB of CJK": lambda _: _completion(_HAN, truncate_prompt_tokens=1000),
    "messages": lambda _: _chat([_TURN] * _MOST_PAIRS),
    "parts": lambda _: _chat([{"role": "user", "content": [{"type": "text", "text": "a"}] * _MOST_PAIRS}]),
    "token ids": lambda _: _completion([100] * (MAX_ITEMS - 100)),
    "metadata": lambda _: _completion("a", metadata={f"key {i}": [[]] for i in range(_MOST_LISTS)}),
    "tokenize": lambda _: _case("/tokenize", prompt=_HAN),
    "detokenize": lambda _: _case("/detokenize", tokens=[30_000 + i % 10_000 for i in range(640_000)]),
    "prompt's log-probabilities": lambda _: _completion([100 + i % 1000 for i in range(12_000)], prompt_logprobs=20),
    "64 answers": lambda _: _completion([100 + i % 1000 for i in range(8000)], n=64, bad_words=["a"] * 256),
}
