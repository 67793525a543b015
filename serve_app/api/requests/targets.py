"""Reads a request's own service-level targets, from its headers or its body.
Never lets one be shorter than the server's: all other requests would pay for that."""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.config import Targets
from serve_app.errors.api_error import ApiError, clip

TPOT_HEADER, TTFT_HEADER = "X-SLO-TPOT-Ms", "X-SLO-TTFT-Ms"
TPOT_FIELD, TTFT_FIELD = "slo_tpot_ms", "slo_ttft_ms"
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
MAX_TARGET_MS = 24 * 60 * 60 * 1000


def targets_of(headers: Mapping[str, str], tpot_ms: float | None, ttft_ms: float | None, served: Targets) -> Targets:
    """Return the targets that a request has of its own, None where it has none. `tpot_ms` and `ttft_ms` are those of
    its body; of a header and a field, the shorter counts. `served`: the server's targets.

    Raises:
        ApiError: 400, a target is no number of milliseconds, is shorter than the server's, or the server has none.
    """
    return Targets(
        tpot_ms=_own(headers.get(TPOT_HEADER), TPOT_HEADER, tpot_ms, TPOT_FIELD, served.tpot_ms, "tpot_ms"),
        ttft_ms=_own(headers.get(TTFT_HEADER), TTFT_HEADER, ttft_ms, TTFT_FIELD, served.ttft_ms, "ttft_ms"),
    )


def _own(
    header: str | None, name: str, value: float | None, field: str, served: float | None, setting: str
) -> float | None:
    given = {field: value, name: None if header is None else _read(header, name)}
    asked = {param: target for param, target in given.items() if target is not None}
    if not asked:
        return None
    param = min(asked, key=lambda name: asked[name])
    target = asked[param]
    if served is None:
        text = f"{param} is {target:g}, but this server schedules by no such target (engine.targets.{setting})."
        raise ApiError(400, text, param=param, code="invalid_value")
    if target < served:
        text = f"{param} must be >= {served:g}, this server's own target, but it is {target:g}."
        raise ApiError(400, text, param=param, code="invalid_value")
    return target


def _read(header: str, name: str) -> float:
    if _NUMBER.fullmatch(header.strip()) and 0 < float(header) <= MAX_TARGET_MS:
        return float(header)
    text = f"{name} should be milliseconds, a number above 0 and up to {MAX_TARGET_MS}, but it is {clip(header, 50)!r}."
    raise ApiError(400, text, param=name, code="invalid_value")
