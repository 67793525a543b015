"""Owns images that requests bring: where they come from, what they may be, and the pixels that an engine takes.
Never knows a model but by the kind of input that it declares."""
