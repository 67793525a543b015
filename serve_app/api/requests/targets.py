"""Reads a request's own service-level targets, from its headers or its body.
Never lets one be shorter than the server's: all other requests would pay for that."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import BaseModel

from engine.config import Targets
from engine.protocol import MAX_TARGET_MS
from serve_app.api.requests.hints import ignore_or_refuse
from serve_app.errors.api_error import ApiError, clip

TPOT_HEADER, TTFT_HEADER = "X-SLO-TPOT-Ms", "X-SLO-TTFT-Ms"
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{0,20})?")


def targets_of(headers: Mapping[str, str], request: BaseModel, served: Targets) -> dict[str, float]:
    """Return the targets that a request has of its own, by the fields of Submission. Of a header and a field, the
    shorter counts. `request`: any form of request; not all have such fields. `served`: the server's targets.

    A target without effect is a hint: one that the server does not schedule by, or that is shorter than the server's,
    which then counts.

    Raises:
        ApiError: 400, a header is no number of milliseconds; or the server is strict, and a target has no effect.
    """
    found = {}
    for name, header, own_ms in (("tpot_ms", TPOT_HEADER, served.tpot_ms), ("ttft_ms", TTFT_HEADER, served.ttft_ms)):
        field = f"slo_{name}"
        asked = {field: getattr(request, field, None), header: _read(headers.get(header), header)}
        given = {param: target for param, target in asked.items() if target is not None}
        if not given:
            continue
        param = min(given, key=lambda one: given[one])
        if own_ms is None:
            text = f"{param} is {given[param]:g}, but this server schedules by no such target (engine.targets.{name})."
            ignore_or_refuse(param, text)
        elif given[param] < own_ms:
            text = f"{param} must be >= {own_ms:g}, this server's own target, but it is {given[param]:g}."
            ignore_or_refuse(param, text)
        else:
            found[name] = given[param]
    return found


def _read(header: str | None, name: str) -> float | None:
    if header is None:
        return None
    if _NUMBER.fullmatch(header.strip()) and 1 <= float(header) <= MAX_TARGET_MS:
        return float(header)
    text = f"{name} should be milliseconds, a number from 1 to {MAX_TARGET_MS}, but it is {clip(header, 50)!r}."
    raise ApiError(400, text, param=name, code="invalid_value")
