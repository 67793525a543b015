"""Owns what an answer's text may be, written in llguidance's notation: JSON schemas, regexes, choices, grammars, tags.
Never knows requests, models or HTTP, and never runs a grammar: engines do."""
