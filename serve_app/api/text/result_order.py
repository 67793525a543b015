"""Owns the order in which a prompt shows the results of calls that were made at once: that of the calls.
Never looks at what a result says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from serve_app.api.text.template_form import Message

TOOL = "tool"


def with_results_in_order(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with each run of results in the order of the calls before it.

    Agents send results as tools end, and say by an id which is which. Most templates show no ids, so that a model
    takes the first result for that of its first call. Results whose ids name no call stay where they are.
    """
    if sum(message["role"] == TOOL for message in messages) < 2:
        return messages
    told: list[Message] = []
    for role, run in groupby(messages, key=lambda message: message["role"]):
        turns = list(run)
        if role == TOOL and told:
            turns = _sorted(turns, _ids_of(told[-1]))
        told += turns
    return told


def _ids_of(message: Message) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or ()]


def _sorted(results: list[Message], ids: list[Any]) -> list[Message]:
    places = {call_id: place for place, call_id in enumerate(ids) if call_id is not None}
    asked = [result.get("tool_call_id") for result in results]
    if len(places) < len(ids) or not places.keys() >= set(asked):
        return results
    return sorted(results, key=lambda result: places[result.get("tool_call_id")])
