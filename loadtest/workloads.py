"""Owns the named loads: the requests of each, its rates or numbers of clients, and its limits.
Never sends anything: a plan is data, the same on every worker that makes it from the same settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.arrivals import Profile
from loadtest.plan import Closed, Open, Plan, Point, Replay, Shape, Source
from loadtest.slo import Limit, parse_limits
from loadtest.traces import read_trace, scaled

DEFAULT_LIMITS = "failed<=0,good_share>=0.9"

_OPEN = frozenset({"rate", "arrivals", "cv", "lengths"})
_CLOSED = frozenset({"clients", "lengths"})
_STEPS = ((0.3, 1.0), (0.7, 4.0))
_BURST = ((0.45, 1.0), (0.1, 8.0), (0.45, 1.0))
"""Pairs of a share of the load's seconds and a factor for its rate."""
_SWEEP_SHAPES = ((1000, 1000), (8000, 1000), (1000, 8000))


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user chooses. None or empty means the load's own default."""

    seconds: float | None = None
    """Length of each point."""
    warm_up_s: float | None = None
    rate: float | None = None
    rates: tuple[float, ...] = ()
    clients: tuple[int, ...] = ()
    arrivals: str | None = None
    cv: float | None = None
    lengths: float | None = None
    """Factor for the lengths of all prompts and answers."""
    longest: int | None = None
    """Maximum tokens of prompt and answer that the server accepts; longer requests of a trace are left out."""
    trace: Path | None = None
    limits: str | None = None
    tenants: tuple[str, ...] = ()
    """Empty or at least two: a single key is used by all."""
    has_command: bool = False

    @property
    def scale(self) -> float:
        return self.lengths or 1.0


@dataclass(frozen=True, slots=True)
class Workload:
    """A named load."""

    about: str
    build: Callable[[Settings], Plan]
    uses: frozenset[str]
    """Settings that this load takes, besides those that all loads take."""
    needs_command: bool = False
    """Whether a command must disturb the deployment during the load (`--do`)."""


def plan_of(name: str, settings: Settings) -> Plan:
    """Raises: ValueError: a setting is missing, or the load has no use for it."""
    workload = WORKLOADS[name]
    if workload.needs_command and not settings.has_command:
        raise ValueError(f"{name} needs --do, the command that does it; loadtest/README.md has one for Kubernetes")
    for field in ("rate", "rates", "clients", "arrivals", "cv", "lengths", "longest", "trace", "tenants"):
        if getattr(settings, field) and field not in workload.uses:
            option = "several --keys" if field == "tenants" else f"--{field}"
            raise ValueError(f"{option}: {name} has no use for it, only for {', '.join(sorted(workload.uses))}")
    if (settings.arrivals == "gamma") != (settings.cv is not None):
        raise ValueError("--arrivals gamma needs --cv, and nothing else does")
    plan = workload.build(settings)
    plan = dataclasses.replace(plan, points=_told_apart(plan.points))
    if settings.limits is not None:
        plan = dataclasses.replace(plan, limits=tuple(parse_limits(settings.limits)))
    return plan


