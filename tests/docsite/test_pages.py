"""Owns the promise that the documentation is complete and current: generated pages, figures, links, the site itself.
Never runs a command of it; test_blocks does."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from mkdocs.config.defaults import MkDocsConfig
from pydantic import BaseModel

from benchmarks import versions
from benchmarks.engine import kv_tiers as bench_kv_tiers
from benchmarks.engine import memory as bench_memory
from benchmarks.engine import mixed as bench_mixed
from benchmarks.engine import mixture as bench_mixture
from benchmarks.engine import ranks as bench_ranks
from benchmarks.engine import shapes as bench_shapes
from benchmarks.engine import speculation as bench_speculation
from benchmarks.engine import step as bench_step
from benchmarks.engine import step_model as bench_step_model
from benchmarks.engine import targets as bench_targets
from benchmarks.engine.tiers import agents as bench_agents
from benchmarks.engine.tiers import cost as bench_cost
from benchmarks.engine.tiers import warm as bench_warm
from benchmarks.peers import agreement, beside, llama_cpp
from benchmarks.peers import run as bench_peers
from benchmarks.retention import run as retention
from benchmarks.serving import killed as bench_killed
from benchmarks.tensor_parallel import run as tensor_parallel
from benchmarks.transport import run as transport
from docsite import commands, diagram, refusals
from docsite.hooks import BESIDE_THE_CODE, in_site, on_serve, with_links
from docsite.pages import DOCS, ROOT, rendered
from serve_app.api.anthropic.schema import MessagesRequest
from serve_app.api.openai.responses.schema import ResponsesRequest
from serve_app.api.requests.embedding_schema import EmbeddingRequest
from serve_app.api.requests.schema import ChatRequest, CompletionRequest, StreamOptions
from tests.gpu.hour import report as gpu_report

RESULTS = ROOT / "loadtest" / "results"
FIGURES: dict[str, tuple[str, str, ModuleType]] = {
    "mixed load": ("chunking.md", "mixed_load.json", bench_mixed),
    "kv tight": ("memory-reservation.md", "kv_tight.json", bench_memory),
    "engine step": ("step-time.md", "engine_step.json", bench_step),
    "engine step stored": ("stored-weights.md", "engine_step_stored.json", bench_step),
    "engine step mixture": ("stored-weights.md", "engine_step_mixture.json", bench_mixture),
    "step model": ("step-model.md", "step_model.json", bench_step_model),
    "targets": ("targets.md", "targets.json", bench_targets),
    "beside": ("targets.md", "beside.json", beside),
    "peers vectors": ("peers.md", "peers_vectors.json", bench_peers),
    "llama.cpp": ("llama-cpp.md", "llama_cpp.json", llama_cpp),
    "agreement": ("llama-cpp.md", "agreement.json", agreement),
    "shapes": ("llama-cpp.md", "llama_cpp_shapes.json", bench_shapes),
    "late": ("llama-cpp.md", "llama_cpp_late.json", bench_shapes),
    "drafts": ("drafts.md", "speculation.json", bench_speculation),
    "kv tiers": ("kv-tiers.md", "kv_tiers.json", bench_kv_tiers),
    "killed": ("kv-tiers.md", "killed.json", bench_killed),
    "retention": ("retention.md", "retention.json", retention),
    "transport": ("transport.md", "transport.json", transport),
    "versions": ("between-commits.md", "versions.json", versions),
    "tensor parallel": ("tensor-parallel.md", "tensor_parallel.json", tensor_parallel),
    "ranks": ("tensor-parallel.md", "ranks.json", bench_ranks),
    "first hour": ("gpu.md", "gpu.json", gpu_report),
}
"""Marks, with their page, their file of figures, and the program that made the file and makes the table."""
NAMED_BESIDE = (
    "engine/models", "engine/scheduling", "kernels/triton/sampling", "serve_app/metrics", "serve_app/parsing",
    "tests/serve_app/parsing",
)  # fmt: skip
"""Folders whose files CONTRIBUTING.md names alone, beside another with its path."""


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def test_generated_pages_are_what_the_code_says() -> None:
    wrong = [path.relative_to(ROOT) for path, text in rendered().items() if path.read_text(encoding="utf-8") != text]
    assert not wrong, "run `make docs`"


# --- figures ----------------------------------------------------------------------------------------------------------


def between(mark: str, page: str) -> str:
    text = (DOCS / "benchmarks" / page).read_text(encoding="utf-8")
    return text.partition(f"<!-- {mark} -->")[2].partition(f"<!-- end of {mark} -->")[0].strip()


@pytest.mark.parametrize("mark", FIGURES)
def test_a_table_of_figures_is_what_its_file_says(mark: str) -> None:
    page, name, program = FIGURES[mark]
    assert between(mark, page) == program.table(document(name))


@pytest.mark.parametrize("mark", FIGURES)
def test_a_page_of_figures_has_the_command_that_made_them(mark: str) -> None:
    page, name, program = FIGURES[mark]
    text = (DOCS / "benchmarks" / page).read_text(encoding="utf-8")
    assert re.search(
        rf"^\.venv/bin/python -m {re.escape(program.__name__)} .*--out loadtest/results/{name}$", text, re.M
    )


def test_first_tokens_at_equal_gaps_are_what_the_file_says() -> None:
    assert between("equal gaps", "targets.md") == bench_targets.equal_gaps(document("targets.json"))


@pytest.mark.parametrize(
    ("phase", "program"),
    [("warm", bench_warm), ("drawn", bench_agents), ("recorded", bench_agents), ("cost", bench_cost)],
)
def test_a_table_of_a_phase_of_kv_tiers_is_what_the_file_says(phase: str, program: ModuleType) -> None:
    assert between(phase, "kv-tiers.md") == program.table(document("kv_tiers.json")["phases"].get(phase))


def test_what_the_page_says_of_gains_and_losses_by_value_is_what_the_file_says() -> None:
    """Gains are in points, between means over the seeds."""
    cells = document("retention.json")["cells"]

    def mean(load: str, size: int, tier: int, policy: str) -> float:
        key = (load, size, tier, policy)
        found = [
            cell["hit_share"] for cell in cells if (cell["load"], cell["size"], cell["tier"], cell["policy"]) == key
        ]
        return 100 * statistics.mean(found)

    def gains(load: str) -> list[float]:
        return [mean(load, size, 0, "by value") - mean(load, size, 0, "LRU") for size in retention.SIZES]

    agents, flooded, conversations, synthetic = map(gains, [*retention.AGENTS, *retention.TRACES])
    both = [
        mean(load, retention.DEVICE, tier, "by value, by value") - mean(load, retention.DEVICE, tier, "LRU, by value")
        for load in (*retention.AGENTS, *retention.TRACES)
        for tier in retention.TIERS
    ]
    best = 100 * mean("agents", 25, 100, "LRU, by value") / mean("agents", 25, 100, "best")
    text = " ".join((DOCS / "benchmarks" / "retention.md").read_text(encoding="utf-8").split())
    for said in (
        f"in every row, but only by {min(agents):.1f} to {max(agents):.1f} points",
        f"up to {max(flooded):.1f} points beside a tenant that floods",
        f"up to {max(conversations):.1f} in Mooncake's conversations",
        f"up to {-min(synthetic):.1f} points fewer tokens by value",
        f"{max(both):.1f} points more in one, and up to {-min(both):.1f} fewer in others",
        f"find {best:.0f} % of what can be found at all",
    ):
        assert said in text, said


def test_what_ranks_exchange_is_what_the_file_says() -> None:
    assert between("ranks exchanges", "tensor-parallel.md") == bench_ranks.exchanges_table(document("ranks.json"))


def test_how_fast_weights_are_read_is_what_the_file_says() -> None:
    found = document("engine_step_stored.json")
    assert between("engine step reading", "stored-weights.md") == bench_step.reading_table(found)


def test_what_tiers_and_tenants_find_is_what_the_file_says() -> None:
    found = document("retention.json")
    assert between("retention tiers", "retention.md") == retention.tiers_table(found)
    assert between("retention tenants", "retention.md") == retention.tenants_table(found)


def test_the_figures_are_of_valid_measurements() -> None:
    measured = ("mixed_load.json", "kv_tight.json", "targets.json")
    assert all(cell["valid"] for name in measured for cell in document(name)["cells"])
    ours = [cell for cell in document("transport.json")["cells"] if cell["path"].startswith("ours")]
    assert all(cell["num_errors"] == 0 for cell in ours)


def test_the_documented_speed_of_stored_weights_is_what_was_measured() -> None:
    found = document("engine_step_stored.json")["cells"]
    cells = {(cell["step"], cell["size"], cell["kernels"]): cell["ms_p50"] for cell in found}
    text = (DOCS / "benchmarks" / "stored-weights.md").read_text(encoding="utf-8")
    share = cells["decode", 1, "stored"] / cells["decode", 1, "native"]
    assert f"takes {share:.0%}".replace("%", " %") in text


def test_the_documented_slowdown_between_commits_is_the_largest_that_was_measured() -> None:
    largest = max(cell["ratio"] for cell in document("versions.json")["cells"])
    text = " ".join((DOCS / "benchmarks" / "between-commits.md").read_text(encoding="utf-8").split())
    assert f"The largest median is {largest:.3f}, which" in text


def test_the_documented_stalls_are_the_longest_that_were_measured() -> None:
    large = [cell for cell in document("ingress_stalls.json")["cells"] if "3.9 MB" in cell["case"]]
    gap, health = (max(max(cell[name]) for cell in large) for name in ("gap_max_ms", "health_max_ms"))
    text = " ".join((DOCS / "benchmarks" / "ingress-stalls.md").read_text(encoding="utf-8").split())
    assert f"waited longer than {gap:.0f} ms for a token, and `/health` no longer than {health:.0f} ms" in text


# --- what must be complete --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "titles"),
    [
        (ChatRequest, []),
        (CompletionRequest, []),
        (StreamOptions, []),
        (EmbeddingRequest, []),
        (ResponsesRequest, ["Responses", "Responses that are kept"]),
        (MessagesRequest, ["Messages"]),
    ],
)
def test_every_field_that_is_honoured_is_named_by_its_purpose_or_with_its_route(
    model: type[BaseModel], titles: list[str]
) -> None:
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    text = "".join(page.partition(f"## {title}\n")[2].partition("\n## ")[0] for title in ["Fields by purpose", *titles])
    assert not [name for name in model.model_fields if not re.search(rf"`{name}[`.]", text)]


def test_what_the_picture_names_is_there() -> None:
    files = [part.file for box in diagram.BOXES for part in box.parts if part.file]
    assert files
    assert all((ROOT / file).is_file() for file in files)


def test_every_variable_that_users_may_set_is_documented() -> None:
    product = (path for place in ("engine", "kernels", "serve_app") for path in (ROOT / place).rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in product]
    used = {name for text in texts for name in re.findall(r"\bCHUNKSERVE_[A-Z_]+", text)}
    assert used - {"CHUNKSERVE_INSTANCE"} <= commands.VARIABLES.keys()  # set by `serve run` for its replicas


def test_every_file_that_may_refuse_a_start_is_in_a_group() -> None:
    grouped = {path for group in refusals.GROUPS for pattern in group.files for path in ROOT.glob(pattern)}
    files = (*(ROOT / "engine").rglob("*.py"), *(ROOT / "serve_app" / "front").rglob("*.py"))
    for path in (path for path in files if path.parent.name != "fake"):
        if re.search(
            r"raise (ConfigError|ModelError|CheckpointError|AdapterError|ConfigRefused|StartFailed)\(", path.read_text()
        ):
            assert path in grouped, path.relative_to(ROOT)


@pytest.mark.parametrize("group", refusals.GROUPS, ids=lambda group: group.title)
def test_a_group_of_refusals_has_some(group: refusals.Group) -> None:
    assert list(refusals.messages(group))


def test_the_refusals_of_a_config_s_values_are_listed_with_what_was_expected() -> None:
    """Regression: a kind of value was one variable of the message, which then had too few words of its own."""
    listed = list(refusals.messages(refusals.GROUPS[0]))
    assert {"…: …: expected a mapping (given: …)", "…: …: expected a text, or no such key (given: None)"} <= {*listed}
    assert not [text for group in refusals.GROUPS for text in refusals.messages(group) if "……" in text]


def test_no_fault_of_a_step_stands_among_the_refusals() -> None:
    """A row whose adapter the model does not have was once to be mended by another download of the checkpoint."""
    assert "this model has none" in (refusals.ROOT / "engine/models/native.py").read_text(encoding="utf-8")
    listed = [text for group in refusals.GROUPS for text in refusals.messages(group)]
    assert not [text for text in listed if "this model has none" in text or "was not kept" in text]
    assert not [text for text in listed if text.startswith(("Row", "A row"))]


@pytest.mark.parametrize("title", ["The server does not start", "What `serve run` says while it runs and ends"])
def test_lines_of_a_start_and_an_end_are_those_of_the_code(title: str) -> None:
    page = (DOCS / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    code = "".join(
        path.read_text(encoding="utf-8") for place in ("engine", "serve_app") for path in (ROOT / place).rglob("*.py")
    )
    joined = re.sub(r'"\s*\n\s*f?"', "", code)
    shown = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(shown) > 10
    for line in shown:
        parts = [part.strip() for part in line.split("…")]
        assert not [part for part in parts if len(part) > 3 and part not in joined], line


def test_the_files_that_the_way_in_names_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w./-]+)`", text) if "/" in name or name.endswith((".py", ".md", ".yml"))}
    assert len(named) > 30
    places = [ROOT, *(ROOT / place for place in NAMED_BESIDE)]
    assert not [name for name in sorted(named) if not any((place / name).exists() for place in places)]


def test_the_glossary_is_in_order_and_has_the_projects_own_words() -> None:
    page = (DOCS / "explanation" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\*\*.+?\*\*) \| (.+) \|$", page, re.MULTILINE)
    words = [re.findall(r"\*\*(.+?)\*\*", row) for row, _ in rows]
    assert [first for first, *_ in words] == sorted(first for first, *_ in words)
    own = {
        "arrival index",
        "chunk",
        "cut",
        "elder",
        "epoch",
        "lane",
        "plan",
        "retract",
        "row",
        "seat",
        "slot",
        "span",
        "step",
    }
    assert own <= {word for found in words for word in found}
    assert all(meaning.endswith(".") for _, meaning in rows)


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_every_row_of_a_table_has_the_cells_of_its_head(path: Path) -> None:
    """Regression: a bar inside a cell once cut the text of a setting in two."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        widths = {line.count("|") - line.count("\\|") for line in table.splitlines()}
        assert len(widths) == 1, table[:200]


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_a_heading_stands_apart(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"\S\n(#+ .*)$", text, re.MULTILINE)


