"""Stands for PyArrow, which ray.serve.llm imports for clouds. Ray's serializers name these types if there is one."""


class Table:
    """Never made."""


class Schema:
    """Never made."""
