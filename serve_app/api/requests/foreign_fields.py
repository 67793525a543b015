"""Owns the tables of other servers' and clients' fields in chat and completions: hints, and fields that are refused.
Never lists a field that is honoured: those are fields of the requests in `schema`."""

from __future__ import annotations

from typing import Any

from serve_app.api.requests.effort import VALUE_HINTS as KWARGS_HINTS
from serve_app.api.requests.strict_model import Unsupported
from serve_app.api.requests.structured import KINDS

_ZERO, _OFF, _NO = (0,), (1,), (False,)
_NEVER: tuple[Any, ...] = ()

GUIDED = {
    **{f"guided_{kind}": f"structured_outputs.{kind}" for kind in KINDS if kind != "structural_tag"},
    "guided_decoding_backend": "structured_outputs, which has one backend",
    "guided_whitespace_pattern": "structured_outputs, which writes JSON on one line",
}
"""vLLM's old names, which it ignores silently, and what to send instead."""

# Samplers of llama.cpp, text-generation-webui and SillyTavern, with the values that switch them off.
_SAMPLERS: Unsupported = {
    **dict.fromkeys(("typical", "typical_p", "tfs", "tfs_z"), _OFF),
    **dict.fromkeys(("mirostat", "mirostat_mode", "xtc_probability", "dry_multiplier"), _ZERO),
    **dict.fromkeys(("eta_cutoff", "epsilon_cutoff", "smoothing_factor", "dynatemp_range"), _ZERO),
}
# Fields of OpenAI, vLLM and SGLang that would change the answer, with the values that would not.
_UNSUPPORTED: Unsupported = {
    "length_penalty": _OFF,
    "use_beam_search": _NO,
    "spaces_between_special_tokens": (True,),
    "best_of": _OFF,
    **dict.fromkeys(("grammar", "stop_regex", *GUIDED), _NEVER),
    **_SAMPLERS,
}
UNSUPPORTED_IN_CHAT: Unsupported = {
    **_UNSUPPORTED,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "add_special_tokens": _NO,
    "echo": _NO,
    **dict.fromkeys(("chat_template", "audio", "moderation"), _NEVER),  # ignoring moderation would be unsafe
}
UNSUPPORTED_IN_COMPLETIONS: Unsupported = {
    **_UNSUPPORTED,
    "suffix": ("",),
    "add_special_tokens": (True,),
}

_SESSION: Unsupported = dict.fromkeys(("chat_id", "session_id", "copilot_thread_id"), _NEVER)
# OpenRouter's choice among providers and models; this server is one provider with one model.
_CHOICE_OF_PROVIDER: Unsupported = {
    "models": ([],),
    "route": _NEVER,
    "transforms": ([],),  # they allow a prompt to be shortened that would not fit
}
_CACHE: Unsupported = {"cache_control": _NEVER, "prompt_cache_options": ({},)}
HINTS: Unsupported = {
    "service_tier": ("auto", "default"),
    "store": _NO,  # nothing is stored
    "prompt_cache_retention": ("in_memory",),  # a prefix is kept as long as there is room
    "num_ctx": _NEVER,
    "prediction": _NEVER,  # it could only make the same answer faster
    "top_a": _ZERO,
    **_CACHE,
    **_SESSION,
    **_CHOICE_OF_PROVIDER,
}
HINTS_IN_CHAT: Unsupported = {
    **HINTS,
    "verbosity": ("medium",),
    "web_search_options": _NEVER,  # it allows the model to search, and does not require it
}
HINTS_IN_EMBEDDINGS: Unsupported = {
    "service_tier": ("auto", "default"),
    **_SESSION,
    **_CHOICE_OF_PROVIDER,
}

LONGER_THAN_THE_CONTEXT = "If it is more than the prompt leaves of the context, it is reduced to that."
"""When an answer's token limit is a hint."""
VALUE_HINTS = {"max_tokens": LONGER_THAN_THE_CONTEXT}
VALUE_HINTS_IN_CHAT = {**VALUE_HINTS, "max_completion_tokens": LONGER_THAN_THE_CONTEXT, **KWARGS_HINTS}
