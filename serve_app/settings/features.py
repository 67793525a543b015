"""Owns the table of an application's settings that exclude others, as engine.features has for an engine.
Never raises: the code that refuses takes the text from here."""

from __future__ import annotations

from functools import partial
from operator import eq, is_not, ne

from engine.features import TEXT, Feature, Group, Rule, find_conflict
from serve_app.settings.images import ImageSettings

ADAPTERS = Feature("LoRA adapters by name", Group.SETTING, "lora_adapters", bool)
ADAPTER_UPDATES = Feature("LoRA adapters that come and go", Group.SETTING, "allow_lora_updates", bool)
NO_ADAPTERS = Feature("no LoRA adapters", Group.SETTING, "engine.max_loras", partial(eq, 0))
A_GPU = Feature("a GPU reserved", Group.SETTING, "engine_num_gpus", bool)
NO_GPU = Feature("no GPU reserved", Group.SETTING, "engine_num_gpus", partial(eq, 0))
ACCELERATOR = Feature("a kind of GPU", Group.SETTING, "engine_accelerator_type", partial(is_not, None))
ON_CPU = Feature("the CPU asked for", Group.SETTING, "engine.device", partial(eq, "cpu"))
ON_CUDA = Feature("a GPU asked for", Group.SETTING, "engine.device", partial(eq, "cuda"))
FAKE = Feature("the fake executor", Group.SETTING, "engine.executor", partial(eq, "fake"))
IMAGES = Feature("limits of images", Group.SETTING, "images", partial(ne, ImageSettings()))
ENDPOINT = Feature("a collector of traces", Group.SETTING, "tracing.endpoint", partial(is_not, None))
NO_OTLP = Feature("another exporter than otlp", Group.SETTING, "tracing.exporter", partial(ne, "otlp"))

MODEL_RULES = (
    Rule((ADAPTERS, ADAPTER_UPDATES), (NO_ADAPTERS,), "adapters need engine.max_loras of 1 or more"),
    Rule(
        (A_GPU,),
        (ON_CPU, FAKE),
        "Ray would reserve a GPU that the engine does not use; set engine_num_gpus to 0",
    ),
    Rule(
        (ON_CUDA, ACCELERATOR),
        (NO_GPU,),
        "Ray hides all GPUs from an engine that reserves none; set engine_num_gpus to 1, or to one for each rank",
    ),
    Rule((IMAGES,), (TEXT,), "this setting has an effect only with models that take images"),
)
"""Each model's settings must follow these."""
SHARED_RULES = (Rule((ENDPOINT,), (NO_OTLP,), "tracing.endpoint has an effect only with tracing.exporter otlp"),)
"""For the settings that an application's models share."""
APP_RULES = (*MODEL_RULES, *SHARED_RULES)


def refused_images(images: ImageSettings, model_id: str) -> str | None:
    """Say why these settings exclude a model that only takes text. None if they are the default."""
    on = {TEXT: f"{model_id} takes text alone"}
    if images != ImageSettings():
        on[IMAGES] = "images is set"
    conflict = find_conflict(on, APP_RULES)
    return None if conflict is None else conflict.text(on)
