"""Owns the rule that ends a request at a sampled token.
Never changes the request; stop strings are the ingress's, which knows text."""

from __future__ import annotations

from engine.protocol import FinishReason
from engine.request import Request


def is_stop_token(request: Request, token_id: int) -> bool:
    """Whether this token, sampled next, ends the answer. It is then counted in usage but is not part of the answer."""
    return token_id in request.stop_token_ids and request.num_output >= request.sampling.min_tokens


def finish_reason(request: Request) -> FinishReason | None:
    """Why the request is over now that its newest token is appended, or None if it goes on."""
    return FinishReason.LENGTH if request.num_output >= request.max_new else None
