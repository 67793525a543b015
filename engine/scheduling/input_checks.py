"""Owns the checks that a submission's inputs pass to get in, against what the model and this engine take.
Never looks at a content but for its size."""

from __future__ import annotations

from engine.config import ResolvedConfig
from engine.multimodal_inputs import InputKind, SpanInput
from engine.protocol import ErrorCode, RequestRejected, Submission


def check_inputs(submission: Submission, config: ResolvedConfig) -> tuple[SpanInput, ...]:
    """The inputs, which this engine can take.

    Raises:
        RequestRejected: the model takes no such input, or it is not what it says, or larger than this engine keeps.
    """
    for given in submission.inputs:
        _check(given, submission.prompt_token_ids, config)
    return submission.inputs


def atomic_spans(inputs: tuple[SpanInput, ...], config: ResolvedConfig) -> list[tuple[int, int]]:
    """Of those inputs that the model must be shown whole."""
    chunkable = {kind.name: kind.chunkable for kind in config.inputs}
    return [(given.start, given.end) for given in inputs if not chunkable[given.kind]]


def _check(given: SpanInput, prompt: tuple[int, ...], config: ResolvedConfig) -> None:
    kind = next((kind for kind in config.inputs if kind.name == given.kind), None)
    if kind is None:
        raise RequestRejected(ErrorCode.INVALID_PARAMETER, f"This model takes no input of kind {given.kind}.", "inputs")
    if len(given.data) != kind.num_bytes(given.grid):
        raise RequestRejected(
            ErrorCode.INVALID_PARAMETER,
            f"An input of {given.grid} tokens has {kind.num_bytes(given.grid)} bytes, and not {len(given.data)}.",
            "inputs",
            kind.num_bytes(given.grid),
            len(given.data),
        )
    _check_place(given, kind, prompt)
    if given.num_tokens > config.encoder_cache_tokens:
        raise RequestRejected(
            ErrorCode.INVALID_PARAMETER,
            f"inputs holds one of {given.num_tokens} tokens, and this engine keeps at most "
            f"{config.encoder_cache_tokens} encoded (encoder_cache_memory_gib).",
            "inputs",
            config.encoder_cache_tokens,
            given.num_tokens,
        )


def _check_place(given: SpanInput, kind: InputKind, prompt: tuple[int, ...]) -> None:
    stands = set(prompt[given.start : given.end])
    if stands != {kind.token_id}:
        raise RequestRejected(
            ErrorCode.INVALID_PARAMETER,
            f"The prompt has other tokens than {kind.token_id} at {given.start}..{given.end}, where an input stands.",
            "inputs",
        )
