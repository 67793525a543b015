"""Owns languages whose rules nest: each as Lark, as texts drawn from it, and as a reader of its own.
Never uses llguidance, which must not judge what is tested with it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Draw = Callable[[random.Random], str]


@dataclass(frozen=True)
class Language:
    """A language. `rules` have options, each made of names of rules, names of terminals, and quoted texts. `ignored`
    may be anywhere between these, as often as it likes."""

    lark: str
    rules: Mapping[str, list[str]]
    terminals: Mapping[str, tuple[str, Draw]]
    ignored: str = r"(?!)"
    gaps: tuple[str, ...] = ("",)
    """Ignored texts to draw from."""

    def draw(self, rng: random.Random) -> str:
        return self._drawn(rng, "start", 0) + rng.choice(self.gaps)

    def _drawn(self, rng: random.Random, symbol: str, depth: int) -> str:
        if symbol in self.rules:
            options = self.rules[symbol]
            option = options[0] if depth > 12 else rng.choice(options)  # the first option ends
            return "".join(self._drawn(rng, each, depth + 1) for each in option.split())
        text = symbol[1:-1] if symbol.startswith("'") else self.terminals[symbol][1](rng)
        return rng.choice(self.gaps) + text

    def has(self, text: str) -> bool:
        """Return whether the text is of the language, where a terminal takes as much as it can."""
        return len(text) in _Reading(self, text).ends("start", 0)


@dataclass
class _Reading:
    language: Language
    text: str
    known: dict[tuple[str, int], frozenset[int]] = field(default_factory=dict)

    def ends(self, name: str, place: int) -> frozenset[int]:
        found = self._ends(name, place)
        return found | {self._skipped(end) for end in found}

    def _ends(self, symbol: str, place: int) -> frozenset[int]:
        if symbol not in self.language.rules:
            return self._terminal(symbol, self._skipped(place))
        if (symbol, place) not in self.known:
            found: set[int] = set()
            for option in self.language.rules[symbol]:
                places = frozenset({place})
                for each in option.split():
                    places = frozenset(end for one in places for end in self._ends(each, one))
                found |= places
            self.known[symbol, place] = frozenset(found)
        return self.known[symbol, place]

    def _terminal(self, symbol: str, place: int) -> frozenset[int]:
        pattern = re.escape(symbol[1:-1]) if symbol.startswith("'") else self.language.terminals[symbol][0]
        match = re.compile(pattern).match(self.text, place)
        return frozenset({match.end()} if match else ())

    def _skipped(self, place: int) -> int:
        match = re.compile(f"(?:{self.language.ignored})*").match(self.text, place)
        assert match is not None
        return match.end()


def _of(characters: str, least: int = 1) -> Draw:
    return lambda rng: "".join(rng.choice(characters) for _ in range(rng.randint(least, 6)))


def _json_string(rng: random.Random) -> str:
    return f'"{"".join(rng.choice((*"aé🦜 /<{", *_ESCAPES)) for _ in range(rng.randint(0, 5)))}"'


def _sql_string(rng: random.Random) -> str:
    return "'" + _of('ab é"\\\n<>/', 0)(rng) + rng.choice(("", "''")) + "'"


_ESCAPES = (r"\"", "\\\\", r"\n", r"\u00e9")
_NUMBER = (r"[0-9]+(?:\.[0-9]+)?", _of("0123456789"))
_GAPS = ("", "", "", " ", "\n", "\t ", " \r\n  ")

ARITHMETIC = Language(
    r"""
// what a calculator reads
start: sum
?sum: product (("+" | "-") product)* -> added
?product: power (("*" | "/") power)*
power: atom ["^" power]
atom: NUMBER
    | NAME
    | "-" atom
    | "(" sum ")"
