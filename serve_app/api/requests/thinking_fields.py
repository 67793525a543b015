"""Defines the fields by which a chat says whether, how hard and for how many tokens the model should think.
Never knows what a chat template makes of them: `effort` does."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.requests.effort import Budget, Effort, ThinkingWishes
from serve_app.api.requests.strict_model import USED_IF_POSSIBLE, StrictModel, Unsupported


class ReasoningRequest(StrictModel):
    """OpenRouter's object for `reasoning_effort`, `thinking_budget`, `enable_thinking` and `include_reasoning`."""

    hints: ClassVar[Unsupported] = {"summary": ()}
    hint_path: ClassVar[str] = "reasoning."
    effort: Annotated[Effort | None, USED_IF_POSSIBLE] = None
    """Like `reasoning_effort`."""
    max_tokens: Budget = None
    """Like `thinking_budget`."""
    exclude: bool | None = None
    """If true, the model's thoughts are not shown."""
    enabled: Annotated[bool | None, USED_IF_POSSIBLE] = None
    """Like `enable_thinking`."""


class ThinkingRequest(StrictModel):
    """DeepSeek's, GLM's and Kimi's object for `enable_thinking` and `thinking_budget`."""

    hints: ClassVar[Unsupported] = {
        "clear_thinking": (),  # the chat template decides which thoughts of earlier turns are shown
        "keep": (),
    }
    hint_path: ClassVar[str] = "thinking."
    type: Annotated[Literal["disabled", "enabled", "adaptive", "auto"], USED_IF_POSSIBLE]
    """Like `enable_thinking`, which is false only for `disabled`."""
    budget_tokens: Budget = None
    """Like `thinking_budget`."""


class ThinkingFields(StrictModel):
    """Fields of a chat. Fields with the same meaning must be equal."""

    reasoning_effort: Annotated[Effort | None, USED_IF_POSSIBLE] = None
    """The chat template gets the nearest effort that it takes, if it has a variable of this name. `none` means the same
    as `enable_thinking: false`."""
    enable_thinking: Annotated[bool | None, USED_IF_POSSIBLE] = None
    """Whether the model should think. The chat template gets it if it has a variable of this name or `thinking`;
    otherwise false becomes an effort of `none`, or the least one."""
    thinking_budget: Budget = None
    """The most tokens of thoughts. The chat template gets it if it has a variable of this name."""
    reasoning: ReasoningRequest | None = None
    thinking: ThinkingRequest | None = None

    @model_validator(mode="after")
    def _one_effort(self) -> Self:
        asked = self.thinking_wishes
        for values in (asked.efforts, asked.switches, asked.budgets):
            first = next(iter(values), None)
            other = next((name for name in values if values[name] != values[first]), None) if first else None
            if other is not None:
                text = f"should be equal to {first}, which has the same meaning"
                raise PydanticCustomError("thinking", "{text}", {"text": text, "field": other})
        return self

    @property
    def thinking_wishes(self) -> ThinkingWishes:
        """The request's wishes about thinking, except those in `chat_template_kwargs`."""
        asked, switch = self.reasoning or ReasoningRequest(), self.thinking
        efforts = {"reasoning_effort": self.reasoning_effort, "reasoning.effort": asked.effort}
        switches = {
            "enable_thinking": self.enable_thinking,
            "reasoning.enabled": asked.enabled,
            "thinking.type": None if switch is None else switch.type != "disabled",
        }
        budgets = {
            "thinking_budget": self.thinking_budget,
            "reasoning.max_tokens": asked.max_tokens,
            "thinking.budget_tokens": None if switch is None else switch.budget_tokens,
        }
        return ThinkingWishes.from_fields(efforts, switches, budgets)
