"""Contracts of the structure: what may import what, and what the packages are to outsiders."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("chunkserve", "engine", "kernels", "serve_app")
"""The packages of the server and the library."""
INSTALLED = (*PRODUCT, "loadtest")
"""The packages of the wheel."""
PURE = [
    "config",
    "presets",
    "protocol",
    "step",
    "multimodal_inputs",
    "observer",
    "prefix",
    "async_engine",
    "adapter_cache",
    "compilation",
    "execution.gpu.cuda_graph_buckets",
    "execution.gpu.memory",
    *(
        f"{folder}.{path.stem}"
        for folder in ("core", "scheduling", "speculation", "host", "fake")
        for path in sorted((ROOT / "engine" / folder).glob("*.py"))
    ),
    "tiers.disk",
    "tiers.fingerprint",
]
LONGEST = 400
"""The number of lines up to which a file needs no reason."""
HEAVY = ["torch", "numpy", "ray", "starlette", "pydantic", "transformers", "tokenizers", "safetensors", "kernels"]


def run_python(code: str, *words: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_file_that_is_long_says_why_in_its_first_line() -> None:
    silent = []
    for folder in (*PRODUCT, "loadtest", "k8s", "benchmarks", "docsite", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            lines = path.read_text(encoding="utf-8").splitlines()
            if len(lines) > LONGEST and "long" not in lines[0].lower():
                silent.append(f"{path.relative_to(ROOT)}: {len(lines)} lines")
    assert not silent


# A process of its own for each, forked from one that has imported nothing of ours.
ALONE = """
import importlib, json, os, sys, tomllib

def imported_by(module):
    before = set(sys.modules)
    importlib.import_module(f"engine.{module}")
    tops = {name.partition(".")[0] for name in set(sys.modules) - before}
    return sorted(tops - set(sys.stdlib_module_names) - {"engine"})

found = {}
for module in sys.argv[1:]:
    read, write = os.pipe()
    if os.fork() == 0:
        with open(write, "w") as pipe:
            json.dump(imported_by(module), pipe)
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        found[module] = json.load(pipe)
    os.wait()
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def imports_of_others() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(run_python(ALONE, *PURE))
    return found


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_imports_the_standard_library_only(imports_of_others: dict[str, list[str]], module: str) -> None:
    assert imports_of_others[module] == []


def test_the_serving_path_and_the_build_seam_load_no_torch() -> None:
    code = f"""
import sys
import tomllib
import serve_app.app, serve_app.api.ingress, engine.build.engine
print(sorted(set({HEAVY}) & set(sys.modules) & {{"torch", "transformers", "kernels"}}))
"""
    assert run_python(code) == "[]"


def test_building_the_application_and_an_engine_replica_import_no_http_api() -> None:
    """A start waits for both, one after the other,
    and the API takes longer to import than everything else of the project."""
    code = """
import sys
import serve_app.app
slow = {"serve_app.api.ingress", "serve_app.api.openapi.document"}
print("serve_app.replicas.deployment" in sys.modules, slow & set(sys.modules))
"""
    assert run_python(code) == "True set()"


def test_engine_and_kernels_run_without_ray_or_starlette_installed() -> None:
    """Offline use installs neither; their import is made to fail as if they were absent."""
    code = """
import asyncio, sys
for absent in ("ray", "starlette", "pydantic", "fastapi"):
    sys.modules[absent] = None
import engine.execution.executor, engine.checkpoints.prepare, kernels.eager.ops, kernels.reference
from engine.build.engine import build_engine
from engine.config import EngineConfig
from engine.protocol import SamplingParams

async def main():
    engine = build_engine("any", EngineConfig(executor="fake"))
    events = [event async for event in engine.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))]
    engine.shutdown()
    return len(events)

print(asyncio.run(main()))
"""
    assert run_python(code) == "6"


def test_the_kernels_package_is_a_docstring_and_nothing_else() -> None:
    """transformers probes for a package named `kernels` and reads its attributes; with more in ours it broke."""
    body = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert [type(node) for node in body] == [ast.Expr]
    assert isinstance(body[0].value, ast.Constant)


def test_transformers_does_not_take_our_kernels_package_for_hugging_faces() -> None:
    code = """
import kernels
from transformers.utils.import_utils import is_kernels_available
print(is_kernels_available(), hasattr(kernels, "__version__"))
"""
    assert run_python(code) == "False False"


def test_the_serve_command_of_this_environment_is_the_one_that_drains() -> None:
    """Ray installs a `serve` of its own, which cuts running streams on SIGTERM; ours must be installed after it."""
    script = Path(sys.executable).with_name("serve")
    assert "serve_app.front.cli" in script.read_text()


def test_every_module_says_what_it_owns_and_what_it_never_does() -> None:
    for path in sorted(p for package in PRODUCT for p in (ROOT / package).rglob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert len(doc.splitlines()) >= (1 if path.name == "__init__.py" else 2), path.relative_to(ROOT)


def test_no_docstring_begins_with_of() -> None:
    """It would be the end of a sentence whose beginning is the name. The string behind an attribute counts, too."""
    found = []
    for folder in (*PRODUCT, "loadtest", "k8s", "benchmarks", "docsite", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                value = node.value if isinstance(node, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.startswith("Of "):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


_STACK = ("What decides: each package imports those below it", "What computes: each package imports those below it")


def test_every_module_of_the_engine_has_its_place_in_a_contract() -> None:
    """A new one would otherwise import what it likes."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    decides, computes = (contract["layers"] for contract in contracts if contract["name"].endswith(_STACK))
    placed = {name.strip() for layer in (*decides, *computes) for name in layer.split("|")}
    apart = {
        "engine.fake": "Nothing but the build seam knows the fake executor",
        "engine.prepare": "the command of an older release, which only runs engine.checkpoints.prepare",
    }
    folder = ROOT / "engine"
    found = {f"engine.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__"}
    found |= {f"engine.{path.parent.name}" for path in folder.glob("*/__init__.py")}
    assert found == placed | set(apart)


def test_every_package_of_ours_is_installed() -> None:
    """An editable install finds them all; one from a wheel has only those that are listed."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = [
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for top in INSTALLED
        for path in (ROOT / top).rglob("__init__.py")
    ]
    assert sorted(listed) == sorted(found)
