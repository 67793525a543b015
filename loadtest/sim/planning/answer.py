"""Owns what a plan says: a document of numbers, and the same as lines for people.
Never computes a figure that a simulation has not yielded, but for intervals and products."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any

from loadtest.sim.planning.evaluate import Result
from loadtest.sim.planning.plan import Plan

SCHEMA = 1
Z95 = 1.96
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""The factor of the standard error in a 95 % interval of a mean, by degrees of freedom from 1 on."""
EXTRAPOLATED = 0.05
"""From this share of step time on, a plan says what it is beyond."""
HOURS_A_MONTH = 730
_SIMULATED = (
    "Simulated with the engine's own scheduler and router. Not simulated: the network, the ingress's own work, drafts, "
    "and other programs on the machine."
)


def interval(result: Result) -> tuple[float, float]:
    """Return the 95 % interval of the share of good answers: the wider of that of so many requests (Wilson's), and
    that of the means of so many seeds (Student's), since requests of a seed are late together."""
    offered = sum(run.offered for run in result.runs)
    if not offered:
        return 0.0, 1.0
    share, square = result.good_share, Z95**2
    middle = (share + square / (2 * offered)) / (1 + square / offered)
    half = Z95 / (1 + square / offered) * math.sqrt(share * (1 - share) / offered + square / (4 * offered**2))
    low, high = middle - half, middle + half
    if len(shares := result.shares) > 1:
        factor = STUDENT[min(len(shares) - 1, len(STUDENT)) - 1]
        half = factor * stdev(shares) / math.sqrt(len(shares))
        low, high = min(low, fmean(shares) - half), max(high, fmean(shares) + half)
    return max(low, 0.0), min(high, 1.0)


def confidence(plan: Plan) -> str:
    """Return `high`, `medium` or `low`: high if the whole interval holds what is wanted, and steps that are a deviation
    longer do, too; medium if one of the two does; and no better than medium if much is extrapolated."""
    if not plan.is_held:
        wanted = plan.limits.wanted
        return "high" if interval(plan.result)[1] < wanted else "low"
    points = [interval(plan.result)[0] >= plan.limits.wanted, plan.slower.good_share >= plan.limits.wanted]
    level = sum(points)
    if plan.result.extrapolated > EXTRAPOLATED:
        level = min(level, 1)
    return ("low", "medium", "high")[level]


def document_of(plan: Plan, cost_per_hour: float | None) -> dict[str, Any]:
    """Return the plan as JSON's types. Shares are from 0 to 1, times milliseconds, rates a second."""
    case, result, rate = plan.case, plan.result, plan.case.demand.rate
    low, high = interval(result)
    return {
        "schema": SCHEMA,
        "simulated": True,
        "holds": plan.is_held,
        "confidence": confidence(plan),
        "demand": {
            "rate_per_s": rate,
            "mean_prompt_tokens": case.demand.mean_prompt,
            "mean_answer_tokens": case.demand.mean_answer,
            "left_out": case.demand.left_out,
        },
        "wanted": {"ttft_ms": case.goal.ttft_ms, "tpot_ms": case.goal.tpot_ms, "attainment": plan.limits.wanted},
        "set": {"engine_replicas": plan.trial.replicas, **asdict(plan.trial.settings)},
        "autoscaling": _scaled(plan, cost_per_hour),
        "holds_what": {
            "attainment": result.good_share,
            "attainment_interval": [low, high],
            "attainment_by_seed": result.shares,
            "ttft_attainment": result.kept("ttft"),
            "tpot_attainment": result.kept("tpot"),
            **{
                f"{name}_{title}_ms": result.quantile(name, share)
                for name in ("ttft", "tpot")
                for title, share in _SHARES
            },
            "goodput_per_s": result.goodput_per_s,
            "highest_rate_per_s": plan.highest_load * rate,
        },
        "costs": _costs(plan, cost_per_hour),
        "sureness": {
            "seeds": len(result.runs),
            "requests": sum(run.offered for run in result.runs),
            "seconds_of_a_run": case.seconds,
            "share_of_the_trace": case.demand.covers(case.seconds, case.all),
            "step_deviation": case.machine.deviation,
            "attainment_if_steps_are_slower": plan.slower.good_share,
            "attainment_with_one_replica_less": None if plan.fewer is None else plan.fewer.good_share,
            "extrapolated_share": result.extrapolated,
            "steps": case.machine.name,
        },
        "nearest": None if plan.is_held else _nearest(plan),
        "trials": plan.num_trials,
    }


