"""Owns the limits on a request before it is handled, shared by HAProxy, the HTTP servers behind it, and the app.
Never enforces one."""

from __future__ import annotations

import re

HEAD_TIMEOUT_S = 10
"""How long the request line and the headers may take."""

BODY_STALL_S = 10.0
"""How long a body may pause without any byte arriving."""

MIN_BODY_BYTES_PER_S = 1000
"""The minimum average from `BODY_STALL_S` on: a byte now and then is not progress. A modem is four times as fast."""

MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 200
MAX_URL_BYTES = 8 * 1024

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""The X-Request-Ids that are kept. Anything else would go into logs and answers as the client wrote it."""
