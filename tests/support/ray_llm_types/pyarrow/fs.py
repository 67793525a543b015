"""Stands for PyArrow's file systems: nothing of them is called without a cloud's path."""


class FileSystem:
    """Named in annotations alone."""
