"""Owns the checks of a submission's inputs against what the model and this engine accept.
Never looks at a content except for its size."""

from __future__ import annotations

from engine.config import ResolvedConfig
from engine.multimodal_inputs import InputKind, SpanInput
from engine.protocol import ErrorCode, RequestRejected, Submission


def check_inputs(submission: Submission, config: ResolvedConfig) -> tuple[SpanInput, ...]:
    """Check the inputs of a submission and return them.

    Raises:
        RequestRejected: the model takes no such input, its size does not match its grid, or it is larger than this
            engine can keep.
    """
    for span in submission.inputs:
        _check(span, submission.prompt_token_ids, config)
    return submission.inputs


def atomic_spans(inputs: tuple[SpanInput, ...], config: ResolvedConfig) -> list[tuple[int, int]]:
    """Return the spans of the inputs that the model must see whole."""
    chunkable = {kind.name: kind.chunkable for kind in config.inputs}
    return [(span.start, span.end) for span in inputs if not chunkable[span.kind]]


def _check(span: SpanInput, prompt: tuple[int, ...], config: ResolvedConfig) -> None:
    kind = next((kind for kind in config.inputs if kind.name == span.kind), None)
    if kind is None:
        raise RequestRejected(ErrorCode.INVALID_PARAMETER, f"This model takes no input of kind {span.kind}.", "inputs")
    if len(span.data) != kind.num_bytes(span.grid):
        raise RequestRejected(
            ErrorCode.INVALID_PARAMETER,
            f"An input of {span.grid} tokens has {kind.num_bytes(span.grid)} bytes, and not {len(span.data)}.",
            "inputs",
            kind.num_bytes(span.grid),
            len(span.data),
        )
    _check_place(span, kind, prompt)
    if span.num_tokens > config.encoder_cache_tokens:
        raise RequestRejected(
            ErrorCode.INVALID_PARAMETER,
            f"inputs holds one of {span.num_tokens} tokens, and this engine keeps at most "
            f"{config.encoder_cache_tokens} encoded (encoder_cache_memory_gib).",
            "inputs",
            config.encoder_cache_tokens,
            span.num_tokens,
        )


def _check_place(span: SpanInput, kind: InputKind, prompt: tuple[int, ...]) -> None:
    token_ids = set(prompt[span.start : span.end])
    if token_ids != {kind.token_id}:
        raise RequestRejected(
            ErrorCode.INVALID_PARAMETER,
            f"The prompt has other tokens than {kind.token_id} at {span.start}..{span.end}, where an input stands.",
            "inputs",
        )
