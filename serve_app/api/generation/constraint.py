"""Builds the grammar of a request's answer from its fields and tools, and checks it before an engine is asked.
Never samples; what precedes a constrained answer, such as thoughts, is free."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from serve_app.api.generation.field_grammars import field_grammar, refused
from serve_app.api.generation.tool_grammars import call_grammar
from serve_app.api.requests.schema import ChatRequest, CompletionRequest
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.engines.engine_client import ServedModel
from serve_app.errors.api_error import ApiError
from serve_app.grammars.check import find_fault
from serve_app.grammars.notation import Grammar, GrammarRefused, Specials
from serve_app.parsing.thinking_grammar import after_thoughts, as_content


@dataclass(frozen=True, slots=True)
class Constraint:
    """The grammar of an answer. `field`: the request's field that asked for it. `continued`: the text that the answer
    continues."""

    field: str
    grammar: Grammar
    specials: Specials
    reasoning_parser: str | None
    continued: str

    def text(self, prompt_end: str) -> str:
        """Write the grammar for the engine, for an answer to a prompt that ends with `prompt_end`."""
        grammar = self.grammar
        if self.reasoning_parser is not None:
            parser, continued = self.reasoning_parser, self.continued
            grammar = after_thoughts(grammar, parser, prompt_end, self.specials, continued=continued)
        return grammar.text()


Patiently = Callable[[Callable[[], Constraint]], Awaitable[Constraint]]
"""Runs work that takes a core for up to seconds when it is its turn, and away from the event loop."""


async def constraint_of(
    request: ChatRequest | CompletionRequest, tokenizer: Tokenizer, model: ServedModel, patiently: Patiently
) -> Constraint | None:
    """Build and check the constraint of the answer; None if anything is allowed.

    Raises:
        ApiError: the constraint cannot be enforced, or is not a valid schema or grammar; the error names the field.
    """
    if request.constrained_by is None:
        return None
    if request.ignore_eos:
        text = f"not allowed together with {request.constrained_by}: the end of what it allows ends the answer"
        raise ApiError(400, f"ignore_eos: {text}", param="ignore_eos", code="invalid_value")
    return await patiently(lambda: _constraint(request, tokenizer, model))


def _constraint(request: ChatRequest | CompletionRequest, tokenizer: Tokenizer, model: ServedModel) -> Constraint:
    specials = tokenizer.tag_ids
    field, grammar = _grammar(request, specials, model)
    _check(field, grammar)
    if not isinstance(request, ChatRequest):
        return Constraint(field, grammar, specials, None, "")
    return Constraint(field, grammar, specials, model.reasoning_parser, request.continued)


def _check(field: str, grammar: Grammar) -> None:
    try:
        fault = find_fault(grammar.bounded_text())
    except GrammarRefused as error:
        raise refused(field, error.text) from error
    if fault:
        raise refused(field, fault)


def _grammar(request: ChatRequest | CompletionRequest, specials: Specials, model: ServedModel) -> tuple[str, Grammar]:
    """Return the field that asked for a grammar, and the grammar. If tools may be called, the answer may be either what
    the field allows, or calls."""
    content = field_grammar(request, specials)
    if content is not None and isinstance(request, ChatRequest):
        content = content[0], as_content(content[1], model.reasoning_parser, specials)
    if not isinstance(request, ChatRequest) or not request.may_call or model.tool_parser is None:
        assert content is not None, "nothing is constrained"
        return content
    calls = call_grammar(request, model.tool_parser, specials, or_else=content is not None)
    if content is None:
        return calls
    if request.must_call:
        _check(*content)  # the answer will have no text to constrain, but an invalid grammar is still refused
        return calls
    return content[0], content[1].or_else(calls[1])
