"""Owns the list of what a start may refuse: the message of each `raise` in the code, and those made from a table, with
… for values.
Never runs that code or rewords a message."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from docsite import features
from serve_app.front.config_kinds import APPLICATION_KINDS, HTTP_KINDS, REFUSED, REFUSED_NULL, TOP_KINDS

ROOT = Path(__file__).resolve().parents[1]
LIST_PROBLEMS = ("config_file.py",)
"""Files whose functions yield their problems, one line each."""
FEWEST_WORDS = 2
"""A message with fewer words of its own only passes on another message."""
OF_A_STEP = ("A row ", "Row ")
"""Messages about a step's row begin so. Whoever plans steps is at fault then; no start or checkpoint is refused."""
MOST_CHARS = 400
"""Longer messages are cut: readers search for the beginning."""

_KINDS = {
    "ConfigError", "ModelError", "FilesMissingError", "NotMadeError", "CheckpointError", "AdapterError",
    "ConfigRefused", "StartFailed", "HAProxyUnusable", "HAProxyMisconfigured", "KeysFileError",
    "EdgeError", "refused", "TraceMissingError",
}  # fmt: skip


def _kinds() -> Iterator[str]:
    """Yield what is said of a value in a config file that Ray would not take."""
    for kind in (*TOP_KINDS.values(), *HTTP_KINDS.values(), *APPLICATION_KINDS.values()):
        for told in (REFUSED,) if kind.takes(None) else (REFUSED, REFUSED_NULL):
            yield f"…: …: {told.format(expected=kind.expected, given='…')}"


@dataclass(frozen=True, slots=True)
class Group:
    """The remedy for the refusals of some files. `files` are globs from the repository's root."""

    title: str
    remedy: str
    files: tuple[str, ...]
    kinds: frozenset[str] = frozenset(_KINDS)
    more: Callable[[], Iterator[str]] | None = None
    """Makes further messages, from a table."""


