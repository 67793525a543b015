"""Owns the random configs and requests that property tests draw from.
Never draws what is refused: of two settings that exclude each other, one is dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import strategies as st

from engine.config import SchedulerConfig, SpeculativeConfig
from engine.fake.kv_mover import FakeMover
from engine.protocol import SamplingParams


def _scheduler(values: dict[str, Any]) -> SchedulerConfig:
    if values["reserve_mode"] == "full":
        values = {**values, "preempt_policy": "none"}
    if values["chunk_boundary"] == "request_local":
        values = {**values, "max_partial_prefills": 0, "chunk_owner": "scheduler"}
    if values["chunk_owner"] == "engine":
        values = {**values, "long_prefill_token_threshold": 0, "chunk_halving_context": 0}
        values = {**values, "long_prefill_defer_tokens": 0}
    if not values["enable_chunked_prefill"]:
        values = {**values, "chunk_boundary": "shared", "chunk_owner": "scheduler"}
        chunked = ("long_prefill_token_threshold", "long_prefill_defer_tokens", "chunk_halving_context")
        values |= dict.fromkeys(chunked, 0)
    return SchedulerConfig(**values)


SCHEDULERS = st.fixed_dictionaries(
    dict(
        batch_mode=st.sampled_from(["mixed", "mixed", "mixed_prefill_first", "prefill_first", "decode_first"]),
        decode_starve_ms=st.sampled_from([0.0, 30.0, 200.0]),
        prefill_starve_ms=st.sampled_from([0.0, 50.0, 500.0]),
        decode_finish_tokens=st.sampled_from([0, 4]),
        reserve_mode=st.sampled_from(["full", "learned", "learned", "ratio", "prompt"]),
        preempt_policy=st.sampled_from(["lifo", "retract", "offload"]),
        requeue=st.sampled_from(["arrival", "front", "back"]),
        reserve_margin=st.sampled_from([0.0, 1.0]),
        reserve_prior=st.sampled_from([1, 256]),
        reserve_window=st.sampled_from([8, 512]),
        reserve_tenants=st.sampled_from([0, 1, 64]),
        ratio_decay_steps=st.sampled_from([3, 600]),
        ratio_decay_on=st.sampled_from(["decode_only", "any_decode"]),
        reserve_clip=st.sampled_from([2, 4096]),
        watermark_blocks=st.sampled_from([0, 1]),
        max_partial_prefills=st.sampled_from([0, 1, 2]),
        long_prefill_token_threshold=st.sampled_from([0, 5]),
        enable_chunked_prefill=st.sampled_from([True, True, True, True, False]),
        long_prefill_defer_tokens=st.sampled_from([0, 0, 1, 9]),
        long_prefill_defer_ms=st.sampled_from([0.0, 30.0, 500.0]),
        chunk_halving_context=st.sampled_from([0, 0, 1, 9]),
        chunk_align=st.sampled_from([None, 1, 3]),
        chunk_boundary=st.sampled_from(["shared", "shared", "request_local"]),
        chunk_owner=st.sampled_from(["scheduler", "scheduler", "scheduler", "engine"]),
        atomic_policy=st.sampled_from(["defer", "extend"]),
        prompt_logprobs_step=st.sampled_from(["mixed", "dedicated"]),
        prefill_fill_ratio=st.sampled_from([0.0, 0.0, 1.0]),
        coalesce_waiting_ms=st.sampled_from([0.0, 50.0]),
        coalesce_partial_ms=st.sampled_from([0.0, 30.0]),
        priority_age_ms=st.sampled_from([50.0, 1000.0]),
        admission_order=st.sampled_from(["strict", "bypass"]),
        max_overtakes=st.sampled_from([1, 16]),
    )
).map(_scheduler)

_LOOKED_UP = SpeculativeConfig(method="suffix", min_match=1, adaptive=False, free_tokens=8)
_JUDGED = replace(_LOOKED_UP, adaptive=True)
_PROPOSED = SpeculativeConfig(method="draft_model", model="a name", adaptive=False, free_tokens=8, model_cost=0.1)
_LOOPS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"num_speculative_tokens": 3},
    {"num_speculative_tokens": 3, "drafting_limit": 5},
    {"num_speculative_tokens": 2, "speculative": _LOOKED_UP},
    {"num_speculative_tokens": 2, "speculative": _PROPOSED},
    {"recurrent_state": True},
    {"recurrent_state": True, "overlap": True},
    {"recurrent_state": True, "num_speculative_tokens": 3},
    {"recurrent_state": True, "num_speculative_tokens": 3, "drafting_limit": 5},
    {"recurrent_state": True, "num_speculative_tokens": 2, "speculative": _LOOKED_UP},
    {"recurrent_state": True, "num_speculative_tokens": 2, "speculative": _PROPOSED},
    {"overlap": True, "num_speculative_tokens": 4, "drafting_limit": 9},
    {"overlap": True, "num_speculative_tokens": 2, "speculative": _LOOKED_UP},
    {"overlap": True, "num_speculative_tokens": 3, "speculative": _JUDGED},
    {"recurrent_state": True, "overlap": True, "num_speculative_tokens": 4},
    {"recurrent_state": True, "overlap": True, "num_speculative_tokens": 2, "speculative": _LOOKED_UP},
]


LONGEST_WHOLE = 60
"""Longest prompt where prompts are not computed in chunks, with what has been answered before a preemption."""

TIERS: list[dict[str, Any] | None] = [
    None,
    None,
    {"host_blocks": 3},
    {"host_blocks": 60},
    {"disk": True, "most_storing": 4},
    {"host_blocks": 12, "disk": True},
]
"""Options of FakeMover, whose disk each engine has for itself."""


def _mover(options: dict[str, Any]) -> Callable[..., FakeMover]:
    disk: dict[str, Any] = {"disk": {}} if "disk" in options else {}
    return partial(FakeMover, held=True, **{**options, **disk})


def _engine(values: dict[str, Any]) -> dict[str, Any]:
    values = dict(values)
    tiers = values.pop("tiers")
    alone = "recurrent_state" not in values["loop"] and values["loop"].get("speculative") is not _PROPOSED
    if tiers is not None and alone and values["enable_prefix_caching"]:
        values["mover"] = _mover(tiers)
    if "mover" not in values and values["scheduler"].preempt_policy == "offload":
        values["scheduler"] = replace(values["scheduler"], preempt_policy="lifo")
    loop, stride = values.pop("loop"), values.pop("stride")
    if values["scheduler"].chunk_owner == "engine":
        loop = {}
    least = values["max_num_seqs"] * (1 + loop.get("num_speculative_tokens", 0)) + 1
    values["max_num_batched_tokens"] = max(values["max_num_batched_tokens"], least)
    if not values["scheduler"].enable_chunked_prefill:
        values["max_num_batched_tokens"] += LONGEST_WHOLE + least
        values["max_prefill_tokens"] += LONGEST_WHOLE
        values["max_model_len"] = LONGEST_WHOLE + 1
    elif "recurrent_state" in loop:
        snapshots = {"state_snapshot_tokens": stride * values["block_size"], "state_snapshots": 3}
        values["scheduler"] = replace(values["scheduler"], **snapshots)
    return {**values, **loop}


CONFIGS = st.fixed_dictionaries(
    dict(
        loop=st.sampled_from(_LOOPS),
        stride=st.sampled_from([0, 1, 3]),
        tiers=st.sampled_from(TIERS),
        block_size=st.sampled_from([1, 2, 4]),
        num_kv_blocks=st.sampled_from([12, 24, 46, 46, 80]),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([7, 8, 13, 64]),
        max_prefill_tokens=st.sampled_from([1, 3, 8, 64]),
        enable_prefix_caching=st.booleans(),
        scheduler=SCHEDULERS,
    )
).map(_engine)

# Prompts are cuts of two texts plus a tail, so that prefixes are shared, differ late, and end anywhere in a block.
PROMPTS = st.builds(
    lambda text, cut, tail: (text * 40)[:cut] + tuple(tail),
    st.sampled_from([(1, 2, 3), (1, 2, 3, 4, 5)]),
    st.integers(1, 30),
    st.lists(st.integers(1, 31), max_size=6),
)


def _params(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{**values, "min_tokens": min(values["min_tokens"], values["max_tokens"])})


PARAMS = st.fixed_dictionaries(
    dict(
        max_tokens=st.one_of(st.integers(0, 12), st.integers(15, 34)),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 3),
        ignore_eos=st.booleans(),
        min_tokens=st.sampled_from([0, 0, 3]),
        stop_token_ids=st.sampled_from([(), (), (5, 9)]),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
    )
).map(_params)


@st.composite
def spans(draw: st.DrawFn, length: int) -> tuple[tuple[int, int], ...]:
    """Draw mostly no spans; otherwise spans in order, apart or touching."""
    if length < 2 or draw(st.integers(0, 3)):
        return ()
    cuts = sorted(draw(st.sets(st.integers(0, length), min_size=2, max_size=4)))
    return tuple(zip(cuts[::2], cuts[1::2], strict=False))
