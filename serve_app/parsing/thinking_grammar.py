"""Adds to a constrained answer's grammar what may precede it: the thoughts of a model that thinks, which are free.
Never constrains thoughts, except that only their end tag may end them."""

from __future__ import annotations

from serve_app.grammars.notation import Grammar, Specials, any_of, escaped, lark, literal, named, until, without
from serve_app.parsing.harmony import ANALYSIS, CALL, CHANNEL, END, FINAL, MESSAGE, RETURN, START
from serve_app.parsing.harmony_reasoning import HarmonyReasoningParser
from serve_app.parsing.reasoning import ReasoningParser
from serve_app.parsing.reasoning_parsers import REASONING_PARSERS, reasoning_parser

NEXT = f"{END}{START}assistant"
"""The text between two messages of one turn."""


def after_thoughts(
    answer: Grammar, parser: str, prompt_end: str, specials: Specials, *, continued: str = ""
) -> Grammar:
    """Put the block of thoughts, which the prompt has opened or the model may open, before the answer's grammar.
    `continued`: see `ReasoningParser.after`."""
    state = reasoning_parser(parser, prompt_end, continued)
    if isinstance(state, HarmonyReasoningParser):
        return answer.within(_messages(specials, is_inside=state.inside))
    return _after_block(answer, state, specials) if state.enabled else answer


def as_content(answer: Grammar, parser: str | None, specials: Specials) -> Grammar:
    """Frame the answer's grammar as a model with this parser frames content beside thoughts."""
    if parser is None or not issubclass(REASONING_PARSERS[parser], HarmonyReasoningParser):
        return answer
    framed = lark(f"start: {literal(f'{CHANNEL}{FINAL}{MESSAGE}', specials)} @content").entries[0]
    return Grammar((framed, named("content", answer), *answer.entries[1:]))


def _after_block(answer: Grammar, state: ReasoningParser, specials: Specials) -> Grammar:
    begin, end = state.begin, state.end
    may_begin = f"({literal(begin, specials)})? " if begin in specials else ""  # else it is text
    start = f"{may_begin}block @answer" if state.inside else "(open block)? @answer"
    besides = without(*(rf"{escaped(first)}\s*{escaped(second)}" for first, second in state.calls))
    block = f"block: thoughts LINES?\nLINES: /\\n{{1,2}}/\n{until(end, specials, 'thoughts', besides=besides)}"
    return answer.within(f"start: {start}\n{_open(begin, specials)}{block}")


def _open(begin: str, specials: Specials) -> str:
    if begin in specials:
        return f"open: {literal(begin, specials)}\n"
    return f"open[lazy]: /[ \\t\\r\\n]*{escaped(begin)}/\n"


def _messages(specials: Specials, *, is_inside: bool) -> str:
    besides = without(any_of(START, CHANNEL, CALL, RETURN))
    going_on = "going_on " if is_inside else ""
    header = literal(f"{CHANNEL}{ANALYSIS}{MESSAGE}", specials)
    return (
        f"start: {going_on}thoughts* @answer\nthoughts: {header} going_on\n"
        f"going_on: body {literal(NEXT.removeprefix(END), specials)}\n{until(END, specials, 'body', besides=besides)}"
    )
