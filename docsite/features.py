"""Makes the page of compatible features from the tables that refuse incompatible ones.
Never decides what is compatible: each cell is what a start would find in those tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from engine import features as engine
from engine.features import RULES, Conflict, Feature, Group, Rule, find_conflict
from serve_app.settings.features import APP_RULES

INTRODUCTION = """\
# Features

Written by `make docs`, from the table of features that exclude each other. A start that breaks one of its rules ends
with one line, which names both settings and the reason. A setting that is not named here goes with everything. A
setting that is left at `auto` adapts to the model: where the native kernels do not take its shapes, for example, the
kernels are torch's.

A cell says where the combination works: **N**, **T** and **R** are the CPU with `kernels: native`, `torch_cpu` and
`reference`; **G** is a GPU; – is nowhere. The numbers lead to the reasons below.
"""

Facts = frozenset[Feature]

PLACES: Mapping[str, Facts] = {
    "N": frozenset({engine.CPU, engine.NATIVE}),
    "T": frozenset({engine.CPU, engine.TORCH_CPU}),
    "R": frozenset({engine.CPU, engine.REFERENCE}),
    "G": frozenset({engine.GPU}),
}

MODELS: Mapping[str, Facts] = {
    "dense": frozenset({engine.NO_EXPERTS, engine.TEXT, engine.NO_STATE}),
    "mixture of experts": frozenset({engine.EXPERTS, engine.TEXT, engine.NO_STATE}),
    "hybrid": frozenset({engine.NO_EXPERTS, engine.LINEAR_ATTENTION, engine.RECURRENT_STATE, engine.TEXT}),
    "text and images": frozenset({engine.NO_EXPERTS, engine.IMAGES, engine.NO_STATE}),
}
"""Kinds of models, as in reference/models.md, with all their features in the table."""

ROWS: Mapping[str, Facts] = {
    "LoRA adapters (`max_loras`)": frozenset({engine.LORA}),
    "Prompt lookup (`speculative.method: ngram`, `suffix`)": frozenset({engine.LOOKUP}),
    "A draft model (`speculative.method: draft_model`)": frozenset({engine.DRAFT_MODEL}),
    "A number of drafts (`num_speculative_tokens`)": frozenset({engine.DRAFTS}),
    "Overlapped steps (`overlap`)": frozenset({engine.OVERLAP}),
    "A packed checkpoint": frozenset({engine.PACKED}),
    "Weights rounded to 8 bits (`quantize: int8`)": frozenset({engine.QUANTIZE}),
    "A checkpoint's own bits (`quantize: stored`)": frozenset({engine.STORED}),
    "Activations in int8 (`activations: int8`)": frozenset({engine.ROUNDED}),
    "KV cache in 8 bits (`kv_cache_dtype: int8`, `fp8_e4m3`)": frozenset({engine.NARROW_KV}),
    "Activations in fp8 (`activations: fp8`)": frozenset({engine.FP8_ACTIVATIONS}),
    "Batch invariance (`batch_invariant`)": frozenset({engine.BATCH_INVARIANT}),
    "float16 (`dtype: float16`)": frozenset({engine.FLOAT16}),
    "CUDA graphs (`cuda_graphs: decode`, `all`)": frozenset({engine.GRAPHS, engine.GPU_GRAPHS}),
    "Snapshots of recurrent state (`scheduler.state_snapshot_tokens`)": frozenset({engine.SNAPSHOTS}),
    "Prompts cut by the engine (`scheduler.chunk_owner: engine`)": frozenset({engine.ENGINE_CHUNKS}),
}
"""The features of the page's rows, with their settings."""

ONE_OF_A_SETTING = "or"
"""The content of a cell for two values of the same setting."""


