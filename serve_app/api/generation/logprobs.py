"""Writes OpenAI's two `logprobs` objects, and assigns tokens to the pieces of text that they belong to.
Never asks for a score; a request that asked for none does not come here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.protocol import TokenLogprobs

MIN_LOGPROB = -9999.0
"""What OpenAI and vLLM write for minus infinity, which JSON does not have."""
_JSON_CHARS = 20  # approximate length of a token or an alternative with its number


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """`text_offset`: how many characters of the choice's text come before this token's text. `scores` is None if
    nothing predicted the token, or if the engine reports no scores."""

    token_id: int
    text_offset: int
    scores: TokenLogprobs | None
    of_prompt: bool = False


class TokenQueue:
    """Holds the tokens of one answer in order, each until the text that it belongs to is sent.

        0 ........ sent ........ read            characters of the choice's text
        | taken    | held back   | open: tokens of a character that is not complete

    Text is held back until a character's last byte has come, and while it may be the beginning of a stop string; a
    token waits for its text. A token without text of its own, such as a special token, is taken with the text that
    follows it, or at the end.
    """

    def __init__(self) -> None:
        self._read = 0
        self._sent = 0
        self._held: deque[tuple[int, ScoredToken]] = deque()  # with where the token's text ends
        self._open: list[ScoredToken] = []

    def add_prompt(
        self, token_ids: Sequence[int], offsets: Sequence[int], scores: Sequence[TokenLogprobs], num_chars: int
    ) -> None:
        """Add the whole prompt, before any other token. `scores` belong to its tokens from the second to the last."""
        self._read = num_chars
        for token_id, offset, score in zip(token_ids, offsets, (None, *scores), strict=True):
            self._held.append((num_chars, ScoredToken(token_id, offset, score, of_prompt=True)))

    def skip(self, num_chars: int) -> None:
        """Leave out text whose tokens are not shown, before any token: a prompt that is only echoed."""
        self._read += num_chars

    def add(self, token_id: int, scores: TokenLogprobs | None, num_chars: int) -> None:
        """Add a token, which completed `num_chars` of text."""
        self._open.append(ScoredToken(token_id, self._read, scores))
        self.complete(num_chars)

    def complete(self, num_chars: int) -> None:
        """Assign `num_chars` of text to the tokens of the character that was incomplete until now."""
        if num_chars:
            self._read += num_chars
            self._held.extend((self._read, token) for token in self._open)
            self._open.clear()

    def take(self, num_chars: int) -> tuple[ScoredToken, ...]:
        """Take the tokens whose text ends within the next `num_chars` that are sent."""
        self._sent += num_chars
        taken = []
        while self._held and self._held[0][0] <= self._sent:
            taken.append(self._held.popleft()[1])
        return tuple(taken)

    def take_all(self) -> tuple[ScoredToken, ...]:
        """Take what is left after the answer's end, including tokens whose text a stop string cut off, as in vLLM."""
        taken = (*(token for _, token in self._held), *self._open)
        self._held.clear()
        self._open.clear()
        return taken


TokenText = Callable[[int], str]


def logprobs_json(tokens: Sequence[ScoredToken], token_text: TokenText) -> dict[str, Any]:
    return {
        "tokens": [token_text(token.token_id) for token in tokens],
        "token_logprobs": [None if token.scores is None else _number(token.scores.logprob) for token in tokens],
        "top_logprobs": [None if token.scores is None else _top(token.scores, token_text) for token in tokens],
        "text_offset": [token.text_offset for token in tokens],
    }


class TokenTexts(Protocol):
    """Gives the text and the bytes of a token, as a tokenizer does."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> list[int]: ...


def token_id_text(token_id: int) -> str:
    """Name a token as vLLM does where its text is ambiguous."""
    return f"token_id:{token_id}"


@dataclass(frozen=True, slots=True)
class TokenIdsAsTexts:
    """Names tokens by their ids instead of their texts, and leaves their bytes as they are."""

    texts: TokenTexts

    def token_text(self, token_id: int) -> str:
        return token_id_text(token_id)

    def token_bytes(self, token_id: int) -> list[int]:
        return self.texts.token_bytes(token_id)


def chat_logprobs_json(tokens: Sequence[ScoredToken], texts: TokenTexts) -> dict[str, Any]:
    """Write the chat endpoint's object. It gives each token's bytes, because several tokens may share a character."""
    scored = [token.scores for token in tokens if token.scores is not None]
    return {"content": [chat_token_json(scores, texts) for scores in scored], "refusal": None}


def chat_token_json(scores: TokenLogprobs, texts: TokenTexts) -> dict[str, Any]:
    top = [_chat_alternative(token_id, logprob, texts) for token_id, logprob in scores.top]
    return _chat_alternative(scores.token_id, scores.logprob, texts) | {"top_logprobs": top}


def _chat_alternative(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.token_text(token_id), "logprob": _number(logprob), "bytes": texts.token_bytes(token_id)}


def prompt_logprobs_json(scores: Sequence[TokenLogprobs], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """Write vLLM's `prompt_logprobs`: null for the first token; for each later one, the alternatives by token id."""
    return [None, *(_by_token_id(score, texts) for score in scores)]


def _by_token_id(scores: TokenLogprobs, texts: TokenTexts) -> dict[str, Any]:
    ranked: list[tuple[int, float, int | None]]
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(scores.top, 1)]
    if all(token_id != scores.token_id for token_id, _, _ in ranked):
        ranked.append((scores.token_id, scores.logprob, scores.rank))
    return {
        str(token_id): {"logprob": _number(logprob), "rank": rank, "decoded_token": texts.token_text(token_id)}
        for token_id, logprob, rank in ranked
    }


def json_chars(tokens: Sequence[ScoredToken]) -> int:
    """Estimate the object's length, to decide whether to write it in a thread."""
    scored = [token.scores for token in tokens if token.scores is not None]
    return _JSON_CHARS * (len(tokens) - len(scored)) + score_chars(scored)


def score_chars(scores: Sequence[TokenLogprobs]) -> int:
    return _JSON_CHARS * sum(1 + len(score.top) for score in scores)


def told_chars(told: Sequence[dict[str, Any]]) -> int:
    """Estimate the length of tokens that `chat_token_json` has written."""
    return _JSON_CHARS * sum(1 + len(one["top_logprobs"]) for one in told)


def _top(scores: TokenLogprobs, token_text: TokenText) -> dict[str, float]:
    """List the alternatives, best first. The chosen token is always among them, last if it is not one of the best, as
    with OpenAI and vLLM.

    The keys are texts. If several tokens have the same text, the chosen token gets it as its key, or else the best of
    them does, and the others are named `token_id:7`, as in vLLM. The chosen token's number is the same in both places:
    clients compare the two for equality to see whether it was the best.
    """
    chosen = token_text(scores.token_id)
    alternatives: dict[str, float] = {}
    for token_id, logprob in scores.top:
        if token_id == scores.token_id:
            alternatives[chosen] = _number(scores.logprob)
            continue
        text = token_text(token_id)
        alternatives[token_id_text(token_id) if text == chosen or text in alternatives else text] = _number(logprob)
    alternatives.setdefault(chosen, _number(scores.logprob))
    return alternatives


def _number(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