# --- the site ---------------------------------------------------------------------------------------------------------


def test_links_to_pages_beside_the_code_lead_to_where_the_site_has_them() -> None:
    assert with_links("[notes](../../engine/NOTES.md#a)", "explanation/memory.md") == "[notes](decisions/engine.md#a)"
    assert with_links("[Settings](docs/reference/settings.md)", "changelog.md") == "[Settings](reference/settings.md)"
    assert with_links("![it](../../docs/peers.svg)", "benchmarks/simulator.md") == "![it](../peers.svg)"


def test_links_to_source_files_become_names() -> None:
    text = with_links("[the planner](../../engine/scheduling/planner.py) and `[a](b)`", "explanation/memory.md")
    assert text == "the planner (`engine/scheduling/planner.py`) and `[a](b)`"
    assert with_links("[config.yaml](../../config.yaml)", "explanation/memory.md") == "config.yaml"


def test_a_dead_link_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with_links("[gone](../../engine/gone.py)", "explanation/memory.md")
    assert "engine/gone.py, which is not there" in caplog.text


def test_pages_beside_the_code_are_there_and_shown_once() -> None:
    assert all((ROOT / origin).is_file() for origin in BESIDE_THE_CODE)
    assert len(set(BESIDE_THE_CODE.values())) == len(BESIDE_THE_CODE)
    assert in_site("engine/NOTES.md") == "explanation/decisions/engine.md"


def test_the_site_follows_changes_of_pages_beside_the_code() -> None:
    """Regression: a list in mkdocs.yml had five of nineteen."""
    watched: list[str] = []
    server = SimpleNamespace(watch=watched.append)
    assert on_serve(server, MkDocsConfig(), lambda: None) is server  # type: ignore[arg-type, comparison-overlap]
    assert watched == [str(ROOT / origin) for origin in BESIDE_THE_CODE]


def test_every_page_of_notes_is_in_the_site() -> None:
    tracked = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not [name for name in tracked.split() if in_site(name) is None]


def test_the_site_builds_strictly_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    """A dead link, a dead anchor or a page without a place in the navigation ends a strict build."""
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(mkdocs, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//[^\s>]*", re.IGNORECASE)
    for page in (tmp_path / "site").rglob("*.html"):
        assert not loaded.findall(page.read_text(encoding="utf-8")), page.relative_to(tmp_path)
