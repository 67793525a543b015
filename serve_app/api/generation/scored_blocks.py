"""Assigns tokens to the blocks of text that they make up, for answers that show their tokens' scores.
Never decides what is text: a block reader does, and it may hold text back until it knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from serve_app.api.generation.blocks import BlockReader, Grown, Step
from serve_app.api.generation.completion import Piece
from serve_app.api.generation.logprobs import ScoredToken, TokenTexts, chat_token_json


class ScoredBlocks:
    """Reads the pieces of one answer, and adds the tokens' scores to each block of text.

        pieces   | </think> | \\n\\n | Hel | lo | < | <eos> |    a reader may hold text back until it knows what it is
        grown    |                 | Hel | lo |              a text's tokens are the last ones of the same total length
                                                           before what is held back

    Tokens of thoughts, calls and markers belong to no text block, and neither do tokens without text.
    """

    def __init__(self, blocks: BlockReader, texts: TokenTexts) -> None:
        self._blocks = blocks
        self._texts = texts
        self._read = 0  # characters
        self._waiting: list[tuple[ScoredToken, int]] = []  # each with the length of its text

    def read(self, piece: Piece) -> list[Step]:
        steps: list[Step] = []
        last = piece.finish_reason is not None
        begin, cuts = self._read, [token.text_offset for token in piece.tokens or ()]
        ends = [*(min(max(cut - begin, 0), len(piece.text)) for cut in cuts), len(piece.text)]
        is_end = last and not cuts  # what waited until then has its tokens here
        before = self._blocks.read(piece.text[: ends[0]], last=is_end)
        steps += self._scored(before) if is_end else before
        for number, token in enumerate(piece.tokens or ()):
            text = piece.text[ends[number] : ends[number + 1]]
            self._waiting.append((token, len(text)))
            steps += self._scored(self._blocks.read(text, last=last and number + 1 == len(cuts)))
        self._read += len(piece.text)
        return steps

    def _scored(self, steps: Sequence[Step]) -> Iterator[Step]:
        num_behind = self._blocks.num_held + sum(len(step.text) for step in steps if isinstance(step, Grown))
        for step in steps:
            if not isinstance(step, Grown):
                yield step
                continue
            num_behind -= len(step.text)
            taken = self._take(len(step.text), num_behind)
            if step.block.kind != "text":
                yield step
                continue
            logprobs = [chat_token_json(token.scores, self._texts) for token in taken if token.scores is not None]
            step.block.logprobs += logprobs
            yield Grown(step.block, step.text, logprobs)

    def _take(self, num_chars: int, num_behind: int) -> list[ScoredToken]:
        """Take the waiting tokens whose texts are together `num_chars` long, before the last `num_behind` characters.
        Keep those behind them, and drop those before."""
        waiting, end = self._waiting, len(self._waiting)
        while end and waiting[end - 1][1] <= num_behind:  # only a character's last token has text
            end -= 1
            num_behind -= waiting[end][1]
        self._waiting, num_chars = waiting[end:], num_chars + num_behind
        taken: list[ScoredToken] = []
        for token, length in reversed(waiting[:end]):
            num_chars -= length
            if taken and length and num_chars < 0:
                break
            taken.append(token)
        return taken[::-1]
