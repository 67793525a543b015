"""Defines the request of /v1/embeddings: fields, types, ranges, defaults.
Never reads text or tokens; what depends on the model is checked in `embeddings`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from serve_app.api.requests.deadline import MAX_TIMEOUT_MS
from serve_app.api.requests.foreign_fields import HINTS_IN_EMBEDDINGS
from serve_app.api.requests.prompt_schema import Inputs, as_prompts
from serve_app.api.requests.provider import Provider
from serve_app.api.requests.strict_model import StrictModel, Unsupported


class EmbeddingRequest(StrictModel):
    unsupported: ClassVar[Unsupported] = {
        "dimensions": (),
        "add_special_tokens": (True,),
        "normalize": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }
    hints: ClassVar[Unsupported] = HINTS_IN_EMBEDDINGS
    stream: ClassVar[bool] = False
    num_choices: ClassVar[int] = 1
    prompt_cache_key: ClassVar[None] = None

    model: str
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    """With `base64` a vector is its numbers as little-endian float32, encoded in base64."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
    """Keep only that many of an input's last tokens; -1 keeps as many as fit."""
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    """Among the requests that an engine holds, lower numbers are computed first."""
    timeout_ms: int | None = Field(None, ge=1, le=MAX_TIMEOUT_MS)
    """After this long, the answer is an error."""
    user: str | None = None
    provider: Provider | None = None
    """Accepted, without effect, as are the two fields below."""
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        return as_prompts(self.input)
