"""Owns texts that a grammar admits: seeded random walks through llguidance's matcher, over one token a byte.
Never knows what a grammar is for."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

EOS = 256
MAX_BYTES = 600
"""The length after which a walk takes the shortest way that it finds to an end."""
_CLOSED = ("\n</parameter>", "\n</arg_value>", "</think>", "[/THINK]", "<|end|>")
_CLOSERS = [list(text.encode()) for text in (*_CLOSED, '"', "}", "]", ")", ", ", "\n")]
_OPENED = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "</think>", "<think>", "{", "[", "functools[", " to=")
_TAGS = [text.encode() for text in _OPENED]


class _Bytes:
    """A tokenizer in which a token id is a byte; 256 is the end; the special tokens follow."""

    eos_token_id = EOS
    bos_token_id = None

    def __init__(self, specials: Sequence[str]) -> None:
        self.special_token_ids = [EOS + place for place in range(len(specials) + 1)]
        self.tokens = [bytes([byte]) for byte in range(256)]
        self.tokens += [b"\xff" + text.encode() for text in ("<eos>", *specials)]

    def __call__(self, text: Any) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class Walker:
    """Walks through grammars. `specials` are texts of special tokens, `closers` further texts that close something."""

    def __init__(self, specials: Sequence[str] = (), closers: Sequence[str] = ()) -> None:
        self._closers = [*(list(text.encode()) for text in closers), *_CLOSERS]
        self.specials: Mapping[str, int] = {text: EOS + 1 + place for place, text in enumerate(specials)}
        self._texts = {token: text.encode() for text, token in self.specials.items()}
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(specials)))

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def tokens(self, text: str) -> list[int]:
        """Encode a text, with special tokens where it has their texts."""
        for special in self.specials:
            if special in text:
                before, _, after = text.partition(special)
                return [*self.tokens(before), self.specials[special], *self.tokens(after)]
        return list(text.encode())

    def admits(self, grammar: str, text: str) -> bool:
        """Return whether a grammar admits the whole text, and needs no more."""
        matcher, tokens = self.matcher(grammar), self.tokens(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def begins(self, grammar: str, text: str) -> bool:
        tokens = self.tokens(text)
        return self.matcher(grammar).try_consume_tokens(tokens) == len(tokens)

    def walk(self, grammar: str, seed: object) -> str:
        """Return a text that the grammar admits. An assertion fails if the walk finds no end; no walk is endless."""
        rng, matcher, tokens = random.Random(str(seed)), self.matcher(grammar), list[int]()
        while not matcher.is_stopped() and len(tokens) < 10 * MAX_BYTES:
            chosen = _pick(rng, matcher, len(tokens), self._closers)
            if chosen == [EOS]:
                break
            assert matcher.consume_tokens(chosen), matcher.get_error()
            tokens += chosen
        assert matcher.is_accepting(), self._text(tokens)[-200:]
        return self._text(tokens)

    def _text(self, tokens: Sequence[int]) -> str:
        return b"".join(self._texts.get(token) or bytes([token]) for token in tokens).decode()


def _pick(rng: random.Random, matcher: LLMatcher, length: int, closing: Sequence[list[int]]) -> list[int]:
    """Pick any token, but prefer what closes something, and ASCII, so that most texts can be read."""
    is_late = length > MAX_BYTES
    allowed = [token for token, is_allowed in enumerate(matcher.compute_logit_bias()) if is_allowed]
    assert allowed, matcher.get_error()
    if EOS in allowed and (is_late or rng.random() < 0.2):
        return [EOS]
    if rng.random() < (0.8 if is_late else 0.2):
        closers = [text for text in closing if matcher.validate_tokens(text) == len(text)]
        if closers:
            return rng.choice(closers)
    if rng.random() < 0.1 and not is_late:
        tags = [list(text) for text in _TAGS if matcher.validate_tokens(list(text)) == len(text)]
        if tags:
            return rng.choice(tags)
    specials = [token for token in allowed if token > EOS]
    if specials and rng.random() < 0.2:
        return [rng.choice(specials)]
    readable = [token for token in allowed if 32 <= token < 127]
    return [rng.choice(readable if readable and rng.random() < 0.97 else allowed)]
