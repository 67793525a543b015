"""Owns what OpenRouter's clients say of the choice among providers, of which there is one here.
Never chooses: what would be no matter of speed or taste is refused."""

from __future__ import annotations

from typing import Any, ClassVar

from serve_app.api.requests.strict_model import StrictModel, Unsupported

_NEVER: tuple[Any, ...] = ()


class Provider(StrictModel):
    """Wishes among providers are hints; what promises privacy, a price or a form of the weights is refused."""

    hints: ClassVar[Unsupported] = {
        "order": ([],),
        "allow_fallbacks": (True, False),
        "require_parameters": (True, False),  # a parameter that is not supported is refused in any case
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
