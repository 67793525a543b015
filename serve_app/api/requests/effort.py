"""Owns whether, how hard and for how many tokens a request asks the model to think, and what a chat template gets of
it: the same for all routes.
Never counts what was thought."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar, get_args

from serve_app.api.requests.hints import ignore_or_refuse
from serve_app.api.requests.strict_model import USED_IF_POSSIBLE

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
"""From little to much."""
COMMON_EFFORTS = ("low", "medium", "high")
"""Those that every template with a variable for the effort knows."""
EFFORT, THINKS, BUDGET = "reasoning_effort", "enable_thinking", "thinking_budget"
"""Variables that chat templates have."""
VALUE_HINTS = {
    f"chat_template_kwargs.{name}": "Where the chat template has no such variable." for name in (EFFORT, THINKS, BUDGET)
}
SWITCHES = (THINKS, "thinking")
"""Names of one variable: DeepSeek's templates have the second."""

Budget = Annotated[int | None, USED_IF_POSSIBLE]
"""Tokens of thoughts."""
Value = TypeVar("Value", Effort, bool, int)

_UNTAKEN = "the model's chat template does not take this from a request: it would change nothing"
_NEVER_THINKS = "this model does not think"
_ALWAYS_THINKS = "this model thinks in any case, as its chat template has it"
_OVERRULED = "another field of this request says otherwise"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request says of thinking, each by the name of the field that says it."""

    efforts: Mapping[str, Effort] = field(default_factory=dict)
    switches: Mapping[str, bool] = field(default_factory=dict)
    """Whether the model is to think at all."""
    budgets: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        efforts: Mapping[str, Effort | None],
        switches: Mapping[str, bool | None],
        budgets: Mapping[str, int | None],
    ) -> Asked:
        """Without fields that say nothing."""
        return cls(_said(efforts), _said(switches), _said(budgets))


class Template(Protocol):
    """What is looked at of a chat template."""

    variables: frozenset[str]

    @property
    def efforts(self) -> tuple[Effort, ...]:
        """The values that its variable for the effort takes, from little to much."""
        ...


class Told(NamedTuple):
    options: dict[str, Any]
    """What the template gets."""
    ignored: frozenset[str]
    """The fields that had no effect."""


def thinking_options(asked: Asked, template: Template | None, given: Collection[str], *, thinks: bool) -> Told:
    """`given`: variables that the request gives to the template itself, which win. `thinks`: the server knows how the
    model marks its thoughts.

    - An effort is given as the nearest that the template takes. `none` is the same as not to think.
    - Whether to think is given to a switch. Without a switch, an effort of `none` says it, or the least effort.
    - A budget is given to templates that have a variable for it.

    What has no effect is a hint without effect, by the name of its field.

    Raises:
        ApiError: there is one, and the server is strict.
    """
    reader = _Reader(template, given, thinks)
    levels = {name: effort for name, effort in asked.efforts.items() if effort != "none"}
    off = dict.fromkeys(asked.efforts.keys() - levels.keys(), False)
    reader.decide(levels, reader.level)
    reader.decide({**off, **asked.switches}, reader.switch)
    reader.decide(asked.budgets, reader.budget)
    faults = {name: fault for name, fault in reader.faults.items() if not _is_part(name, reader.faults)}
    for name, fault in faults.items():
        without_effect(name, fault)
    return Told(reader.options, frozenset(reader.faults))


class _Reader:
    """Puts together what a template gets of one request. Each decision returns why it has no effect, if it has none."""

    def __init__(self, template: Template | None, given: Collection[str], thinks: bool) -> None:
        self.options: dict[str, Any] = {}
        self.faults: dict[str, str] = {}
        self._given = given
        self._thinks = thinks
        self._variables = template.variables if template is not None else frozenset()
        self._efforts = template.efforts if template is not None and EFFORT in self._variables else ()
        self._switch = next((name for name in SWITCHES if name in self._variables), None)

    def decide(self, values: Mapping[str, Value], decide: Callable[[Value], str | None]) -> None:
        """The first value counts; fields that say the same share its fate."""
        if not values:
            return
        first = next(iter(values.values()))
        fault = decide(first)
        for name, value in values.items():
            if why := fault if value == first else _OVERRULED:
                self.faults[name] = why

    def level(self, effort: Effort) -> str | None:
        levels = [one for one in self._efforts if one != "none"]
        return self._give(EFFORT, _nearest(effort, levels)) if levels else _UNTAKEN

    def switch(self, wanted: bool) -> str | None:
        if wanted and not self._thinks:
            return _NEVER_THINKS
        if self._switch is not None:
            return self._give(self._switch, wanted)
        if not self._efforts or EFFORT in self.options:
            return _ALWAYS_THINKS if self._thinks and not wanted else None
        if wanted:
            return self._give(EFFORT, _nearest("medium", self._efforts[1:])) if "none" in self._efforts else None
        fault = self._give(EFFORT, self._efforts[0])
        return fault or (_ALWAYS_THINKS if self._thinks and self._efforts[0] != "none" else None)

    def budget(self, tokens: int) -> str | None:
        if not self._thinks:
            return _NEVER_THINKS
        return self._give(BUDGET, tokens) if BUDGET in self._variables and tokens > 0 else _UNTAKEN

    def _give(self, name: str, value: Any) -> str | None:
        if name in self._given:
            return _OVERRULED
        self.options[name] = value
        return None


def _said(values: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in values.items() if value is not None}


def _nearest(effort: Effort, known: Collection[Effort]) -> Effort:
    """Find the nearest; of two that are as near, the lesser."""
    return min(known, key=lambda one: abs(EFFORTS.index(one) - EFFORTS.index(effort)))


def _is_part(name: str, names: Collection[str]) -> bool:
    """Whether an object that the field is in is named already."""
    return any(name.startswith(f"{whole}.") for whole in names)


def without_effect(name: str, why: str = _UNTAKEN) -> None:
    """A hint had none.

    Raises:
        ApiError: the server is strict.
    """
    ignore_or_refuse(name, f"{name}: {why}.")
