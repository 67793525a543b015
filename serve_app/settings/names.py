"""Defines the settings of what is served, and of the names by which clients ask for it.
Never knows an engine's settings: `serve_app.settings.application` checks them together with these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from engine.config import DEFAULT_MODEL
from serve_app.settings.adapter_name import AdapterName

_Name = Annotated[str, Field(min_length=1)]


def _one_or_several(names: Any) -> Any:
    if isinstance(names, str):
        return (names,)
    if not isinstance(names, list | tuple):
        raise ValueError("should be a name or a list of names.")
    return names


_Names = Annotated[tuple[_Name, ...], Field(min_length=1), BeforeValidator(_one_or_several)]


class NameSettings(BaseModel):
    """A model, its adapters, and their names."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    model: str = Field(
        DEFAULT_MODEL,
        description="The model: `smollm2-135m-instruct`, which is packaged, a local Hugging Face directory, a hub id, "
        "or a GGUF file.",
    )
    served_model_name: _Names | None = Field(
        None,
        description="The `model` that clients ask for, one name or several. Answers, metrics and traces show the "
        "first. Unset: the value of `model`.",
    )
    model_aliases: dict[_Name, str] = Field(
        default_factory=dict,
        description="Further names, each a pattern such as `claude-*` with the served name or LoRA adapter that it "
        "stands for: `claude-*: qwen3-8b`. Patterns are a shell's patterns for file names. Served names go before "
        "patterns, and the first pattern that matches counts. Answers name the model and not the alias.",
    )
    lora_adapters: dict[AdapterName, str] = Field(
        default_factory=dict,
        description="LoRA adapters that are served from the start. Each name has a directory as PEFT writes it, on the "
        "engines' machines. Clients ask for `name` or `<model>:name`. They need engine.max_loras.",
    )
    allow_lora_updates: bool = Field(
        False,
        description="Let the holder of the admin key load and unload adapters while the server runs, from any "
        "directory that an engine can read.",
    )

    @model_validator(mode="after")
    def _adapters_have_other_names(self) -> Self:
        for name in self.model_names:
            if name in self.lora_adapters:
                raise ValueError(f"lora_adapters has one named {name}, which is the model's own name.")
        return self

    @model_validator(mode="after")
    def _names_mean_one_thing(self) -> Self:
        names = self.model_names
        if len(set(names)) < len(names):
            raise ValueError(f"served_model_name has a name twice: {', '.join(names)}.")
        served = {*names, *self.lora_adapters}
        for alias, target in self.model_aliases.items():
            if alias in served:
                raise ValueError(f"model_aliases has {alias}, which is served under that name itself.")
            if target in self.model_aliases:
                raise ValueError(_not_a_name(self.model_aliases, alias))
            if target not in served:
                known = ", ".join(sorted(served))
                raise ValueError(f"model_aliases has {alias} for {target}, which is not served; served are: {known}.")
        return self

    @property
    def model_id(self) -> str:
        """The name that answers, metrics and traces show."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.model,)


def _not_a_name(aliases: Mapping[str, str], alias: str) -> str:
    """Say that an alias stands for another alias, and whether they stand for each other."""
    chain = [alias]
    while (target := aliases.get(chain[-1])) is not None and target not in chain:
        chain.append(target)
    if target is not None:
        return f"model_aliases goes in a circle: {' -> '.join([*chain[chain.index(target) :], target])}."
    stands = f"{alias} for {aliases[alias]}, which is an alias itself"
    return f"model_aliases has {stands}; name what that stands for: {chain[-1]}."
