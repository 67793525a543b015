"""Decodes one answer as its tokens arrive: returns the text that is final, and holds an incomplete character back.
Never returns part of a character before the answer ends, and shows a special token's text only on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import tokenizers
from tokenizers.decoders import DecodeStream

# A character takes at most four byte tokens. If more wait, they are invalid bytes or special tokens, and each step
# decodes all of them again: without a limit, an answer of such tokens would cost the square of its length.
MAX_PENDING_TOKENS = 16
_NONE: Mapping[int, str] = MappingProxyType({})
_FOLLOWED_TOKENS = 16  # the last of a text; the last one with text of its own decides
_KEPT_TOKENS = 3  # a character that is still incomplete has at most three bytes


class Detokenizer:
    """Returns text in pieces which together, with the last one from `finish`, equal the text of all tokens decoded at
    once. The only exception is a decoder that changes earlier text when a later token arrives: returned text stays.
    """

    def __init__(
        self, core: tokenizers.Tokenizer, *, skip_special_tokens: bool = True, shown: Mapping[int, str] = _NONE
    ) -> None:
        """`shown`: special tokens that are shown in any case, with their texts."""
        self._core = core
        self._skip = skip_special_tokens
        self._shown = shown
        self._before: list[int] = []  # tokens of the last text of theirs: decoders may treat a first word differently
        self._restart()

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; often the empty string."""
        if token_id in self._shown:
            return self.finish() + self._shown[token_id]
        self._pending.append(token_id)
        text = self._step(token_id)
        if text:
            self._before[:] = self._pending
            self._pending.clear()
        elif len(self._pending) >= MAX_PENDING_TOKENS:
            text = self._give_up()
        return text

    def finish(self) -> str:
        """Return the text of the tokens that wait, because no token follows that could complete them. Invalid bytes
        show as U+FFFD, as in a decode of all tokens."""
        before, both = self._decode(self._before), self._decode([*self._before, *self._pending])
        text = both[len(before) :] if both.startswith(before) else self._decode(self._pending)
        self._restart()
        return text

    def follow(self, token_ids: Sequence[int]) -> None:
        """Go on behind these tokens, whose text is not returned: the first word after them keeps its space."""
        tail = token_ids[-_FOLLOWED_TOKENS:]
        for skipped in range(_KEPT_TOKENS + 1):  # the tail may begin inside a character, and then have no text
            for token_id in tail[skipped:]:
                self.push(token_id)
            self.drop()
            if self._before:
                break

    @property
    def waits(self) -> bool:
        """Whether bytes of an incomplete character wait."""
        return self._decode(self._pending) != ""

    def drop(self) -> None:
        """Forget the tokens that wait for the end of their character."""
        self._restart()

    def copy(self) -> Detokenizer:
        """Make another that goes on from here."""
        other = Detokenizer(self._core, skip_special_tokens=self._skip, shown=self._shown)
        other._before = list(self._before)
        other._restart()
        for token_id in self._pending:
            other.push(token_id)
        return other

    def _restart(self) -> None:
        """Begin a new stream behind the last text: with none before it, a decoder may strip the next word's space."""
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        self._pending: list[int] = []
        for token_id in self._before:
            self._stream.step(self._core, token_id)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._core.decode(token_ids, skip_special_tokens=self._skip) if token_ids else ""

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._core, token_id) or ""
        except Exception as error:
            # tokenizers raises a bare Exception when a token changes text that was already returned. The stream
            # would keep raising from then on, so a new one continues from this token.
            if "prefix" not in str(error):
                raise
            self._pending.pop()
            text = self.finish()
            self._pending = [token_id]
            return text + (self._stream.step(self._core, token_id) or "")

    def _give_up(self) -> str:
        """Return all but a possibly incomplete end, with invalid bytes as U+FFFD, and start again."""
        whole = self._decode(self._pending)
        splits = range(len(self._pending) - _KEPT_TOKENS, 0, -1)
        at = next((at for at in splits if self._is_apart(at, whole)), splits[0])
        settled, kept = self._pending[:at], self._pending[at:]
        self._restart()
        return self._decode(settled) + "".join(map(self.push, kept))

    def _is_apart(self, at: int, whole: str) -> bool:
        """Whether both sides of `at` decode separately as they do together, so that no sequence of bytes crosses it."""
        return self._decode(self._pending[:at]) + self._decode(self._pending[at:]) == whole
