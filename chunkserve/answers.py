"""Owns what a request returns: whole answers, and the chunks of a stream.
Never imports what makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.protocol import Usage
from serve_app.parsing.deltas import ToolCall

__all__ = ["Alternative", "Answer", "Choice", "Chunk", "FinishReason", "TokenLogprob", "ToolCall", "ToolCallDelta"]

FinishReason = Literal["stop", "length", "tool_calls"]
"""Why an answer ended: the model or a stop string ended it, its limit was reached, or the model calls tools. A call of
the function that the request names ends with `stop`, as with OpenAI."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that the model could have chosen."""

    token_id: int
    token: str
    """The token's text; a token that is only part of a character is written as its bytes, `bytes:\\xf0\\x9f`."""
    logprob: float
    """The natural logarithm of its probability, before temperature and filters."""


@dataclass(frozen=True, slots=True)
class TokenLogprob(Alternative):
    """A token of an answer or of a prompt."""

    top: tuple[Alternative, ...] = ()
    """The most likely tokens at this place, best first, as many as requested."""
    rank: int | None = None
    """In a prompt: how many tokens are at least as likely, so that 1 is the most likely one. None in an answer."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a tool call in a stream. The first part of call number `index` has its `id` and `name`; the later ones
    have `arguments`, pieces of a JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt."""

    text: str
    """The answer without thoughts, tool calls and special tokens."""
    token_ids: tuple[int, ...]
    """All of its tokens, including thoughts, calls, and the token that ended it, if one did."""
    finish_reason: FinishReason
    stop: str | int | None = None
    """The stop string or the id of the token that ended the answer; None if its limit did."""
    reasoning: str = ""
    """The thoughts of a model that marks them."""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Those of `token_ids`, if they were requested."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. Its properties are those of the first choice, which without `n` is the only one."""

    choices: tuple[Choice, ...]
    """As many as `n` asks for."""
    usage: Usage
    """The tokens of the prompt, how many of them were found in the prefix cache, and those of all choices."""
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Those of `prompt_token_ids`, if they were requested; the first is None, because nothing predicts it."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def stop(self) -> str | int | None:
        return self.choices[0].stop

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next part of a stream. Texts are final: a stop string never takes one back."""

    text: str = ""
    index: int = 0
    """The choice that it belongs to; 0 without `n`."""
    token_ids: tuple[int, ...] = ()
    """The tokens that this part completes."""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    """On the last chunk of each choice."""
    stop: str | int | None = None
    """On the last chunk of each choice; see Choice."""
    usage: Usage | None = None
    """On the last chunk of the stream."""
