"""Owns the promise that an agent's thousand tools can be called, in every format, within the limits of a grammar.
Never asks how long that takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.batch.grammar import Grammars
from engine.build.engine import FAKE_EOS_TOKEN_ID, FAKE_VOCAB_SIZE
from engine.step import GrammarRow
from tests.serve_app.parsing.test_call_grammars import CITY, FAMILIES, WALKERS, grammar_of, read

MANY = 1000


def many_tools() -> list[tuple[str, Any]]:
    """As servers of MCP describe them: five parameters each, whose descriptions are most of the schema."""
    kinds: list[Any] = [{"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["asc", "desc"]}]
    kinds.append({"type": "array", "items": {"type": "string"}})
    told = {"description": "What the tool should use; the documentation of its server says which values it takes. " * 2}
    found = []
    for number in range(MANY):
        names = [f"{word}_{number % 97}" for word in ("owner", "path", "query", "limit", "order")]
        properties = {name: kinds[(number + place) % 5] | told for place, name in enumerate(names)}
        schema = {"type": "object", "properties": properties, "required": names[:2], "additionalProperties": False}
        found.append((f"mcp__server_{number % 15}__do_{number}", schema))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_tools_can_be_called_within_the_limits_of_the_ingress_and_of_the_engine(family: str) -> None:
    """255 KiB were some 200 of them; three options of gpt-oss for each were more than a parser's row holds, and GLM's
    rules more than its symbols."""
    tools = many_tools()
    text = grammar_of(family, WALKERS["text"], tools).calls().bounded_text()
    engine = Grammars.of_bytes(FAKE_VOCAB_SIZE, FAKE_EOS_TOKEN_ID)
    engine.compile(text)
    answer: tuple[int, ...] = ()
    for _ in range(40):
        words, failed = engine.masks([GrammarRow("r", text, answer)])
        assert not failed
        answer += (int(np.flatnonzero(np.unpackbits(words[0].view(np.uint8), bitorder="little"))[-1]),)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_call_of_the_last_of_many_tools_is_read_back(family: str) -> None:
    tools = many_tools()[-3:]
    grammar = grammar_of(family, WALKERS["text"], tools).calls().text()
    names = {call.name for seed in range(6) for call in read(family, WALKERS["text"].walk(grammar, seed), tools).calls}
    assert names <= {name for name, _ in tools}
    assert len(names) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_schema_that_tools_share_stands_once_and_their_descriptions_nowhere(family: str) -> None:
    schema = CITY | {"description": "Weather.", "properties": {"city": {"type": "array", "title": "The city."}}}
    one, four = (
        grammar_of(family, WALKERS["text"], [(f"f{number}", schema) for number in range(count)]).calls().text()
        for count in (1, 4)
    )
    assert one.count("%json") == four.count("%json") == 1
    assert "Weather." not in four
    assert "The city." not in four
