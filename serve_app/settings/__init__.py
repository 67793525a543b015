"""Defines the settings of one application, `args:` in config.yaml, as pydantic models.

`application` is the whole, `model` what belongs to one model, `several` an entry of `models`, and each other module one
group. `engine_names` names the deployments. `features` says what goes with what, and `misspelt` what a setting that
there is not was meant for; `limits` and `instance` are what is derived or inherited, and not written in a config. An
engine's own settings are `engine.config`.
"""
