"""Owns the text of one answer while its tokens arrive: what is final is returned, an incomplete character waits.
Never returns part of a character, and shows the text of a special token only where that is asked for."""

from __future__ import annotations

import tokenizers
from tokenizers.decoders import DecodeStream

# A character takes at most four byte tokens. More that wait are invalid bytes or special tokens, and each step decodes
# all of them again: an answer of nothing else would cost the square of its length.
MAX_PENDING_TOKENS = 16
_KEPT_TOKENS = 3  # a character that is still incomplete has at most three bytes


class Detokenizer:
    """Incomplete bytes at the end of an answer are dropped: there is no character that they could be shown as."""

    def __init__(self, core: tokenizers.Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._core = core
        self._skip = skip_special_tokens
        self._restart()

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; often the empty string."""
        self._pending.append(token_id)
        text = self._step(token_id)
        if text:
            self._pending.clear()
        elif len(self._pending) >= MAX_PENDING_TOKENS:
            text = self._give_up()
        return text

    def drop(self) -> None:
        """Forget what waits for the end of its character, and the text before it."""
        self._restart()

    def _restart(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        self._pending: list[int] = []

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._core, token_id) or ""
        except Exception as error:
            # tokenizers raises a bare Exception when a token changes text that was already returned. The stream
            # would raise for ever after; a new one goes on from this token.
            if "prefix" not in str(error):
                raise
            self._restart()
            self._pending = [token_id]
            return self._stream.step(self._core, token_id) or ""

    def _give_up(self) -> str:
        """Show all but a possibly incomplete end as it is, invalid bytes as U+FFFD, and start again."""
        settled, kept = self._pending[:-_KEPT_TOKENS], self._pending[-_KEPT_TOKENS:]
        self._restart()
        return self._core.decode(settled, skip_special_tokens=self._skip) + "".join(map(self.push, kept))
