"""Defines the wishes of OpenRouter's clients about the choice of a provider; this server is the only one.
Never chooses: wishes about anything but speed or preference are refused."""

from __future__ import annotations

from typing import Any, ClassVar

from serve_app.api.requests.strict_model import StrictModel, Unsupported

_NEVER: tuple[Any, ...] = ()


class Provider(StrictModel):
    """Preferences among providers are hints. Demands of privacy, a price or a form of the weights are refused."""

    hints: ClassVar[Unsupported] = {
        "order": ([],),
        "allow_fallbacks": (True, False),
        "require_parameters": (True, False),  # a parameter that is not supported is always refused
        "ignore": ([],),
        **dict.fromkeys(("sort", "preferred_min_throughput", "preferred_max_latency"), _NEVER),
    }
    hint_path: ClassVar[str] = "provider."
    unsupported: ClassVar[Unsupported] = {
        "data_collection": ("allow",),
        "zdr": (False,),
        "enforce_distillable_text": (False,),
        "only": ([],),
        "quantizations": ([],),
        "max_price": ({},),
    }
