"""Owns the promise that what pages say in words of kept figures is what the files say, also after the next measurement.
Never compares a table; test_pages does."""

from __future__ import annotations

import json
import statistics

import pytest

from docsite.pages import ROOT


def steps() -> dict[tuple[str, int, str], float]:
    found = json.loads((ROOT / "loadtest" / "results" / "engine_step_stored.json").read_text(encoding="utf-8"))
    return {(cell["step"], cell["size"], cell["kernels"]): cell["ms_p50"] for cell in found["cells"]}


def words(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_what_a_checkpoints_own_bits_cost_and_bring_is_what_was_measured() -> None:
    """Regression: three texts kept the figures of two measurements before."""
    cells = steps()
    single, many = (cells["decode", rows, "native"] / cells["decode", rows, "stored"] for rows in (1, 16))
    prompts = [cells["prefill", size, "native"] / cells["prefill", size, "stored"] for size in (128, 256, 512)]
    assert many == pytest.approx(1, abs=0.03), "as long"
    assert prompts == pytest.approx([7 / 8] * 3, abs=0.03), "an eighth less, or more the other way round"
    in_bfloat16 = (
        f"prompts then take an eighth less time, batches of 16 as long, single streams {single:.1f} times as long"
    )
    assert in_bfloat16 in words("docs/how-to/quantised-models.md")
    as_stored = f"{1 / single:.0%} of the time for one stream, as long for 16 streams and an eighth more for prompts"
    assert as_stored.replace("%", " %") in words("engine/NOTES.md")
    measured = words("docs/benchmarks/stored-weights.md")
    assert "prompts take an eighth longer than in bfloat16, and 16 streams as long." in measured
    for step, said in (
        (("decode", 1, "int8"), "and in int8 {}."),
        (("decode", 16, "stored+rounded"), "16 streams take {} of the time"),
        (("prefill", 256, "stored+rounded"), "a prompt of 256 tokens {}."),
    ):
        share = cells[step] / cells[*step[:2], "native"]
        assert said.format(f"{share:.0%}".replace("%", " %")) in measured


@pytest.mark.parametrize(
    ("page", "name", "other", "said"),
    [
        ("peers.md", "peers_vectors.json", "vllm", "which is {:.1f} times vLLM's tokens a second"),
        ("llama-cpp.md", "llama_cpp.json", "llama-cpp", "steps alone would give {:.1f} times as many"),
    ],
)
def test_what_the_engine_alone_could_give_16_clients_is_the_sum_of_its_steps(
    page: str, name: str, other: str, said: str
) -> None:
    rounds = json.loads((ROOT / "loadtest" / "results" / name).read_text(encoding="utf-8"))["rounds"]
    cells = steps()
    prompt_ms, rows_ms = cells["prefill", 128, "stored+rounded"], cells["decode", 16, "stored+rounded"]
    alone_s = (48 * 96 / 128 * prompt_ms + 48 * 64 / 16 * rows_ms) / 1000
    theirs = statistics.median(one[other]["scenarios"]["closed"]["tokens_per_s"] for one in rounds)
    assert said.format(48 * 64 / alone_s / theirs) in words(f"docs/benchmarks/{page}")
    sums = f"take {alone_s:.1f} s ([steps](stored-weights.md), 128 tokens of a prompt in {prompt_ms:.0f} ms"
    assert f"{sums} and 16 rows in {rows_ms:.0f})" in words("docs/benchmarks/peers.md")