class Notes:
    """Numbers the reasons in the order in which cells refer to them."""

    def __init__(self) -> None:
        self._noted: list[tuple[Feature, Rule]] = []

    def unnoted(self, rule: Rule) -> tuple[Feature, ...]:
        """Return the features of a rule that no cell refers to."""
        return tuple(feature for feature in rule.features if (feature, rule) not in self._noted)

    def marks(self, conflicts: Iterable[Conflict]) -> str:
        """Return the numbers of these conflicts, as superscript."""
        numbers = set()
        for conflict in conflicts:
            note = conflict.feature, conflict.rule
            if note not in self._noted:
                self._noted.append(note)
            numbers.add(self._noted.index(note) + 1)
        return f"<sup>{', '.join(map(str, sorted(numbers)))}</sup>" if numbers else ""

    def lines(self) -> Iterator[str]:
        """Yield a line for each number."""
        for number, (feature, rule) in enumerate(self._noted, 1):
            yield f"{number}. {_named(feature)} beside {_beside(rule)}: {rule.reason}."


def where(*parts: Facts) -> tuple[str, list[Conflict]]:
    """Return the places where all these features work together, and the conflicts in the others."""
    together = frozenset().union(*parts)
    refused = {place: find_conflict(together | facts) for place, facts in PLACES.items()}
    conflicts = [conflict for conflict in refused.values() if conflict is not None]
    return "".join(place for place, conflict in refused.items() if conflict is None), conflicts


def cell(row: Facts, column: Facts, notes: Notes) -> str:
    """Return the places where both work together, with the reasons why one refuses the other elsewhere. If neither
    refuses the other and still no place has both, the reasons are those that exclude each from the other's places."""
    if row != column and _settings(row) & _settings(column):
        return ONE_OF_A_SETTING
    if anywhere := find_conflict(row | column):
        return f"–{notes.marks([anywhere])}"
    places, conflicts = where(row, column)
    alone = {conflict.rule for part in (row, column) for conflict in where(part)[1]}
    shown = [conflict for conflict in conflicts if not places or conflict.rule not in alone]
    return " ".join(places or "–") + notes.marks(shown)


def _settings(facts: Facts) -> set[str]:
    return {feature.setting for feature in facts if feature.setting}


def render() -> str:
    """Render the page as Markdown: features by place and model, features by feature, other refusals, and the
    reasons."""
    notes = Notes()
    lines = [INTRODUCTION, "## By device, kernels and model", ""]
    lines += [*_models(notes), "", "## With other features", ""]
    lines += ["For a dense model. *or*: two values of one setting.", "", *_pairs(notes), "", "## Reasons", ""]
    lines += [*notes.lines(), "", "## Other settings", ""]
    lines += ["| this | does not go with | because |", "|---|---|---|"]
    rest = [(notes.unnoted(rule), rule) for rule in (*RULES, *APP_RULES) if not _of_executor(rule)]
    lines += [_row(features, rule) for features, rule in rest if features]
    lines += ["", "## What an executor may lack", ""]
    lines += ["A new device declares what its executor can do; the start refuses the rest.", ""]
    lines += ["| this | is refused with an executor that has | because |", "|---|---|---|"]
    return "\n".join([*lines, *(_row(rule.features, rule) for rule in RULES if _of_executor(rule))]) + "\n"


def _models(notes: Notes) -> Iterator[str]:
    yield f"| | {' | '.join(MODELS)} |"
    yield "|---" * (len(MODELS) + 1) + "|"
    for title, row in {"The model itself": frozenset[Feature](), **ROWS}.items():
        everywhere = notes.marks(where(row)[1])
        yield f"| {title}{everywhere} | {' | '.join(cell(row, model, notes) for model in MODELS.values())} |"


def _pairs(notes: Notes) -> Iterator[str]:
    """Yield one half of the symmetric table."""
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
    """Yield the refusal for each rule, with … for values and for facts that are only known at a start."""
    for rule in (*RULES, *APP_RULES):
        for feature, other in product(rule.features, rule.against):
            clauses = [f"{term.setting} is …" if term.setting else "…" for term in (feature, other, *rule.where)]
            yield f"{clauses[0]}, but {' and '.join(clauses[1:])}: {rule.reason}."
