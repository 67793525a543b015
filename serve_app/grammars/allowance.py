"""Owns the limits on the work of translating one grammar, which is counted and so the same on every machine.
Never knows what the work is."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.grammars.notation import GrammarRefused

MAX_STATES = 2048
"""Limits the states of all automata built under one allowance, and so the time they take."""
MAX_RUN_CHARS = 2**20
"""Limits the characters written on the way to the regexes."""
MAX_WAYS = 1500
"""Limits the ways from one state to another, over all automata. llguidance looks at no more than 2,000 at any one place
in a text."""
MAX_STEPS = 2**16
"""Limits the steps of all loops over states, transitions and characters together. They take at most 50 ms of a core,
with the interpreter's lock held."""


@dataclass(slots=True)
class Allowance:
    """Counts what is left of the work that one grammar may cause."""

    num_states: int = MAX_STATES
    num_chars: int = MAX_RUN_CHARS
    num_ways: int = MAX_WAYS
    num_steps: int = MAX_STEPS

    def take_ways(self, count: int) -> None:
        """
        Raises:
            GrammarRefused: none are left.
        """
        self.num_ways -= count
        if self.num_ways < 0:
            raise GrammarRefused("has terminals with too many ways between quotes and escapes")

    def take_state(self) -> None:
        """
        Raises:
            GrammarRefused: none is left.
        """
        self.num_states -= 1
        if self.num_states < 0:
            text = f"terminals that can match quotes or escapes should have at most {MAX_STATES} places for characters"
            raise GrammarRefused(f"{text} together, counted as often as they are repeated, but they have more")

    def take_chars(self, count: int) -> None:
        """
        Raises:
            GrammarRefused: none are left.
        """
        self.num_chars -= count
        if self.num_chars < 0:
            raise GrammarRefused("has terminals with too many ways between quotes and escapes")

    def take_steps(self, count: int) -> None:
        """
        Raises:
            GrammarRefused: none are left.
        """
        self.num_steps -= count
        if self.num_steps < 0:
            text = f"is too much work to translate: its terminals should take at most {MAX_STEPS} steps"
            raise GrammarRefused(f"{text}, about one for each state and each transition that is looked at")