_SHARES = (("p50", 0.5), ("p99", 0.99))


def _costs(plan: Plan, cost_per_hour: float | None) -> dict[str, Any]:
    result, replicas = plan.result, plan.trial.replicas
    tokens_an_hour = 3600 * plan.case.demand.rate * plan.case.demand.mean_answer
    return {
        "replica_hours_per_hour": replicas,
        "utilisation": result.utilisation,
        "headroom": max(plan.highest_load - 1, 0.0),
        "preemptions_per_request": result.preemptions_per_request,
        "cost_per_hour": None if cost_per_hour is None else replicas * cost_per_hour,
        "cost_per_million_answer_tokens": None
        if cost_per_hour is None
        else 1e6 * replicas * cost_per_hour / tokens_an_hour,
    }


def _scaled(plan: Plan, cost_per_hour: float | None) -> dict[str, Any] | None:
    if plan.scaled is None:
        return None
    bounds, result = plan.scaled.bounds, plan.scaled.result
    return {
        "min_replicas": bounds.least,
        "max_replicas": bounds.most,
        "startup_time_s": bounds.startup_s,
        "attainment": result.good_share,
        "replica_hours_per_hour": result.replicas,
        "is_cheaper": result.replicas < plan.trial.replicas,
        "cost_per_hour": None if cost_per_hour is None else result.replicas * cost_per_hour,
    }


def _nearest(plan: Plan) -> dict[str, Any]:
    """Return what comes nearest with the most replicas: a lower rate with these targets, or longer targets, each by
    itself, at this rate."""
    wanted = plan.limits.wanted
    return {
        "rate_per_s": plan.highest_load * plan.case.demand.rate,
        "ttft_ms": plan.result.quantile("ttft", wanted),
        "tpot_ms": plan.result.quantile("tpot", wanted),
    }


# --- as lines ---------------------------------------------------------------------------------------------------------


