"""Owns a model's chat template: Jinja in a sandbox, with the helpers that transformers gives to templates.
Never imports transformers, and never lets a template's failure be more than a TemplateFailed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CALLERS_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""What a template sees under a name of its own: no other value may be given by that name."""

_FINAL_MARK = "FINAL_CONTENT_ENDS_HERE "  # the space tells whether the template trims what it is given


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
        environment = _environment()
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self.source = source
        self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        """What the template looks at: anything else that is given to it would be ignored."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt, up to where the assistant begins to speak; with `continue_final_message`, up to the end of the
        last message's content, which the model then goes on with, and `add_generation_prompt` means nothing.

        `kwargs` are what this template knows besides (`enable_thinking`, ...).

        Raises:
            TemplateFailed: a role, an order of roles or a content that the template does not take; a name in `kwargs`
                that is taken; no content that could be continued.
        """
        self._refuse_taken(kwargs)
        names = {**self._special_tokens, **kwargs, "tools": tools, "documents": documents}
        if not continue_final_message:
            return self._render(names, messages=messages, add_generation_prompt=add_generation_prompt)
        marked, final = _with_marked_end(messages)
        return _up_to_mark(self._render(names, messages=marked, add_generation_prompt=False), final)

    def _refuse_taken(self, kwargs: Mapping[str, Any]) -> None:
        for name in kwargs:
            if name in CALLERS_NAMES or name in self._special_tokens or name in self._template.globals:
                raise TemplateFailed(f"The chat template's {name} cannot be given by a request.")

    def _render(self, names: Mapping[str, Any], **others: Any) -> str:
        try:
            return self._template.render({**names, **others})
        except _RaisedByTemplate as error:
            raise TemplateFailed(f"The model's chat template refuses these messages: {error.message}") from error
        # RecursionError: a macro that walks a schema walks a deep one.
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise TemplateFailed("The model's chat template cannot render these messages.") from error


def _with_marked_end(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """The messages with a mark behind the last content, and that content: of several parts, the last text."""
    last = dict(messages[-1]) if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        return [*messages[:-1], last | {"content": content + _FINAL_MARK}], content
    parts = list(content) if isinstance(content, list | tuple) else []
    for index in range(len(parts) - 1, -1, -1):
        if isinstance(text := parts[index].get("text"), str):
            parts[index] = {**parts[index], "text": text + _FINAL_MARK}
            return [*messages[:-1], last | {"content": parts}], text
    raise TemplateFailed("The last message has no text that the model could continue.")


def _up_to_mark(rendered: str, final: str) -> str:
    end = rendered.rfind(_FINAL_MARK.rstrip())
    if end < 0 or final.strip() not in rendered[:end]:
        raise TemplateFailed("The model's chat template does not show the last message, so it cannot be continued.")
    text = rendered[:end]
    return text if rendered.startswith(_FINAL_MARK, end) else text.rstrip()
