"""Owns the proof of what a recorded request keeps and loses. Never runs a client."""

from __future__ import annotations

from tests.clients.scrub import ANY_TEXT, MOST_CHARS, Scrubber


def scrubbed(value: object) -> object:
    return Scrubber({"/tmp/x/project": "/project", "/tmp/x": "/somewhere"}).value(value)


def test_structure_names_and_short_values_stay() -> None:
    body = {
        "model": "qwen3-8b",
        "stream": True,
        "max_tokens": 32000,
        "tools": [{"name": "Read", "input_schema": {"properties": {"n": {"type": "integer", "enum": [1, None]}}}}],
    }
    assert scrubbed(body) == body


def test_texts_of_others_are_cut_and_keep_their_tag() -> None:
    assert scrubbed("w" * MOST_CHARS) == "w" * MOST_CHARS
    assert "w" not in str(scrubbed("w" * (MOST_CHARS + 1))).replace("was", "")
    told = str(scrubbed("<system-reminder>" + "w" * MOST_CHARS + "</system-reminder>"))
    assert told.startswith("<system-reminder>")
    assert told.endswith("</system-reminder>")
    assert scrubbed({"description": "Their words.", "definition": "start: theirs"}) == {
        "description": "A description.",
        "definition": ANY_TEXT,
    }
    assert scrubbed({"properties": {"description": {"type": "string"}}}) == {
        "properties": {"description": {"type": "string"}}
    }


def test_places_dates_and_people_are_taken_out() -> None:
    text = "in /tmp/x/project and /tmp/x/home at 2026-11-23T12:00:00Z, 1795439952794, by ann@firm.org"
    assert scrubbed(text) == "in /project and /somewhere/home at 2026-01-01, 1700000000000, by somebody@example.com"


def test_equal_ids_stay_equal_and_others_differ() -> None:
    call, other = "call_0123456789abcdef01234567", "call_1123456789abcdef01234567"
    first, second, third = scrubbed([{"id": call}, {"call_id": call}, {"id": other}])  # type: ignore[misc]
    assert first["id"] == second["call_id"] != third["id"]
    assert call not in str((first, second, third))
    uuid = "01a2088f-8387-7ca3-81cc-e0e1f5350ac1"
    told = scrubbed({"a": f"session {uuid}", "b": uuid})
    assert uuid not in str(told)
    assert told["a"] == f"session {told['b']}"  # type: ignore[index]
