"""Names each start of a server, so that its answers can be distinguished from another server's.
Never reveals anything about the machine or the user: the name is random."""

from __future__ import annotations

import os

VARIABLE = "CHUNKSERVE_INSTANCE"
"""Set by `serve run` for the Ray cluster that it starts; all of its processes inherit it."""
HEADER = "X-Instance-Id"


def instance_headers() -> dict[str, str]:
    """Make the headers of an answer to /health; there are none if this server has no name."""
    name = os.environ.get(VARIABLE)
    return {HEADER: name} if name else {}
