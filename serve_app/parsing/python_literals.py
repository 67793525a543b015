"""Converts Python literals as models write them to JSON. Reads them with `ast`.
Never evaluates anything."""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from typing import Any

MAX_CHARS = 2**18
"""The limit of an expression: in the worst case the parser needs microseconds per character, and blocks everything."""

_CONSTANTS = {"true": True, "false": False, "null": None}  # JSON's words, which models mix in
_RAW_STRING = r"""(?<!\w)[rR](?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')"""
_KNOWN_ESCAPE = (
    r"\\(?:[\\'\"abfnrtv\n]|[0-3][0-7]{2}|[0-7]{1,2}(?![0-7])|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})"
)
_BACKSLASH = re.compile(rf"({_RAW_STRING}|{_KNOWN_ESCAPE})|\\", re.DOTALL)


def parse_expression(text: str) -> ast.expr:
    """Parse any Python expression.

    Raises:
        ValueError: the text is not an expression, or too long or too deep.
    """
    if len(text) > MAX_CHARS:
        raise ValueError("too long")
    try:
        return ast.parse(_with_known_escapes(text).strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("not a Python expression") from error


def to_json(node: ast.expr) -> str:
    """Write a literal as JSON.

    Raises:
        ValueError: it is not a literal, or JSON has no such value.
    """
    return dump_json(_value(node))


def dump_json(value: Any) -> str:
    """Write JSON that any client can read.

    Raises:
        ValueError: the value is infinite or NaN, or too deep.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError("too deep") from error
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can carry
        return json.dumps(value)
    return text


def arguments_json(call: ast.Call) -> str:
    """Write the keyword arguments of a call as a JSON object.

    Raises:
        ValueError: there are other arguments, or one is not a literal.
    """
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    if call.args or len(named) < len(call.keywords):
        raise ValueError("an argument has no name of its own")
    return dump_json({name: _value(value) for name, value in named.items()})


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(float() as value) if math.isinf(value):
            return sys.float_info.max  # the nearest finite number, so that the call is not lost
        case ast.Constant(None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float()) as number):
            return -_value(number)
        case ast.List(items) | ast.Tuple(items):
            return [_value(item) for item in items]
        case ast.Dict(keys, values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("JSON has no such key")


def _with_known_escapes(text: str) -> str:
    r"""Double unknown backslashes. Models write `"\d+"`, which Python accepts with a warning that will become an
    error."""
    return _BACKSLASH.sub(lambda match: match[1] or "\\\\", text)
