"""Owns the grammar of a request's answer: what its fields and tools ask for, checked before an engine is asked.
Never samples; whatever stands before a constrained answer, such as thoughts, is free."""

from __future__ import annotations

import asyncio
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
    """`field`: of the request, that asked for it."""

    field: str
    grammar: Grammar
    specials: Specials
    reasoning_parser: str | None

    def text(self, prompt_end: str) -> str:
        """For the engine, of an answer to a prompt that ends so."""
        grammar = self.grammar
        if self.reasoning_parser is not None:
            grammar = after_thoughts(grammar, self.reasoning_parser, prompt_end, self.specials)
        return grammar.text()


async def constraint_of(
    request: ChatRequest | CompletionRequest, tokenizer: Tokenizer, model: ServedModel
) -> Constraint | None:
    """What the answer may be; None: anything. In a thread: schemas and grammars are of any size that is allowed.

    Raises:
        ApiError: it cannot be kept, or is no schema or grammar; the error names the field.
    """
    if request.constrained_by is None:
        return None
    if request.ignore_eos:
        text = f"not allowed together with {request.constrained_by}: the end of what it allows ends the answer"
        raise ApiError(400, f"ignore_eos: {text}", param="ignore_eos", code="invalid_value")
    return await asyncio.to_thread(_constraint, request, tokenizer, model)


def _constraint(request: ChatRequest | CompletionRequest, tokenizer: Tokenizer, model: ServedModel) -> Constraint:
    specials = tokenizer.tag_ids
    field, grammar = _grammar(request, specials, model)
    _check(field, grammar)
    return Constraint(field, grammar, specials, model.reasoning_parser if isinstance(request, ChatRequest) else None)


def _check(field: str, grammar: Grammar) -> None:
    try:
        fault = find_fault(grammar.bounded_text())
    except GrammarRefused as error:
        raise refused(field, error.text) from error
    if fault:
        raise refused(field, fault)


def _grammar(request: ChatRequest | CompletionRequest, specials: Specials, model: ServedModel) -> tuple[str, Grammar]:
    """The field that asked for it, and what it allows. Where tools may be called, an answer is as a field says, or
    calls."""
    asked = field_grammar(request, specials)
    if asked is not None and isinstance(request, ChatRequest):
        asked = asked[0], as_content(asked[1], model.reasoning_parser, specials)
    if not isinstance(request, ChatRequest) or not request.may_call or model.tool_parser is None:
        assert asked is not None, "nothing is constrained"
        return asked
    calls = call_grammar(request, model.tool_parser, specials, or_else=asked is not None)
    if asked is None:
        return calls
    if request.must_call:
        _check(*asked)  # there is no text that it could be of, but a client learns that it is none
        return calls
    return asked[0], asked[1].or_else(calls[1])
