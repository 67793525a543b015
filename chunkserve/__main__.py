"""Implements `python -m chunkserve`: the command `chunkserve` by another name.
Never does anything itself."""

from __future__ import annotations

import sys

from serve_app.front.command.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