def _told_apart(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """Number the points whose name an earlier one has, such as a rate that is measured twice: figures are counted by
    the points' names."""
    found: dict[str, Point] = {}
    for point in points:
        names = (point.name, *(f"{point.name} ({number})" for number in range(2, len(points) + 1)))
        name = next(name for name in names if name not in found)
        found[name] = dataclasses.replace(point, name=name)
    return tuple(found.values())


def _limits(text: str = DEFAULT_LIMITS) -> tuple[Limit, ...]:
    return tuple(parse_limits(text))


def _shape(settings: Settings, prompt: int, answer: int, shared: int = 0, **more: Any) -> Shape:
    """Make a shape with its lengths scaled to the server at hand."""
    prompt, answer = (max(round(tokens * settings.scale), 1) for tokens in (prompt, answer))
    return Shape(prompt, answer, round(shared * settings.scale), **more)


def _point(settings: Settings, name: str, seconds: float, *sources: Source, **more: Any) -> Point:
    """Make a point. Its warm-up is a tenth of its length, at most 10 s."""
    seconds = settings.seconds or seconds
    warm_up_s = settings.warm_up_s if settings.warm_up_s is not None else min(seconds / 10, 10.0)
    if not 0 <= warm_up_s < seconds:
        raise ValueError(f"a warm-up of {warm_up_s:g} s leaves nothing of {seconds:g} s")
    return Point(name, sources, seconds, warm_up_s, **more)


def _cold(settings: Settings) -> Settings:
    """Switch off the warm-up by default, for loads whose first requests count, too."""
    return settings if settings.warm_up_s is not None else dataclasses.replace(settings, warm_up_s=0.0)


def _open(settings: Settings, kind: str, shape: Shape, rate: float, seconds: float) -> Open:
    """Make an open source at `rate`, for the user's seconds if they are given."""
    return _in_steps(settings, kind, shape, Profile.constant(rate, settings.seconds or seconds))


def _in_steps(settings: Settings, kind: str, shape: Shape, profile: Profile) -> Open:
    return Open(kind, shape, profile, settings.arrivals or "poisson", settings.cv or 1.0)


def _one_of(clients: tuple[int, ...], default: int) -> int:
    if len(clients) > 1:
        raise ValueError(f"--clients is one number here, not {', '.join(map(str, clients))}")
    return (clients or (default,))[0]


# --- the loads ------------------------------------------------------------------------------------------------------


def _smoke(settings: Settings) -> Plan:
    source = Open(
        "chat", _shape(settings, 32, 16), Profile.constant(settings.rate or 1.0, settings.seconds or 10.0), "constant"
    )
    return Plan((_point(_cold(settings), "smoke", 10.0, source),), _limits("failed<=0,rejected<=0,ok>=1"))


def _sweep(settings: Settings) -> Plan:
    points = []
    for prompt, answer in _SWEEP_SHAPES:
        for clients in settings.clients or (1, 4, 16, 64):
            source = Closed("chat", _shape(settings, prompt, answer), clients)
            line = f"{prompt}/{answer}"
            points.append(_point(_cold(settings), f"{line} x {clients}", 60.0, source, x=clients, line=line))
    return Plan(tuple(points), _limits("failed<=0"), x_label="clients")


def _rates(settings: Settings) -> Plan:
    if settings.rate and settings.rates:
        raise ValueError("--rate or --rates, not both")
    points = []
    for rate in settings.rates or ((settings.rate,) if settings.rate else (0.5, 1.0, 2.0, 4.0)):
        source = _open(settings, "chat", _shape(settings, 500, 100), rate, 60.0)
        points.append(_point(settings, f"{rate:g} requests/s", 60.0, source, x=rate))
    return Plan(tuple(points), _limits("failed<=0"), x_label="requests offered a second")


def _trace(settings: Settings) -> Plan:
    if settings.trace is None:
        raise ValueError("trace needs --trace, the path of a trace, .csv or .jsonl")
    trace = scaled(
        read_trace(settings.trace),
        rate=settings.rate,
        lengths=settings.scale,
        longest=settings.longest,
        seconds=settings.seconds,
    )
    seconds = trace.rows[-1].at_s + 1e-3  # so that the last request is included
    notes = (f"{trace.left_out} requests of the trace are longer than {settings.longest} tokens, and left out",)
    return Plan(
        (
            _point(
                dataclasses.replace(_cold(settings), seconds=seconds),
                settings.trace.name,
                seconds,
                Replay("trace", trace),
            ),
        ),
        _limits(),
        notes=notes if trace.left_out else (),
        series={"ideal_hit_share": trace.ideal_hit_share},
    )


def _sessions(settings: Settings) -> Plan:
    shape = _shape(settings, 60, 80, shared=200)
    source = Closed("turn", shape, _one_of(settings.clients, 8), think_s=2.0, turns=6)
    return Plan((_point(_cold(settings), "sessions", 120.0, source),), _limits())


def _prefix(settings: Settings) -> Plan:
    rate = settings.rate or 2.0
    parts = (("prompt-a", 0.5, 1500), ("prompt-b", 0.2, 1500), ("prompt-c", 0.1, 1500), ("none", 0.2, 0))
    sources = [
        _open(settings, kind, _shape(settings, 100, 60, shared=shared), rate * share, 60.0)
        for kind, share, shared in parts
    ]
    return Plan((_point(settings, "prefix", 60.0, *sources),), _limits())


def _interference(settings: Settings) -> Plan:
    """The load has at least two long prompts, however short it is."""
    rate, seconds = settings.rate or 2.0, settings.seconds or 120.0
    long_rate = max(0.01 * rate, 2.5 / seconds)
    sources = (
        _open(settings, "short", _shape(settings, 200, 150), 0.99 * rate, seconds),
        Open("long", _shape(settings, 32_000, 20), Profile.constant(long_rate, seconds), "constant"),
    )
    return Plan((_point(settings, "interference", seconds, *sources),), _limits(), judged="short")


def _cancel(settings: Settings) -> Plan:
    rate = settings.rate or 4.0
    leaving = _shape(settings, 200, 400, cancel_share=1.0, cancel_after_s=1.0)
    sources = (
        _open(settings, "leaves", leaving, rate / 2, 60.0),
        _open(settings, "stays", _shape(settings, 200, 60), rate / 2, 60.0),
    )
    return Plan((_point(settings, "cancel", 60.0, *sources),), _limits(), judged="stays", settles=True)


def _slow_readers(settings: Settings) -> Plan:
    """The slow readers' answers exceed the socket buffers, so that the server notices."""
    sources = (
        Closed("slow", _shape(settings, 50, 1000, read_pause_s=0.1), _one_of(settings.clients, 16)),
        _open(settings, "normal", _shape(settings, 200, 60), settings.rate or 2.0, 240.0),
    )
    return Plan((_point(_cold(settings), "slow readers", 240.0, *sources),), _limits(), judged="normal")


def _overload(settings: Settings) -> Plan:
    rate = settings.rate or 2.0
    points = []
    for factor in (1, 2, 5):
        source = _open(settings, "chat", _shape(settings, 200, 60), factor * rate, 60.0)
        points.append(_point(settings, f"{factor} x {rate:g} requests/s", 60.0, source, x=factor * rate))
    limits, x_label = _limits("failed<=0"), "requests offered a second"
    return Plan(tuple(points), limits, x_label=x_label, no_collapse=0.7, retry_after=True)


def _stepwise(name: str, steps: tuple[tuple[float, float], ...]) -> Callable[[Settings], Plan]:
    def build(settings: Settings) -> Plan:
        profile = Profile(steps).scaled(settings.rate or 1.0, settings.seconds or 300.0)
        source = _in_steps(settings, "chat", _shape(settings, 200, 100), profile)
        return Plan((_point(settings, name, 300.0, source),), _limits("failed<=0"))

    return build


def _tenants(settings: Settings) -> Plan:
    if len(settings.tenants) < 2:
        raise ValueError("tenants needs two or more of them: --keys ann=KEY,bob=KEY")
    rate = settings.rate or 0.5
    sources = [
        _open(settings, name, _shape(settings, 200, 60, tenant=name), rate * (1 if i else 10), 60.0)
        for i, name in enumerate(settings.tenants)
    ]
    return Plan((_point(settings, "tenants", 60.0, *sources),), _limits(), judged=settings.tenants[1])


def _soak(settings: Settings) -> Plan:
    seconds = 4 * 3600.0
    source = _open(settings, "chat", _shape(settings, 300, 120), settings.rate or 1.0, seconds)
    return Plan((_point(settings, "soak", seconds, source),), _limits(), settles=True)


def _disturbed(name: str) -> Callable[[Settings], Plan]:
    def build(settings: Settings) -> Plan:
        source = _open(settings, "chat", _shape(settings, 200, 200), settings.rate or 1.0, 180.0)
        return Plan((_point(settings, name, 180.0, source),), _limits("failed<=0"))

    return build


def _disturbance(name: str, about: str) -> Workload:
    return Workload(f"{about} under load (`--do`); no stream may break", _disturbed(name), _OPEN, needs_command=True)


WORKLOADS = {
    "smoke": Workload("a request a second for ten seconds; nothing may fail", _smoke, frozenset({"rate", "lengths"})),
    "sweep": Workload("closed loop: 1k/1k, 8k/1k and 1k/8k tokens, each with 1, 4, 16 and 64 clients", _sweep, _CLOSED),
    "rates": Workload("open loop, one rate after the other: goodput against rate", _rates, _OPEN | {"rates"}),
    "trace": Workload(
        "a trace's requests: their times, lengths and shared prefixes",
        _trace,
        frozenset({"trace", "rate", "lengths", "longest"}),
    ),
    "sessions": Workload("conversations of six turns, with time to think", _sessions, _CLOSED),
    "prefix": Workload("three system prompts, shared by half, a fifth and a tenth of the requests", _prefix, _OPEN),
    "interference": Workload("one prompt in a hundred has 32,000 tokens; the others are judged", _interference, _OPEN),
    "cancel": Workload(
        "every second client leaves after a second; the others are judged, and the server has to let go", _cancel, _OPEN
    ),
    "slow-readers": Workload(
        "clients that read ten events a second, beside others, who are judged", _slow_readers, _OPEN | _CLOSED
    ),
    "overload": Workload(
        "the rate, twice and five times of it: goodput may not collapse, refusals say when to come", _overload, _OPEN
    ),
    "step": Workload("the rate rises fourfold after a third of the time", _stepwise("step", _STEPS), _OPEN),
    "burst": Workload("eight times the rate for a tenth of the time", _stepwise("burst", _BURST), _OPEN),
    "tenants": Workload(
        "the first tenant asks ten times as much as each other; the second is judged", _tenants, _OPEN | {"tenants"}
    ),
    "soak": Workload("a request a second for four hours; then the server has to let go", _soak, _OPEN),
    "replica-kill": _disturbance("replica-kill", "a replica is killed"),
    "head-kill": _disturbance("head-kill", "Ray's head is killed"),
    "drain": _disturbance("drain", "a node is drained"),
    "upgrade": _disturbance("upgrade", "a new version is rolled out"),
}
