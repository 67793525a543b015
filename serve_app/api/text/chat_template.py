"""Renders a model's chat template: Jinja in a sandbox, with the helpers that transformers gives to templates.
Never imports transformers, and never lets a template fail with anything but TemplateFailed."""

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
"""Names that the server sets for every template; a request may not give other values by these names."""

_XML_TOOLS = "xml_tools"  # SmolLM3's name for the tools that are called in JSON
_PROBE = "a developer's words"
_FINAL_MARK = "FINAL_CONTENT_ENDS_HERE "  # the trailing space shows whether the template trims contents


_FAILURES = (
    *(TemplateError, TypeError, ValueError, LookupError, ArithmeticError),
    *(AttributeError, AssertionError),  # Jinja's filters raise these for unexpected data: `1 | dictsort`
    RecursionError,  # from a macro that walks a deep schema
)


class TemplateFailed(ValueError):
    """The template cannot render these messages. The message is safe to show: it is the template's own, or fixed."""


class _RaisedByTemplate(TemplateError):
    """The template called raise_exception; the message is the template author's."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's own text for training; a prompt is rendered as if it were not there."""

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
    """Write plain JSON. Jinja's own filter escapes for HTML, and the model would see the escapes."""
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
        """The variables that the template reads; it would ignore any other."""

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
        """Render the prompt up to where the assistant's message begins. With `continue_final_message`, render it up to
        the end of the last message's content, which the model then continues; `add_generation_prompt` has no effect.
        `kwargs` are further variables of this template (`enable_thinking`, ...).

        Raises:
            TemplateFailed: the template refuses a role, an order of roles or a content; a name in `kwargs` is
                reserved; or there is no content that could be continued.
        """
        self._refuse_taken(kwargs)
        own_tools = {"tools": tools} | ({self._tools_name: tools} if tools else {})
        names = {**self._special_tokens, **kwargs, **own_tools, "documents": documents}
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
        """The values of `reasoning_effort` that the template takes, from little to much: the common ones and those that
        it compares with, without those that it refuses."""
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
        """Whether the template shows a developer message: most refuse the role, and some drop the message."""
        shown = self._try([{"role": "developer", "content": _PROBE}, {"role": "user", "content": "a"}])
        return shown is not None and _PROBE in shown

    @cached_property
    def _lost_roles(self) -> frozenset[str]:
        """The system roles for which the template does not show later turns in their places."""
        return frozenset(role for role in SYSTEM_ROLES if not shows_later_turns(role, self._try))

    def _try(self, messages: Sequence[Mapping[str, Any]], others: Mapping[str, Any] | None = None) -> str | None:
        """Render messages; None if the template refuses them."""
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
    """Replace the role `developer`, OpenAI's newer name, by `system`."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _with_marked_end(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """Add a mark after the last message's content, and return that content; of several parts, the last text."""
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
