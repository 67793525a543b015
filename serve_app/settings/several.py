"""Defines an entry of `models`, for an application that serves several models, and what entries may not share.
Never holds what all models share: `serve_app.settings.application` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ConfigDict, Field

from serve_app.settings.model import ModelSettings


class ModelAdmissionSettings(BaseModel):
    """One model's part in what an application lets in; `serve_app.admission.room` has the rules."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    share: float = Field(
        default=1,
        description="Half of each limit of `args.admission` is reserved for the models, in proportion to their shares; "
        "the other half is for whichever requests come first.",
        gt=0,
    )
    max_concurrent_requests: int | None = Field(
        default=None,
        description="Most requests for this model at a time, running and waiting; one more gets a 503. Unset: "
        "max_num_seqs + max_queued_requests for each of its engines, or for each rank with expert_parallel_size.",
        ge=1,
    )
    max_queued_tokens: int | None = Field(
        default=None,
        description="Most prompt tokens of this model's requests that have not begun; a request that would exceed them "
        "gets a 503, unless it is the model's only one. Unset: no limit.",
        ge=1,
    )


class ModelEntry(ModelSettings):
    """One of several models."""

    admission: ModelAdmissionSettings = Field(
        default_factory=ModelAdmissionSettings,
        description="How many requests for this model are let in, and how many for it beside the other models.",
    )
    wake_timeout_s: float = Field(
        300,
        description="How long a request waits for the model's first engine, if `autoscaling.min_replicas` is 0, in "
        "seconds; then it gets a 503.",
        gt=0,
    )


def refuse_shared_names(entries: Sequence[ModelEntry]) -> None:
    """Check that each name that a client may ask for means one thing.

    Raises:
        ValueError: a model, an adapter or an alias has another's name; the message has the name and both places.
    """
    places: dict[str, str] = {}
    for name, place in _names(entries):
        if name in places:
            raise ValueError(f"{place} is {name}, which {places[name]} is already: expected another name.")
        places[name] = place


def _names(entries: Sequence[ModelEntry]) -> Iterator[tuple[str, str]]:
    """Yield each name with its place, models first: what else has a model's name is at fault."""
    for number, entry in enumerate(entries):
        setting = "model" if entry.served_model_name is None else "served_model_name"
        yield from ((name, f"models.{number}.{setting}") for name in entry.model_names)
    for setting in ("lora_adapters", "model_aliases"):
        for number, entry in enumerate(entries):
            yield from ((name, f"a name in models.{number}.{setting}") for name in getattr(entry, setting))
