"""Owns the fields by which a chat says whether, how hard and for how many tokens the model is to think.
Never knows what a chat template makes of them; `effort` does."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from serve_app.api.requests.effort import Asked, Budget, Effort
from serve_app.api.requests.strict_model import USED_IF_POSSIBLE, StrictModel, Unsupported


class ReasoningRequest(StrictModel):
    """OpenRouter's object of what else is said in `reasoning_effort`, `thinking_budget` and `include_reasoning`."""

    hints: ClassVar[Unsupported] = {"summary": ()}
    hint_path: ClassVar[str] = "reasoning."
    effort: Annotated[Effort | None, USED_IF_POSSIBLE] = None
    """As `reasoning_effort`."""
    max_tokens: Budget = None
    """As `thinking_budget`."""
    exclude: bool | None = None
    """True: what the model thinks is not shown."""
    enabled: Annotated[bool | None, USED_IF_POSSIBLE] = None
    """As `enable_thinking`."""


class ThinkingRequest(StrictModel):
    """DeepSeek's, GLM's and Kimi's object of what else is said in `enable_thinking`."""

    hints: ClassVar[Unsupported] = {
        "clear_thinking": (),  # what earlier turns thought is shown as the chat template has it
        "keep": (),
    }
    hint_path: ClassVar[str] = "thinking."
    type: Annotated[Literal["disabled", "enabled", "adaptive", "auto"], USED_IF_POSSIBLE]
    """As `enable_thinking`, which is false for `disabled` alone."""
    budget_tokens: Budget = None
    """As `thinking_budget`."""


class ThinkingFields(StrictModel):
    """Fields of a chat. Those that say the same thing must be equal."""

    reasoning_effort: Annotated[Effort | None, USED_IF_POSSIBLE] = None
    """The nearest that the chat template takes is given to it, where it has a variable of this name. `none` is as
    `enable_thinking: false`."""
    enable_thinking: Annotated[bool | None, USED_IF_POSSIBLE] = None
    """Whether the model is to think: given to the chat template, where it has a variable of this name or `thinking`;
    else as an effort of `none`, or the least one."""
    thinking_budget: Budget = None
    """Tokens of thoughts; given to the chat template, where it has a variable of this name."""
    reasoning: ReasoningRequest | None = None
    thinking: ThinkingRequest | None = None

    @model_validator(mode="after")
    def _one_effort(self) -> Self:
        asked = self.asked_thinking
        for values in (asked.efforts, asked.switches, asked.budgets):
            first = next(iter(values), None)
            other = next((name for name in values if values[name] != values[first]), None) if first else None
            if other is not None:
                text = f"should be equal to {first}, whose other name it is"
                raise PydanticCustomError("thinking", "{text}", {"text": text, "field": other})
        return self

    @property
    def asked_thinking(self) -> Asked:
        """What the request says besides `chat_template_kwargs` of how the model is to think."""
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
        return Asked.of(efforts, switches, budgets)
