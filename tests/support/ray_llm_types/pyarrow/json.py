"""Stands for PyArrow's reader of JSON, whose options Ray's serializers name."""


class ReadOptions:
    """Never made."""


class ParseOptions:
    """Never made."""
