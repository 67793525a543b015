"""Makes the page of rule codes: each code's rule, and the tests that name it.
Never judges whether a test checks its rule; test_specification and the mutations do."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from docsite.rule_texts import BEHAVIOURS, DEFECTS, INVARIANTS, SEEDS

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
OWN_TESTS = TESTS / "docsite"
SUPPORT = TESTS / "support"
"""Where the checks are that run within many tests."""
MUTATIONS = TESTS / "mutations.md"
MOST_TESTS = 6
"""The maximum number of tests shown for a code; the others are counted."""

INTRODUCTION = """\
# Rule codes

Written by `make docs`. The scheduler is based on five public designs of chunked prefill, and tests, comments and
[mutations](../../tests/mutations.md) refer to their rules by codes:

- `S1-B6` is a **behaviour**: the sixth of the first design.
- `S4-R9` is a **defect** that must not return: the ninth found in the fourth design or in its review. Its line says
  what holds instead.
- `I-10` is an **invariant**: it holds in every step of every run. `support/invariants.py` checks nearly all of them on
  the random lives of `tests/engine/test_state_machine.py`.

[Five public designs](../../engine/DESIGNS.md) describes the designs as presets.
"""

_CODE = re.compile(r"\b(?:(S\d)-([BR]\d+)|I-\d+)\b")
_MORE = re.compile(r"(?:,| and) ([BR]\d+)\b")
_RANGE = re.compile(r"\b(S\d-[BR])(\d+) to (?:S\d-)?[BR](\d+)\b")
_MUTATION = re.compile(r"^\| ((?:S\d-[BR]|I-)\d+)[^|]*\|[^|]*\| `([^`\[]+)", re.MULTILINE)


def codes_in(text: str) -> set[str]:
    """Return the codes that a text names, including abbreviated ones: `S2-B3, B4` are two, `S2-B3 to B5` are three."""
    found = set[str]()
    for seed, first, last in _RANGE.findall(text):
        found |= {f"{seed}{number}" for number in range(int(first), int(last) + 1)}
    for code in _CODE.finditer(text):
        found.add(code[0])
        end = code.end()
        while code[1] and (more := _MORE.match(text, end)):
            found.add(f"{code[1]}-{more[1]}")
            end = more.end()
    return found


def used_codes() -> set[str]:
    """Return all codes in the source tree, except in this package."""
    places = ("engine", "kernels", "serve_app", "loadtest", "tests")
    paths = [path for place in places for kind in ("*.py", "*.md") for path in (ROOT / place).rglob(kind)]
    others = (path for path in paths if OWN_TESTS not in path.parents)
    return {code for path in others for code in codes_in(path.read_text(encoding="utf-8"))}


def find_tests() -> dict[str, list[str]]:
    """Map each code to `file::test` for the tests that name it, the specification's index and the mutations' table, and
    to `file` if a whole file is about it or checks it in every run."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in sorted(SUPPORT.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        told = ast.get_docstring(ast.parse(text), clean=False) or ""  # which may say what the file does not check
        for code in codes_in(text.replace(told, "", 1)):
            found[code].add(path.relative_to(TESTS).as_posix())
    for path in sorted(path for path in TESTS.rglob("test_*.py") if OWN_TESTS not in path.parents):
        text = path.read_text(encoding="utf-8")
        if not codes_in(text):
            continue
        tree = ast.parse(text)
        for code, test in (*_named_in(tree, path), *_indexed(tree)):
            found[code].add(test)
    if MUTATIONS.exists():
        for code, test in _MUTATION.findall(MUTATIONS.read_text(encoding="utf-8")):
            found[code].add(_whole(test))
    return {code: sorted(tests) for code, tests in found.items()}


def _named_in(tree: ast.Module, path: Path) -> Iterator[tuple[str, str]]:
    place = path.relative_to(TESTS).as_posix()
    for code in codes_in(ast.get_docstring(tree) or ""):
        yield code, place
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            for code in codes_in("\n".join(text for text in texts if isinstance(text, str))):
                yield code, f"{place}::{node.name}"


def _indexed(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the entries of tables such as `{"S1-R1": "engine/core/test_core.py::test_..."}`."""
    for table in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and _CODE.fullmatch(key.value):
                for part in ast.walk(value):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str) and ".py::" in part.value:
                        yield key.value, part.value


def _whole(test: str) -> str:
    """Add the folder to a test's file, which the mutations leave out."""
    file, _, name = test.partition("::")
    places = [path.relative_to(TESTS).as_posix() for path in sorted(TESTS.rglob(file)) if _has(path, name)]
    return f"{places[0] if places else file}::{name}"


@cache
def _has(path: Path, name: str) -> bool:
    return re.search(rf"def {re.escape(name)}\(", path.read_text(encoding="utf-8")) is not None


def render() -> str:
    """Render the page as Markdown."""
    return "\n".join([INTRODUCTION, *_sections(find_tests())])


def _sections(tests: Mapping[str, list[str]]) -> Iterator[str]:
    yield from ("## Invariants", "", *_table(INVARIANTS, tests))
    for seed, name in SEEDS.items():
        for kind, rules in (("behaviours", BEHAVIOURS), ("defects", DEFECTS)):
            yield from (f"## {seed}, {kind}: {name}", "")
            yield from _table({code: rule for code, rule in rules.items() if code.startswith(seed)}, tests)


def _table(rules: Mapping[str, str], tests: Mapping[str, list[str]]) -> Iterator[str]:
    yield from ("| code | rule | tests |", "|---|---|---|")
    for code, rule in rules.items():
        yield f"| `{code}` | {rule} | {_listed(tests.get(code, []))} |"
    yield ""


def _listed(tests: Iterable[str]) -> str:
    names = [f"`{test.removeprefix('engine/')}`" for test in tests]
    more = [f"and {len(names) - MOST_TESTS} more"] if len(names) > MOST_TESTS else []
    return "<br>".join([*names[:MOST_TESTS], *more])
