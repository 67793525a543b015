"""Defines the bodies of requests as pydantic models: fields, types, ranges, and fields that are refused by name.

Start with `schema`, the chat and completion requests that the other APIs are translated to. `strict_model` has the rule
that nothing a client sends is silently ignored, and `hints` the exceptions. The other modules are groups of fields.

Knows neither the model nor HTTP: a check that needs either is elsewhere.
"""
