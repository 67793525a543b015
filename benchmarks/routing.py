"""Owns the offline measurement of routing: the CPU time of a choice among many replicas, without Ray.
Never routes a call: reports and prompts are made up, and the same each time. It prints a line of JSON for each size."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from random import Random
from typing import Any

from engine.protocol import LoadSnapshot, PrefillCosts, SamplingParams, Submission
from serve_app.routing.chooser import Chooser
from serve_app.routing.stats import encode
from serve_app.settings.routing import RoutingSettings

BLOCK_SIZE = 16
PROMPT_TOKENS = 1024
NUM_HEADS = 40
"""The number of different first tokens of prompts, few enough that some replicas hold a prompt's prefix."""
NUM_LIVE = 2
"""Live requests for each replica."""


def report(number: int, *, by_time: bool) -> dict[str, Any]:
    """Make a busy replica's routing stats, as an engine gives them to Serve; with predictions, `by_time`."""
    load = LoadSnapshot(
        num_running=4,
        num_waiting=0,
        num_preparing=0,
        num_waiting_preempted=0,
        wait_reason=None,
        num_queued_tokens=200 + number % 7 * 30,
        num_blocks=4096,
        num_held_blocks=400,
        num_evictable_blocks=64,
        num_reserved_blocks=100,
        num_steps=0,
        num_preemptions=0,
        reserve_ratio=0.5,
        reserve_margin=0.5,
        queued_prefill_s=0.2 + number % 7 * 0.03 if by_time else None,
        prefill_costs=PrefillCosts(0.001 + number % 5 * 1e-4, 1e-7) if by_time else None,
    )
    digests = [f"{number} {block}".encode().ljust(32) for block in range(64)]
    return encode(load, digests, limit=1024, prefill_tokens_per_s=1000.0, taken_at_s=0.0)


def measure(num_replicas: int, num_requests: int, *, by_time: bool = False) -> dict[str, float]:
    """Measure the CPU milliseconds of a choice."""
    random = Random(0)
    chooser = Chooser(RoutingSettings(), BLOCK_SIZE, random)
    names = [f"replica-{number}" for number in range(num_replicas)]
    chooser.fleet.update({name: report(number, by_time=by_time) for number, name in enumerate(names)})
    took_ms = []
    for number in range(num_requests):
        prompt = (random.randrange(NUM_HEADS), *(1,) * (PROMPT_TOKENS - 1))
        submission = Submission(f"r{number}", prompt, SamplingParams(max_tokens=16, seed=0))
        begun = time.process_time()
        chooser.fleet.open(submission.request_id)
        chooser.place(submission.request_id, submission, names, number / num_replicas)
        chooser.fleet.close(f"r{number - NUM_LIVE * num_replicas}")
        took_ms.append(1000 * (time.process_time() - begun))
    return {
        "replicas": num_replicas,
        "by_time": by_time,
        "ms_p50": statistics.median(took_ms),
        "ms_mean": statistics.fmean(took_ms),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing",
        description="Measure how long it takes to choose an engine for a request, for several numbers of engines. Ray "
        "is not involved; prompts and reports are made up. It prints one line of JSON for each number.",
    )
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=[4, 100, 1000], help="numbers of engine replicas to measure"
    )
    parser.add_argument("--by-time", action="store_true", help="let engines predict times, as with targets")
    parser.add_argument("--requests", type=int, default=500, help="requests that are routed (%(default)s)")
    options = parser.parse_args()
    for count in options.replicas:
        print(json.dumps(measure(count, options.requests, by_time=options.by_time)))
