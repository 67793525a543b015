"""Runs the first hour on a GPU: is it right, where is the time, are the aims met; docs/how-to/first-hour-on-a-gpu.md.
Never falls back to a CPU: without a GPU it ends at once, unless a rehearsal was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.hour.main import main

if __name__ == "__main__":
    sys.exit(main())
