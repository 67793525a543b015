"""Prepares the echo of a prompt: its text, and where in the text each token begins.
Never changes a text that a client sent: it gets the same characters back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_app.api.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """`offsets`: for each of the prompt's tokens, how many characters of `text` come before the token's text."""

    text: str
    offsets: tuple[int, ...]


def read_text(token_ids: Sequence[int], given: str, detokenizer: Detokenizer, special_texts: Mapping[int, str]) -> Echo:
    """Read a prompt that was given as text. Its tokens go through the answer's detokenizer, so that the answer
    continues where the prompt ends, and its first word keeps its space."""
    offsets: list[int] = []
    at = 0
    held = False
    for token_id in token_ids:
        offsets.append(at)
        text = detokenizer.push(token_id)
        held = not text and (held or token_id not in special_texts)
        at = _advance(given, at, text, special_texts.get(token_id, ""))
    if held:
        detokenizer.drop()  # a text that ends in U+FFFD looks incomplete; the answer must not repeat it
    return Echo(given, tuple(offsets))


def read_ids(
    token_ids: Sequence[int], detokenizer: Detokenizer, reader: Detokenizer, special_texts: Mapping[int, str]
) -> Echo:
    """Read a prompt that was given as token ids. Its text always shows special tokens, even if the answer does not:
    `reader` decodes it. A character that begins in the prompt and ends in the answer is shown once, with the answer."""
    offsets: list[int] = []
    texts: list[str] = []
    at = 0
    for token_id in token_ids:
        offsets.append(at)
        texts.append(reader.push(token_id))
        at += len(texts[-1])
        if token_id in special_texts and detokenizer.waits:
            detokenizer.drop()  # the reader showed it as U+FFFD, because nothing after a special token completes it
        detokenizer.push(token_id)
    return Echo("".join(texts), tuple(offsets))


def _advance(given: str, at: int, text: str, special: str) -> int:
    """Return where the next token begins, after one that shows as `text`, or is the special token `special`.

    The text may contain a special token, if a chat template wrote it, or not, if encoding added it in front.
    """
    if special and not text:
        return at + len(special) if given.startswith(special, at) else at
    return min(at + len(text), len(given))