GROUPS = (
    Group(
        "The config file and the command",
        "The line names the file, the line in it and the setting. Correct it there.",
        ("serve_app/front/*.py", "serve_app/front/command/*.py", "serve_app/auth/*.py", "serve_app/settings/*.py"),
        more=_kinds,
    ),
    Group(
        "HAProxy",
        "Without HAProxy the server uses the Python proxy and starts. A wrong setting for HAProxy ends the start.",
        ("serve_app/front/haproxy.py", "serve_app/edge/*.py"),
    ),
    Group(
        "Features that do not go together",
        "The message names both. Change either: [Features](features.md) says which exclude each other, and why.",
        ("engine/features.py", "serve_app/settings/features.py"),
        more=features.sentences,
    ),
    Group(
        "Numbers that contradict each other",
        "The message has both, or the limit and the value.",
        ("engine/config.py", "engine/build/resolve.py", "engine/execution/gpu/cuda_graph_buckets.py"),
    ),
    Group(
        "Memory of this machine",
        "The message has both numbers. Lower `kv_cache_memory_gib` or `max_num_batched_tokens`, serve fewer engines "
        "here, or choose a smaller model.",
        ("engine/host/*.py", "engine/build/host_fit.py", "engine/models/kv_cache.py"),
    ),
    Group(
        "KV tiers",
        "For `disk_path`, name a directory that only the server's user may write to, on a disk of this machine with "
        "room for `disk_gib`. The key file's form is in the message.",
        ("engine/build/kv_tiers.py", "engine/tiers/*.py"),
    ),
    Group("Step times", "Raise `max_num_batched_tokens`, or leave `targets` out.", ("engine/build/step_times.py",)),
    Group("The CPU's kernels", "Set `kernels: auto`, or install what the message names.", ("engine/build/cpu.py",)),
    Group(
        "GPU",
        "`device: auto` serves from the CPU if there is no GPU. For memory lower `gpu_memory_utilization`, "
        "`max_num_batched_tokens` or the number of captured sizes.",
        (
            "engine/build/gpu.py",
            "engine/build/batch_invariance.py",
            "engine/execution/device.py",
            "engine/execution/gpu/[!c]*.py",
        ),
    ),
    Group(
        "Several ranks",
        "Lower `tensor_parallel_size` or `expert_parallel_size`; for a rank that could not start, the message has its "
        "reason.",
        (
            "engine/build/executor.py",
            "engine/build/*ranks.py",
            "engine/build/rank_*.py",
            "engine/build/*follower.py",
            "engine/build/lockstep.py",
            "engine/parallel/*.py",
        ),
    ),
    Group("Draft model", "Choose another draft model or `method: auto`.", ("engine/build/draft.py",)),
    Group("Images", "Raise `max_num_batched_tokens`, or allow smaller images.", ("engine/build/encoder.py",)),
    Group(
        "The model's name, its download and its cache",
        "Check the name. Behind a firewall, download the model elsewhere and give its directory.",
        (
            "engine/checkpoints/model_name.py",
            "engine/checkpoints/prepare.py",
            "engine/checkpoints/model_source.py",
            "engine/checkpoints/model_cache.py",
            "engine/checkpoints/default_model.py",
            "engine/checkpoints/two_forms.py",
        ),
    ),
    Group("GGUF files", "The file is damaged, or of an unsupported kind.", ("engine/checkpoints/gguf_*.py",)),
    Group(
        "Checkpoints",
        "The checkpoint is damaged or incomplete, or has an unsupported feature. Download it again; if the "
        "message names a feature, the model cannot be served.",
        ("engine/models/[!k]*.py", "engine/models/families/*.py", "engine/build/end_tokens.py"),
        frozenset({*_KINDS, "ValueError"} - {"AdapterError"}),
    ),
    Group(
        "LoRA adapters",
        "The adapter has an unsupported feature, belongs to another model, or is damaged.",
        ("engine/models/adapter_files.py", "engine/adapter_cache.py"),
        frozenset({"AdapterError"}),
    ),
)


def render() -> str:
    """Render a section for each group, with each message once."""
    return "\n".join(line for group in GROUPS for line in _section(group))


def _section(group: Group) -> Iterator[str]:
    yield from (f"## {group.title}", "", group.remedy, "")
    for message in sorted(set(messages(group)), key=str.lower):
        yield f"- {message}"
    yield ""


def messages(group: Group) -> Iterator[str]:
    """Yield the messages that the group's files raise, except those without words of their own and those of steps."""
    paths = {path for pattern in group.files for path in ROOT.glob(pattern)}
    if group.title != "HAProxy":
        paths.discard(ROOT / "serve_app/front/haproxy.py")
    for text in group.more() if group.more else ():
        yield _escaped(text)
    for path in sorted(paths):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for text in _messages_in(node, group.kinds, lists_problems=path.name in LIST_PROBLEMS):
                words = sum(word.strip(":.,").isalpha() for word in text.split())
                if words >= FEWEST_WORDS and not text.startswith(OF_A_STEP):
                    yield _escaped(text)


def _messages_in(node: ast.AST, kinds: frozenset[str], *, lists_problems: bool) -> Iterator[str]:
    made = node.exc if isinstance(node, ast.Raise) else node.value if isinstance(node, ast.Yield) else None
    if isinstance(made, ast.Call) and _name(made) in kinds and made.args:
        yield _text(made.args[0])
    elif isinstance(node, ast.Yield) and isinstance(node.value, ast.JoinedStr) and lists_problems:
        yield _text(node.value)


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _text(node: ast.expr) -> str:
    """Return a message's own words, with … for the values in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        told = "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
        return re.sub("…+", "…", told)
    return "…"


def _escaped(text: str) -> str:
    text = " ".join(text.split())
    text = text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 1] + "…"
    for mark in "\\`*_<>[]|":
        text = text.replace(mark, f"\\{mark}")
    return text
