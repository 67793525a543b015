"""Owns what the engines predict about prompts, by their last reports and by deployment, for the gates before them.
Never asks an engine: the router writes it. It is a module of its own for the same reason as engines.engine_count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.protocol import PrefillCosts, Submission
from serve_app.settings.engine_names import ENGINE


@dataclass(frozen=True, slots=True)
class EngineForecast:
    """What one engine reported."""

    engine: str
    """The id of its replica."""
    at_s: float
    """When, by the wall clock of its machine."""
    queued_s: float
    """Seconds until the prompts that it had then are computed."""
    idle_costs: PrefillCosts
    """What a prompt takes if the engine does nothing else."""

    def wait_s(self, now_s: float) -> float:
        """Return the seconds that are left of those: they pass by themselves."""
        return max(self.queued_s - max(now_s - self.at_s, 0.0), 0.0)


@dataclass(frozen=True, slots=True)
class FleetForecast:
    """What all engines reported; there is none while one of them predicts nothing. Requests that came since the reports
    are not in it, so what it says is rather too short than too long."""

    engines: tuple[EngineForecast, ...]
    cached_tokens: Callable[[Submission], Mapping[str, int]]
    """Returns how many leading tokens of a prompt each engine has, at most, as far as the router knows. Callable on any
    thread."""

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the first engine has computed the prompts that it has. `now_s`: wall clock."""
        return min(engine.wait_s(now_s) for engine in self.engines)

    def prompt_s(self, submission: Submission, enough_s: float) -> float:
        """Return the least predicted time that the prompt takes in any engine, if that does nothing else: who waits
        for whom is the engine's affair. Caches are looked at only if it would take more than `enough_s` without them:
        that costs milliseconds."""
        num_tokens = len(submission.prompt_token_ids)
        cold_s = min(engine.idle_costs.seconds(0, num_tokens) for engine in self.engines)
        if cold_s <= enough_s:
            return cold_s
        cached = self.cached_tokens(submission)
        return min(
            engine.idle_costs.seconds(min(cached.get(engine.engine, 0), num_tokens - 1), num_tokens)
            for engine in self.engines
        )


_known: dict[str, FleetForecast | None] = {}  # written by the routers' thread, read by any, as in engine_count


def fleet_forecast(deployment: str = ENGINE) -> FleetForecast | None:
    """Return the forecast; None before all engines have reported one, and while there is no engine."""
    return _known.get(deployment)


def set_fleet_forecast(forecast: FleetForecast | None, deployment: str = ENGINE) -> None:
    """Set the forecast; called by the router, on its thread."""
    _known[deployment] = forecast