def lines_of(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a document."""
    demand, wanted, holds = found["demand"], found["wanted"], found["holds_what"]
    goals = [f"{title} {wanted[name]:g} ms" for name, title in _GOALS if wanted[name] is not None]
    yield (
        f"{demand['rate_per_s']:.3g} requests/s, {demand['mean_prompt_tokens']:.0f} prompt and "
        f"{demand['mean_answer_tokens']:.0f} answer tokens on average; {_percent(wanted['attainment'])} of the "
        f"answers within {' and '.join(goals)}"
    )
    if demand["left_out"]:
        yield f"{demand['left_out']} requests are longer than an engine holds, and left out"
    yield ""
    if found["holds"]:
        yield "What to set"
    else:
        best = _percent(holds["attainment"])
        yield f"CANNOT BE HELD: with {found['set']['engine_replicas']} replicas, {best} at best"
        yield from _nearest_lines(found["nearest"])
        yield ""
        yield "What comes nearest"
    yield from _indented(_setting_rows(found))
    yield "What it would hold"
    yield from _indented(_holding_rows(found))
    yield "At what cost"
    yield from _indented(_cost_rows(found))
    yield f"How sure: {found['confidence']}"
    yield from (f"  {line}" for line in _sureness(found))


_GOALS = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"))


def _indented(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"  {name.ljust(max(len(one) for one, _ in rows))}  {value}" for name, value in rows]


def _setting_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    chosen, scaled = found["set"], found["autoscaling"]
    rows = [("engine_replicas", str(chosen["engine_replicas"]))]
    if scaled is not None:
        rows.append(("or autoscaling", f"{scaled['min_replicas']} to {scaled['max_replicas']} replicas"))
    for name, title in (("tpot_ms", "engine.targets.tpot_ms"), ("ttft_ms", "engine.targets.ttft_ms")):
        rows.append((title, "unset" if chosen[name] is None else f"{chosen[name]:g}"))
    rows += [(f"engine.{name}", str(chosen[name])) for name in ("max_num_batched_tokens", "max_num_seqs")]
    return [*rows, ("routing.load_factor", f"{chosen['load_factor']:g}")]


def _holding_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    holds = found["holds_what"]
    low, high = holds["attainment_interval"]
    rows = [("all targets", f"{_percent(holds['attainment'])} of the answers ({_percent(low)} to {_percent(high)})")]
    for name, title in (("ttft", "TTFT"), ("tpot", "TPOT")):
        p50, p99 = holds[f"{name}_p50_ms"], holds[f"{name}_p99_ms"]
        rows.append(
            (title, f"p50 {_ms(p50)}, p99 {_ms(p99)}; {_percent(holds[f'{name}_attainment'])} within the target")
        )
    rows.append(("goodput", f"{holds['goodput_per_s']:.3g} good answers/s"))
    return [*rows, ("highest rate", f"about {holds['highest_rate_per_s']:.3g} requests/s")]


def _cost_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    costs, scaled = found["costs"], found["autoscaling"]
    hours = costs["replica_hours_per_hour"]
    rows = [("replica-hours", f"{hours} an hour, {hours * HOURS_A_MONTH} a month")]
    if scaled is not None:
        kept = f"{_percent(scaled['attainment'])} of the answers"
        verdict = "cheaper" if scaled["is_cheaper"] else "no cheaper"
        rows.append(("autoscaled", f"{scaled['replica_hours_per_hour']:.2f} an hour, {kept}: {verdict}"))
    if costs["cost_per_hour"] is not None:
        per_million = costs["cost_per_million_answer_tokens"]
        rows.append(("cost", f"{costs['cost_per_hour']:.4g} an hour, {per_million:.4g} a million answer tokens"))
    rows.append(("busy", f"{_percent(costs['utilisation'])} of the time"))
    return [*rows, ("headroom", f"{100 * costs['headroom']:.0f} % more requests")]


def _sureness(found: dict[str, Any]) -> Iterator[str]:
    sure = found["sureness"]
    by_seed = found["holds_what"]["attainment_by_seed"]
    spread = f", from {_percent(min(by_seed))} to {_percent(max(by_seed))}" if by_seed else ""
    yield f"{sure['requests']} requests in {sure['seeds']} runs of {sure['seconds_of_a_run']:.0f} s{spread}"
    if sure["share_of_the_trace"] < 1:
        yield f"the runs are {_percent(sure['share_of_the_trace'])} of the trace: --seconds makes them longer"
    yield (
        f"steps deviate by {_percent(sure['step_deviation'])} ({sure['steps']}); if all took that much longer: "
        f"{_percent(sure['attainment_if_steps_are_slower'])}"
    )
    if (fewer := sure["attainment_with_one_replica_less"]) is not None:
        yield f"with one replica less: {_percent(fewer)}"
    if sure["extrapolated_share"] > 0:
        yield f"{_percent(sure['extrapolated_share'])} of the step time is beyond what was measured, and extrapolated"
    yield _SIMULATED


def _nearest_lines(nearest: dict[str, Any]) -> Iterator[str]:
    rate = nearest["rate_per_s"]
    yield f"  at these targets: {rate:.3g} requests/s" if rate else "  at these targets: not a hundredth of the rate"
    wide = [f"{title} {nearest[name]:.0f} ms" for name, title in _GOALS if nearest[name] is not None]
    yield f"  at this rate: {', '.join(wide)}" if wide else "  at this rate: nothing; the queue grows without end"


def _percent(share: float) -> str:
    text = f"{100 * share:.1f}"
    return f"{'99.9' if text == '100.0' and share < 1 else text} %"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} ms"
