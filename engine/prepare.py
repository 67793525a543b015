"""Owns a name that manifests of the release before call: `python -m engine.prepare`. It goes with the next release.
Never does anything itself: `engine.checkpoints.prepare` does."""

from __future__ import annotations

import sys

from engine.checkpoints.prepare import main

if __name__ == "__main__":
    sys.exit(main())
