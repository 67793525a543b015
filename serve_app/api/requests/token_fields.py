"""Defines a request's fields about single tokens: which are banned, allowed, biased or scored, or end an answer.
Never knows a vocabulary: `submission` does."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from engine.protocol import MAX_BIAS, MAX_LOGPROBS
from serve_app.api.requests.prompt_schema import TokenId
from serve_app.api.requests.stop_schema import MAX_STOP_CHARS
from serve_app.errors.api_error import clip

MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 2**18
"""As many as the largest vocabularies have."""

StopTokenIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
AllowedTokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
BadWords = Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]


def _token_keys(value: Any) -> Any:
    """Convert keys to token ids, because JSON's keys are strings."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASED_TOKENS:
        text = f"should have at most {MAX_BIASED_TOKENS} tokens, but it has {len(value)}"
        raise PydanticCustomError("too_long", "{text}", {"text": text})
    bad = [key for key in value if not (isinstance(key, str) and _TOKEN_KEY.fullmatch(key))]
    if bad:
        text = f"should have token ids as its keys, but one is {clip(str(bad[0]), 50)!r}"
        raise PydanticCustomError("keys", "{text}", {"text": text})
    return {int(key): amount for key, amount in value.items()}


_TOKEN_KEY = re.compile("[0-9]{1,9}")
LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]],
    Field(max_length=MAX_BIASED_TOKENS, json_schema_extra={"propertyNames": {"pattern": f"^{_TOKEN_KEY.pattern}$"}}),
    BeforeValidator(_token_keys),
]


def _not_the_vocabulary(value: Any) -> Any:
    if value == -1:
        text = (
            f"should be 0 to {MAX_LOGPROBS}: -1, the whole vocabulary at each token, is not supported; "
            "a token's rank is returned without it"
        )
        raise PydanticCustomError("vocabulary", "{text}", {"text": text})
    return value


PromptLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), BeforeValidator(_not_the_vocabulary)]
