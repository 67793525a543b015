"""Owns the limits of a request before it is handled, which HAProxy, the HTTP servers behind it, and the app share.
Never enforces one."""

from __future__ import annotations

import re

HEAD_TIMEOUT_S = 10
"""How long the request line and the headers may take."""

BODY_STALL_S = 10.0
"""How long nothing of a body may arrive."""

MIN_BODY_BYTES_PER_S = 1000
"""On average, from `BODY_STALL_S` on: a byte now and then is no progress. A modem is four times as fast."""

MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 200
MAX_URL_BYTES = 8 * 1024

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""An X-Request-Id that is kept. Anything else would go into logs and answers as a client wrote it."""
