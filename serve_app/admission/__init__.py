"""Owns the gate before the engines: who is let in, who waits and for how long.
Never knows HTTP or Ray."""
