"""Owns the name that one start of a server gives itself, by which its answers are told from another server's.
Never says anything about the machine or the user: it is random."""

from __future__ import annotations

import os

VARIABLE = "CHUNKSERVE_INSTANCE"
"""Set by `serve run` for the Ray that it starts; all of its processes inherit it."""
HEADER = "X-Instance-Id"


def instance_headers() -> dict[str, str]:
    """Of an answer to /health; none where nobody gave this server a name."""
    name = os.environ.get(VARIABLE)
    return {HEADER: name} if name else {}
