"""Owns what may stand before a constrained answer: the thoughts of a model that thinks, which are free.
Never constrains them, but for what would end them in another way than their end tag."""

from __future__ import annotations

from serve_app.grammars.notation import Grammar, Specials, escaped, literal, until, without
from serve_app.parsing.reasoning import BEGIN, CALL, END, FUNCTION, REASONING_PARSERS, reasoning_parser

_CALL_TAGS = rf"{escaped(CALL)}\s*{escaped(FUNCTION)}"


def after_thoughts(answer: Grammar, parser: str, prompt_end: str, specials: Specials) -> Grammar:
    """The answer, and before it the block of thoughts that the model is in, or may open, after such a prompt."""
    state = reasoning_parser(parser, prompt_end)
    if not state.enabled:
        return answer
    may_begin = f"({literal(BEGIN, specials)})? " if BEGIN in specials else ""  # else it is one of the thoughts' texts
    start = f"{may_begin}block @answer" if state.inside else "(open block)? @answer"
    besides = without(_CALL_TAGS) if CALL in REASONING_PARSERS[parser].ends else ""
    block = f"block: thoughts LINES?\nLINES: /\\n{{1,2}}/\n{until(END, specials, 'thoughts', besides=besides)}"
    return answer.within(f"start: {start}\n{_open(specials)}{block}")


def _open(specials: Specials) -> str:
    if BEGIN in specials:
        return f"open: {literal(BEGIN, specials)}\n"
    return f"open[lazy]: /[ \\t\\r\\n]*{escaped(BEGIN)}/\n"
