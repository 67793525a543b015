"""Puts the settings of several LLMConfigs together, as the models of one application.
Never decides what a value becomes: `convert` has read each LLMConfig by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from serve_app.llm_config.taking import Taking
from serve_app.settings.several import ModelEntry


def together(takings: Mapping[str, Taking]) -> Taking:
    """Return one application's settings, with a note on each value that its models cannot have for themselves.
    `takings`: by model_id, at least one. A model that is alone keeps its settings at the top."""
    if len(takings) == 1:
        return next(iter(takings.values()))
    all_of_them = Taking(any(taking.on_gpu for taking in takings.values()))
    all_of_them.args["models"] = []
    for model_id, taking in takings.items():
        all_of_them.notes += [replace(note, path=f"{model_id}: {note.path}") for note in taking.notes]
        all_of_them.args["models"].append({name: taking.args[name] for name in taking.args if name in _OWN})
        for name in taking.args:
            if name in _OWN:
                continue
            value = all_of_them.args.setdefault(name, taking.args[name])
            if value != taking.args[name]:
                text = f"the models share this setting, which is {value} by the first LLMConfig that has it"
                all_of_them.changed(f"{model_id}: {name}", taking.args[name], text)
    return all_of_them


_OWN = ModelEntry.model_fields.keys()
"""The settings that each model has for itself."""
