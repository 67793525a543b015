"""Owns an old name that manifests of the previous release call: `python -m engine.prepare`. The next release drops it.
Never does anything itself: `engine.checkpoints.prepare` does."""

from __future__ import annotations

import sys

from engine.checkpoints.prepare import main

if __name__ == "__main__":
    sys.exit(main())
