"""Owns a model's chat template: Jinja in a sandbox, with the helpers that transformers gives to templates.
Never imports transformers, and never lets a template's failure be more than a TemplateFailed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serve_app.api.requests.effort import COMMON_EFFORTS, EFFORT, EFFORTS, Effort
from serve_app.api.text.result_order import with_results_in_order
from serve_app.api.text.system_turns import SYSTEM_ROLES, shows_later_turns, with_system_turns
from serve_app.api.text.template_form import TemplateForm
from serve_app.api.text.turns_in_a_row import Alternation, may_be_refused

CALLERS_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""What a template sees under a name of its own: no other value may be given by that name."""

_XML_TOOLS = "xml_tools"  # SmolLM3's name for tools that are called in JSON
_PROBE = "a developer's words"
_FINAL_MARK = "FINAL_CONTENT_ENDS_HERE "  # the space tells whether the template trims what it is given


_FAILURES = (
    *(TemplateError, TypeError, ValueError, LookupError, ArithmeticError),
    *(AttributeError, AssertionError),  # Jinja's filters, of data that is not what they expect: `1 | dictsort`
    RecursionError,  # a macro that walks a schema walks a deep one
)


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
        parsed = environment.parse(source)
        variables = frozenset(meta.find_undeclared_variables(parsed))
        self._tools_name = _XML_TOOLS if _XML_TOOLS in variables and "tools" not in variables else "tools"
        self.variables = variables | {"tools"} if self._tools_name == _XML_TOOLS else variables
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
        told = {"tools": tools} | ({self._tools_name: tools} if tools else {})
        names = {**self._special_tokens, **kwargs, **told, "documents": documents}
        messages = with_results_in_order(messages)
        if not self._knows_developers:
            messages = [_as_system(message) for message in messages]
        if any(message["role"] in SYSTEM_ROLES for message in messages[1:]):
            messages = with_system_turns(messages, self._lost_roles)
        if may_be_refused(messages):
            messages = self._alternation.fit(messages)
        messages = self._form.fit(messages)
        if not continue_final_message:
            return self._render(names, messages=messages, add_generation_prompt=add_generation_prompt)
        marked, final = _with_marked_end(messages)
        return _up_to_mark(self._render(names, messages=marked, add_generation_prompt=False), final)

    @cached_property
    def efforts(self) -> tuple[Effort, ...]:
        """The values of `reasoning_effort` that it takes, from little to much: those that all know and those that it
        compares, but for what it refuses."""
        compared: set[Any] = set()
        for node in _environment().parse(self.source).find_all(nodes.Compare):
            if any(name.name == EFFORT for name in node.find_all(nodes.Name)):
                compared |= {constant.value for constant in node.find_all(nodes.Const)}
        asked = [{"role": "user", "content": "a"}]
        known = (one for one in EFFORTS if one in COMMON_EFFORTS or one in compared)
        return tuple(one for one in known if self._try(asked, {EFFORT: one}) is not None)

    @cached_property
    def _form(self) -> TemplateForm:
        return TemplateForm.of(_environment().parse(self.source), self._try)

    @cached_property
    def _alternation(self) -> Alternation:
        return Alternation.of(lambda messages: self._try(self._form.fit(messages)) is not None)

    @cached_property
    def _knows_developers(self) -> bool:
        """Whether it shows a developer's message: most refuse the role, and some drop it."""
        shown = self._try([{"role": "developer", "content": _PROBE}, {"role": "user", "content": "a"}])
        return shown is not None and _PROBE in shown

    @cached_property
    def _lost_roles(self) -> frozenset[str]:
        """Those whose later turns it does not show where they stand."""
        return frozenset(role for role in SYSTEM_ROLES if not shows_later_turns(role, self._try))

    def _try(self, messages: Sequence[Mapping[str, Any]], others: Mapping[str, Any] | None = None) -> str | None:
        """None: it does not take these messages."""
        names = {**self._special_tokens, "tools": None, "documents": None, **(others or {})}
        try:
            return self._render(names, messages=messages, add_generation_prompt=True)
        except TemplateFailed:
            return None

    def _refuse_taken(self, kwargs: Mapping[str, Any]) -> None:
        for name in kwargs:
            if name in CALLERS_NAMES or name in self._special_tokens or name in self._template.globals:
                raise TemplateFailed(f"The chat template's {name} cannot be given by a request.")

    def _render(self, names: Mapping[str, Any], **others: Any) -> str:
        try:
            return self._template.render({**names, **others})
        except _RaisedByTemplate as error:
            raise TemplateFailed(f"The model's chat template refuses these messages: {error.message}") from error
        except _FAILURES as error:
            raise TemplateFailed("The model's chat template cannot render these messages.") from error


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenAI's newer name of the role."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


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
