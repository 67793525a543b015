"""Stands for the parser of forms that the route for audio needs, which is never called."""

__version__ = "1.0"
