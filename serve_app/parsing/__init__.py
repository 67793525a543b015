"""Owns what a model's text means besides its letters: reasoning and tool calls, as parsers fed with pieces of text.
Never sees tokens, requests or HTTP, and never depends on how the text was cut into pieces."""
