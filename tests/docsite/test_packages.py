"""Owns the proof that packages are layered: no circle, few rooms, and pictures that are true.
Never says which package may import which: the import contracts do."""

from __future__ import annotations

from graphlib import TopologicalSorter

import pytest

from docsite.packages import (
    API,
    ENGINE,
    KERNELS,
    ROOT,
    SERVING,
    TREES,
    TRITON,
    Tree,
    drawn,
    group_of,
    imported,
    imports,
    levels,
)

MOST_ROOMS = 23


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.package)
def test_no_arrow_leads_up(tree: Tree) -> None:
    graph = imports(tree)
    height = {group: level for level, row in enumerate(levels(graph)) for group in row}
    assert all(height[group] < height[other] for group, others in graph.items() for other in others)


def test_packages_that_import_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"in a circle: \['a', 'b'\]"):
        levels({"a": frozenset("b"), "b": frozenset("a"), "c": frozenset()})


def test_an_arrow_is_left_out_where_a_way_leads_through_others() -> None:
    graph = {"top": frozenset({"middle", "low"}), "middle": frozenset({"low"}), "low": frozenset()}
    assert drawn(graph) == [("middle", "low"), ("top", "middle")]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.package)
def test_there_are_few_groups_and_each_file_is_in_one(tree: Tree) -> None:
    graph = imports(tree)
    assert len(graph) <= MOST_ROOMS
    groups = set()
    for path in tree.folder.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if path.name != "__init__.py" and module not in tree.left_out:
            groups.add(group_of(tree, module))
    assert groups == graph.keys()


def test_a_package_inside_another_is_drawn_where_its_own_picture_is() -> None:
    assert group_of(SERVING, "serve_app.api.openai.responses.form") == "api"
    assert group_of(API, "serve_app.api.openai.responses.form") == "openai.responses"
    assert group_of(ENGINE, "engine.models.families.llama") == "models"
    assert group_of(KERNELS, "kernels.triton.sampling.scan") == "triton"
    assert group_of(TRITON, "kernels.triton.sampling.scan") == "sampling"


@pytest.mark.parametrize("package", ["engine", "kernels", "serve_app", "loadtest", "benchmarks", "docsite"])
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    """Imports inside of functions count, too; they could hide a circle."""
    graph = {}
    for path in (ROOT / package).rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[module] = set(imported(path, package)) - {module}
    assert len(graph) > 1
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules
