"""The agreement of ranks that share experts: which shape the next step of all of them has.

Never plans, and never computes: it exchanges a few integers a step. DESIGNS.md says what of lockstep exists.
"""
