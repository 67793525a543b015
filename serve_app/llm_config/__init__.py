"""Reads an `LLMConfig` of Ray Serve LLM as settings of this project, and says what it could not take along.

`taking` collects the result; `model`, `engine` and `deployment` each read a part of the config; `convert` puts them
together. Needs neither Ray nor vLLM: a config is a mapping, as it stands in YAML.
"""
