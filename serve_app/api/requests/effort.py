"""Translates a request's wishes about thinking (whether, how hard, for how many tokens) to options of the chat
template, the same way for all routes.
Never counts the tokens of thoughts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar, get_args

from serve_app.api.requests.hints import ignore_or_refuse
from serve_app.api.requests.strict_model import USED_IF_POSSIBLE

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
"""Ordered from little to much."""
COMMON_EFFORTS = ("low", "medium", "high")
"""The efforts that every template with a variable for the effort knows."""
EFFORT, THINKS, BUDGET = "reasoning_effort", "enable_thinking", "thinking_budget"
"""Names of chat templates' variables."""
SWITCHES = (THINKS, "thinking")
"""Two names of the same variable: DeepSeek's templates have the second. A request may use either."""
KEEPING = ("preserve_thinking", "clear_thinking")
"""Variables by which Qwen's and GLM's templates show or drop the thoughts of earlier turns. Other templates decide that
by themselves."""
_NO_VARIABLE = "If the chat template has no such variable."
_NO_SWITCH = "If the chat template has neither `enable_thinking` nor `thinking`, or the other is set to another value."
VALUE_HINTS = {
    **{f"chat_template_kwargs.{name}": _NO_VARIABLE for name in (EFFORT, BUDGET, *KEEPING)},
    **{f"chat_template_kwargs.{name}": _NO_SWITCH for name in SWITCHES},
}

Budget = Annotated[int | None, USED_IF_POSSIBLE]
"""The most tokens that thoughts may take."""
Value = TypeVar("Value", Effort, bool, int)

_UNTAKEN = "the model's chat template does not take this from a request: it would change nothing"
_NEVER_THINKS = "this model does not think"
_ALWAYS_THINKS = "this model always thinks, because its chat template offers no choice"
OVERRULED = "another field of this request overrides it"


@dataclass(frozen=True, slots=True)
class ThinkingWishes:
    """A request's wishes about thinking, each by the name of the field that has it."""

    efforts: Mapping[str, Effort] = field(default_factory=dict)
    switches: Mapping[str, bool] = field(default_factory=dict)
    """Whether the model should think at all."""
    budgets: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_fields(
        cls,
        efforts: Mapping[str, Effort | None],
        switches: Mapping[str, bool | None],
        budgets: Mapping[str, int | None],
    ) -> ThinkingWishes:
        """Make one from fields, leaving out those that are not set."""
        return cls(_said(efforts), _said(switches), _said(budgets))


class Template(Protocol):
    """What is used of a chat template."""

    variables: frozenset[str]

    @property
    def efforts(self) -> tuple[Effort, ...]:
        """The values that the template's variable for the effort takes, from little to much."""
        ...


class ThinkingOptions(NamedTuple):
    options: dict[str, Any]
    """The options that the template gets."""
    ignored: frozenset[str]
    """The fields that had no effect."""


def thinking_options(
    asked: ThinkingWishes, template: Template | None, given: Collection[str], *, thinks: bool
) -> ThinkingOptions:
    """Choose the template's options. `given`: variables that the request sets itself, which win. `thinks`: the server
    knows how the model marks its thoughts.

    - An effort becomes the nearest one that the template takes. `none` means not to think.
    - Whether to think sets the template's switch. Without a switch, the effort is set to `none` or to the least one.
    - A budget is passed to templates that have a variable for it.

    A field without effect is counted as an ignored hint.

    Raises:
        ApiError: a field has no effect, and the server is strict.
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
    return ThinkingOptions(reader.options, frozenset(reader.faults))


class _Reader:
    """Collects a template's options for one request. Each decision returns the reason if it has no effect."""

    def __init__(self, template: Template | None, given: Collection[str], thinks: bool) -> None:
        self.options: dict[str, Any] = {}
        self.faults: dict[str, str] = {}
        self._given = given
        self._thinks = thinks
        self._variables = template.variables if template is not None else frozenset()
        self._efforts = template.efforts if template is not None and EFFORT in self._variables else ()
        self._switch = switch_of(self._variables)

    def decide(self, values: Mapping[str, Value], decide: Callable[[Value], str | None]) -> None:
        """Decide by the first value. Fields with the same value share its outcome; the others are overruled."""
        if not values:
            return
        first = next(iter(values.values()))
        fault = decide(first)
        for name, value in values.items():
            if why := fault if value == first else OVERRULED:
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
            return OVERRULED
        self.options[name] = value
        return None


def switch_of(variables: Collection[str]) -> str | None:
    """Return the name of a template's variable for whether to think."""
    return next((name for name in SWITCHES if name in variables), None)


def _said(values: Mapping[str, Value | None]) -> dict[str, Value]:
    return {name: value for name, value in values.items() if value is not None}


def _nearest(effort: Effort, known: Collection[Effort]) -> Effort:
    """Find the nearest known effort; of two equally near ones, the lower."""
    return min(known, key=lambda one: abs(EFFORTS.index(one) - EFFORTS.index(effort)))


def _is_part(name: str, names: Collection[str]) -> bool:
    """Whether an object that contains the field is named already."""
    return any(name.startswith(f"{whole}.") for whole in names)


def without_effect(name: str, why: str = _UNTAKEN) -> None:
    """Note that a hint had no effect.

    Raises:
        ApiError: the server is strict.
    """
    ignore_or_refuse(name, f"{name}: {why}.")
