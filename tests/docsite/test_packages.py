"""Owns the proof that the engine's packages lie over one another: no circle, few rooms, and a picture that is true.
Never says which package may import which: the import contracts do."""

from __future__ import annotations

import pytest

from docsite.packages import ENGINE, drawn, imports, levels, room_of

MOST_ROOMS = 20


def test_no_arrow_leads_up() -> None:
    graph = imports()
    height = {room: level for level, row in enumerate(levels(graph)) for room in row}
    assert all(height[room] < height[other] for room, others in graph.items() for other in others)


def test_packages_that_import_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"in a circle: \['a', 'b'\]"):
        levels({"a": frozenset("b"), "b": frozenset("a"), "c": frozenset()})


def test_an_arrow_is_left_out_where_a_way_leads_through_others() -> None:
    graph = {"top": frozenset({"middle", "low"}), "middle": frozenset({"low"}), "low": frozenset()}
    assert drawn(graph) == [("middle", "low"), ("top", "middle")]


def test_there_are_few_rooms_and_each_file_is_in_one() -> None:
    graph = imports()
    assert len(graph) <= MOST_ROOMS
    modules = (path for path in ENGINE.rglob("*.py") if path.name != "__init__.py" and path != ENGINE / "prepare.py")
    rooms = {room_of(".".join(path.relative_to(ENGINE.parent).with_suffix("").parts)) for path in modules}
    assert rooms == graph.keys()
