"""Owns the rule that ends a request at a sampled token.
Never changes the request, and never knows stop strings: the ingress, which knows text, finds those."""

from __future__ import annotations

from engine.scheduling.request import Request


def is_stop_token(request: Request, token_id: int) -> bool:
    """Whether this token, sampled next, ends the answer. It is then counted in usage but is not part of the answer."""
    # Before min_tokens no stop token is sampled, unless a grammar, which overrides the ban, leaves nothing else.
    early = request.num_output < request.sampling.min_tokens and request.sampling.grammar is None
    return token_id in request.stop_token_ids and not early


def is_complete(request: Request) -> bool:
    """Whether the answer has `max_tokens` tokens."""
    num_output = request.num_output
    assert num_output <= request.max_tokens, f"{request.request_id}: {num_output} tokens of {request.max_tokens}"
    return num_output == request.max_tokens