NAME: /[a-z_]\w*/
NUMBER: /\d+(\.\d+)?/
%import common.WS
%ignore WS
""",
    {
        "start": ["sum"],
        "sum": ["product", "product '+' sum", "product '-' sum"],
        "product": ["power", "power '*' product", "power '/' product"],
        "power": ["atom", "atom '^' power"],
        "atom": ["NUMBER", "NAME", "'-' atom", "'(' sum ')'"],
    },
    {"NUMBER": _NUMBER, "NAME": (r"[a-z_][0-9A-Za-z_]*", _of("xyz_"))},
    r"[ \t\f\r\n]",
    _GAPS,
)

SQL = Language(
    r"""
start: query ";"?
query: "SELECT" columns "FROM" source where?
columns: "*" | value ("," value)*
source: NAME | "(" query ")"
where: "WHERE" condition
condition: test | test ("AND" | "OR") condition
test: value COMPARED value | "NOT" test | "(" condition ")" | value "IN" "(" query ")"
value: NAME | NUMBER | STRING
COMPARED: "=" | "<" | "<=" | ">"
NAME: LETTER (LETTER | "0".."9")*
LETTER: "a".."z" | "_"
STRING: /'([^']|'')*'/
NUMBER: /[0-9]+(\.[0-9]+)?/
%ignore /[ \t\r\n]+/
%ignore /--[^\n]*\n/
""",
    {
        "start": ["query", "query ';'"],
        "query": ["'SELECT' columns 'FROM' source", "'SELECT' columns 'FROM' source 'WHERE' condition"],
        "columns": ["'*'", "value", "value ',' values"],
        "values": ["value", "value ',' values"],
        "source": ["NAME", "'(' query ')'"],
        "condition": ["test", "test 'AND' condition", "test 'OR' condition"],
        "test": ["value COMPARED value", "'NOT' test", "'(' condition ')'", "value 'IN' '(' query ')'"],
        "value": ["NAME", "NUMBER", "STRING"],
    },
    {
        "NAME": (r"[a-z_][a-z_0-9]*", _of("abc_")),
        "NUMBER": _NUMBER,
        "STRING": (r"'(?:[^']|'')*'", _sql_string),
        "COMPARED": (r"<=|[=<>]", lambda rng: rng.choice(("=", "<", "<=", ">"))),
    },
    r"[ \t\r\n]|--[^\n]*\n",
    (" ", "\n", " \t", ' -- "why"\n', "\r\n "),
)

JSON_LIKE = Language(
    r"""
start: value
value: STRING | NUMBER | "true" | "null" | list | table
list: "[" [value ("," value)*] "]"
table: "{" [pair ("," pair)*] "}"
pair: STRING ":" value
STRING: /"([^"\\\x00-\x1f]|\\["\\\/bfnrt]|\\u[0-9a-f]{4})*"/
NUMBER: "-"? /\d+(\.\d+)?/
WS: /[ \n\r\t]/+
%ignore WS
""",
    {
        "start": ["value"],
        "value": ["NUMBER", "STRING", "'true'", "'null'", "'[' ']'", "'[' items ']'", "'{' '}'", "'{' pairs '}'"],
        "items": ["value", "value ',' items"],
        "pairs": ["STRING ':' value", "STRING ':' value ',' pairs"],
    },
    {
        "STRING": (r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-f]{4})*"', _json_string),
        "NUMBER": (r"-?[0-9]+(?:\.[0-9]+)?", lambda rng: rng.choice(("", "-")) + _of("0123456789")(rng)),
    },
    r"[ \n\r\t]",
    _GAPS,
)

BLOCKS = Language(
    r"""
start: block
block: "begin" LF item* "end" LF?
item: block | line
line: "+" /(.*)/ LF
LF: /\n/
""",
    {
        "start": ["block"],
        "block": ["'begin' LF 'end'", "'begin' LF items 'end'", "'begin' LF 'end' LF", "'begin' LF items 'end' LF"],
        "items": ["line", "block", "line items", "block items"],
        "line": ["'+' ANY LF"],
    },
    {"ANY": (r"[^\n]*", _of('ab"\\ \t\x01é<+', 0)), "LF": (r"\n", lambda _: "\n")},
)

LANGUAGES = {"arithmetic": ARITHMETIC, "sql": SQL, "json": JSON_LIKE, "blocks": BLOCKS}
