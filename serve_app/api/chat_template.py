"""Owns a model's chat template: Jinja in a sandbox, with the helpers that transformers gives to templates.
Never imports transformers, and never lets a template's failure be more than a TemplateFailed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateFailed(ValueError):
    """The template cannot render these messages. The text is safe to show: the template's own, or a fixed one."""


class _RaisedByTemplate(TemplateError):
    """The template called raise_exception: its author's words to the user."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; when rendering a prompt it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _RaisedByTemplate(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which would reach the model."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    env.globals.update(helpers)
    env.filters["tojson"] = _tojson
    return env


class ChatTemplate:
    """A compiled template and the special tokens that it may name (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt, up to where the assistant begins to speak, unless it is not `add_generation_prompt`.

        Raises:
            TemplateFailed: a role, an order of roles or a content that the template does not take.
        """
        names = {"tools": None, "documents": None, **self._special_tokens}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **names)
        except _RaisedByTemplate as error:
            raise TemplateFailed(f"The model's chat template refuses these messages: {error.message}") from error
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise TemplateFailed("The model's chat template cannot render these messages.") from error
