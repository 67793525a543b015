"""Makes the table of highlights in the README and the comparison, from the saved results of the comparison with peers.
Never computes a figure: benchmarks/peers/comparison.py does."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.peers.comparison import OURS, RAY_LLM, VLLM, Document, best_vllm, figure, row_of

SHOWN = (
    ("mixed", "longest_gap_ms", "longest gap of a stream beside long prompts, ms", "less"),
    ("closed", "tokens_per_s", "16 clients: tokens a second", "more"),
    ("", "cold_start_s", "from the command to the first token, s", "less"),
    ("mixed", "long_ttft_ms", "a long prompt's own first token, ms", "less"),
)


def table(document: Document) -> str:
    """Render medians over the rounds; vLLM is shown with the better of its two settings."""
    return "\n".join(_lines(document))


def _lines(document: Document) -> Iterator[str]:
    yield "| | better is | chunkserve | vLLM | Ray Serve LLM |"
    yield "|---|---|---|---|---|"
    for scenario, name, title, better in SHOWN:
        row = row_of(scenario, name)
        found = [figure(document, server, row) for server in (OURS, best_vllm(document, row) or VLLM[0], RAY_LLM)]
        cells = (f"{spread[0]:.{row.digits}f}" if spread else "" for spread in found)
        yield f"| {title} | {better} | {' | '.join(cells)} |"
