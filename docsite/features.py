"""Makes the page of what goes together from the tables that refuse what does not.
Never says on its own what goes with what: each cell is what a start would find in those tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from engine import features as engine
from engine.features import RULES, Conflict, Feature, Group, Rule, find_conflict
from serve_app.settings.features import APP_RULES

INTRODUCTION = """\
# Features

Written by `make docs`, from the table that refuses what does not go together. A start that breaks one of its rules
ends with one line, which names both settings and the reason. What is not named here is refused beside nothing, and
what is left at `auto` follows what is asked for: with LoRA adapters, the kernels are torch's.

A cell says where it works: **N**, **T** and **R** are the CPU with `kernels: native`, `torch_cpu` and `reference`;
**G** is a GPU; – is nowhere. The numbers lead to the reasons below.
"""

Facts = frozenset[Feature]

PLACES: Mapping[str, Facts] = {
    "N": frozenset({engine.CPU, engine.NATIVE}),
    "T": frozenset({engine.CPU, engine.TORCH_CPU}),
    "R": frozenset({engine.CPU, engine.REFERENCE}),
    "G": frozenset({engine.GPU}),
}

MODELS: Mapping[str, Facts] = {
    "dense": frozenset({engine.TEXT, engine.NO_STATE}),
    "mixture of experts": frozenset({engine.EXPERTS, engine.TEXT, engine.NO_STATE}),
    "hybrid": frozenset({engine.LINEAR_ATTENTION, engine.RECURRENT_STATE, engine.TEXT}),
    "text and images": frozenset({engine.IMAGES, engine.NO_STATE}),
}
"""Kinds of models, as reference/models.md has them, with all that they are in the table."""

ROWS: Mapping[str, Facts] = {
    "LoRA adapters (`max_loras`)": frozenset({engine.LORA}),
    "Prompt lookup (`speculative.method: ngram`, `suffix`)": frozenset({engine.LOOKUP}),
    "A draft model (`speculative.method: draft_model`)": frozenset({engine.DRAFT_MODEL}),
    "A number of drafts (`num_speculative_tokens`)": frozenset({engine.DRAFTS}),
    "Overlapped steps (`overlap`)": frozenset({engine.OVERLAP}),
    "A packed checkpoint": frozenset({engine.PACKED}),
    "Weights rounded to 8 bits (`quantize: int8`)": frozenset({engine.QUANTIZE}),
    "KV cache in int8 (`kv_cache_dtype: int8`)": frozenset({engine.NARROW_KV}),
    "KV cache in fp8 (`kv_cache_dtype: fp8_e4m3`)": frozenset({engine.NARROW_KV, engine.FP8_KV}),
    "Batch invariance (`batch_invariant`)": frozenset({engine.BATCH_INVARIANT}),
    "float16 (`dtype: float16`)": frozenset({engine.FLOAT16}),
    "CUDA graphs (`cuda_graphs: decode`, `all`)": frozenset({engine.GRAPHS, engine.GPU_GRAPHS}),
    "Snapshots of recurrent state (`scheduler.state_snapshot_tokens`)": frozenset({engine.SNAPSHOTS}),
    "Prompts cut by the engine (`scheduler.chunk_owner: engine`)": frozenset({engine.ENGINE_CHUNKS}),
}
"""What people ask about, with its settings."""

ONE_OF_A_SETTING = "or"
"""The cell of two values of one setting."""


class Notes:
    """Numbers of the reasons that cells name, in the order in which they do."""

    def __init__(self) -> None:
        self._told: list[tuple[Feature, Rule]] = []

    def untold(self, rule: Rule) -> tuple[Feature, ...]:
        """The features of a rule that no cell has named."""
        return tuple(feature for feature in rule.features if (feature, rule) not in self._told)

    def marks(self, conflicts: Iterable[Conflict]) -> str:
        """The numbers of these, raised."""
        found = set()
        for conflict in conflicts:
            told = conflict.feature, conflict.rule
            if told not in self._told:
                self._told.append(told)
            found.add(self._told.index(told) + 1)
        return f"<sup>{', '.join(map(str, sorted(found)))}</sup>" if found else ""

    def lines(self) -> Iterator[str]:
        """A line for each number."""
        for number, (feature, rule) in enumerate(self._told, 1):
            yield f"{number}. {_named(feature)} beside {_beside(rule)}: {rule.reason}."


def where(*parts: Facts) -> tuple[str, list[Conflict]]:
    """The places where all of it is on, and what refuses it in the others."""
    together = frozenset().union(*parts)
    refused = {place: find_conflict(together | facts) for place, facts in PLACES.items()}
    conflicts = [conflict for conflict in refused.values() if conflict is not None]
    return "".join(place for place, conflict in refused.items() if conflict is None), conflicts


def cell(row: Facts, column: Facts, notes: Notes) -> str:
    """Where both go together, with the reasons for which one refuses the other; where none does and there is still no
    place for both, with those for which they go apart."""
    if row != column and _settings(row) & _settings(column):
        return ONE_OF_A_SETTING
    if anywhere := find_conflict(row | column):
        return f"–{notes.marks([anywhere])}"
    places, conflicts = where(row, column)
    alone = {conflict.rule for part in (row, column) for conflict in where(part)[1]}
    told = [conflict for conflict in conflicts if not places or conflict.rule not in alone]
    return " ".join(places or "–") + notes.marks(told)


def _settings(facts: Facts) -> set[str]:
    return {feature.setting for feature in facts if feature.setting}


def render() -> str:
    """The page as Markdown: places and models, feature by feature, what else is refused, and the reasons."""
    notes = Notes()
    lines = [INTRODUCTION, "## On which device, with which kernels, for which models", ""]
    lines += [*_models(notes), "", "## Beside which other features", ""]
    lines += ["Of a dense model. *or*: two values of one setting.", "", *_pairs(notes), "", "## Reasons", ""]
    lines += [*notes.lines(), "", "## Other settings", ""]
    lines += ["| this | does not go with | because |", "|---|---|---|"]
    rest = [(notes.untold(rule), rule) for rule in (*RULES, *APP_RULES) if not _of_executor(rule)]
    lines += [_row(features, rule) for features, rule in rest if features]
    lines += ["", "## What an executor may lack", ""]
    lines += ["Whoever adds a device says what its executor can do; the start refuses the rest.", ""]
    lines += ["| this | is refused beside an executor with | because |", "|---|---|---|"]
    return "\n".join([*lines, *(_row(rule.features, rule) for rule in RULES if _of_executor(rule))]) + "\n"


def _models(notes: Notes) -> Iterator[str]:
    yield f"| | {' | '.join(MODELS)} |"
    yield "|---" * (len(MODELS) + 1) + "|"
    for title, row in {"The model itself": frozenset[Feature](), **ROWS}.items():
        everywhere = notes.marks(where(row)[1])
        yield f"| {title}{everywhere} | {' | '.join(cell(row, model, notes) for model in MODELS.values())} |"


def _pairs(notes: Notes) -> Iterator[str]:
    """One half: the other would say the same."""
    dense = MODELS["dense"]
    rows = {title: row for title, row in ROWS.items() if where(row, dense)[0]}
    yield f"| | {' | '.join(title.partition(' (')[0] for title in [*rows][:-1])} |"
    yield "|---" * len(rows) + "|"
    for number, (title, row) in enumerate(rows.items()):
        cells = [cell(row, column, notes) for column in [*rows.values()][:number]]
        if cells:
            yield f"| {title.partition(' (')[0]} | {' | '.join([*cells, *[''] * (len(rows) - 1 - len(cells))])} |"


def _of_executor(rule: Rule) -> bool:
    return any(term.group is Group.EXECUTOR for term in rule.against)


def _row(features: Iterable[Feature], rule: Rule) -> str:
    return f"| {_listed(features)} | {_beside(rule)} | {rule.reason} |"


def _beside(rule: Rule) -> str:
    return " and ".join([_listed(rule.against), *(_named(term) for term in rule.where)])


def _listed(terms: Iterable[Feature]) -> str:
    return ", ".join(_named(term) for term in terms)


def _named(term: Feature) -> str:
    return f"{term.title} (`{term.setting}`)" if term.group is Group.SETTING else term.title


def sentences() -> Iterator[str]:
    """What a start would say for each rule, with … for values and for what is found out."""
    for rule in (*RULES, *APP_RULES):
        for one, other in product(rule.features, rule.against):
            told = [f"{term.setting} is …" if term.setting else "…" for term in (one, other, *rule.where)]
            yield f"{told[0]}, but {' and '.join(told[1:])}: {rule.reason}."
