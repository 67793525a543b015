"""Names the deployments of an application's engines.
Never knows Ray: the names are only texts."""

from __future__ import annotations

import re
from collections.abc import Sequence

ENGINE = "Engine"
"""The deployment of the engines of a model that is served alone."""


def engine_names(model_ids: Sequence[str]) -> tuple[str, ...]:
    """Return the name of each model's engine deployment. Models whose names differ only in what a deployment's name
    cannot have are numbered."""
    names: list[str] = []
    for model_id in model_ids:
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", model_id).strip("-") or "model"
        options = (f"{ENGINE}-{slug}{number}" for number in ("", *(f"-{n}" for n in range(2, len(model_ids) + 2))))
        names.append(next(name for name in options if name not in names))
    return tuple(names)
