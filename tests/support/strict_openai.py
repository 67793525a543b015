"""Owns OpenAI's published types at their strictest: no coercion, and no field besides theirs and those named here.
Never describes a field itself: the types are those of the `openai` package."""

from __future__ import annotations

import inspect
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, create_model

OURS: dict[str, frozenset[str]] = {
    "ChatCompletion": frozenset({"prompt_token_ids", "prompt_logprobs"}),
    "ChatCompletionChunk": frozenset({"prompt_token_ids"}),
    "ChatCompletionMessage": frozenset({"reasoning", "reasoning_content"}),
    "ChoiceDelta": frozenset({"reasoning", "reasoning_content"}),
    "Choice": frozenset({"token_ids", "stop_reason", "matched_stop"}),
    "CompletionChoice": frozenset({"token_ids", "prompt_token_ids", "prompt_logprobs", "stop_reason", "matched_stop"}),
}
"""Fields that a model has besides OpenAI's, by the model's name."""

NULLS: dict[tuple[str, str], Any] = {
    ("CompletionChoice", "finish_reason"): Literal["stop", "length"] | None,
    ("Logprobs", "token_logprobs"): list[float | None] | None,
    ("Logprobs", "top_logprobs"): list[dict[str, float] | None] | None,
}
"""Places where OpenAI itself sends nulls that its types leave out: in the chunks before the last, and for the first
token of a prompt, which nothing predicts."""

ModelT = TypeVar("ModelT", bound=BaseModel)


@cache
def strict(model: type[ModelT]) -> type[ModelT]:
    """Return the same model, and those inside it, such that they forbid unknown fields."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kind = NULLS.get((model.__name__, name)) or _strict_type(field.annotation)
        fields[name] = (kind, ... if field.is_required() else field.default)
    fields |= dict.fromkeys(OURS.get(model.__name__, ()), (Any, None))
    config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    return create_model(model.__name__, __config__=config, **fields)


def _strict_type(kind: Any) -> Any:
    if inspect.isclass(kind) and issubclass(kind, BaseModel):
        return strict(kind)
    inner = get_args(kind)
    match get_origin(kind):
        case None:
            return kind
        case origin if origin is Annotated:
            return _strict_type(inner[0])
        case origin if origin in (Union, UnionType):
            return Union[tuple(map(_strict_type, inner))]  # noqa: UP007 - of a tuple made here
        case origin if origin in (list, dict):
            return origin[tuple(map(_strict_type, inner))]
    return kind
