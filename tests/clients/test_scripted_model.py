"""Owns the proof that the scripted model continues only from what the prompt shows. Never starts a server."""

from __future__ import annotations

from typing import Any

from serve_app.api.text.chat_template import ChatTemplate
from tests.clients.scripted_model import ASIDE, IMAGE, TEMPLATE, THOUGHT, Call, Scenes, ToolCalls

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("read", "run")]
PART = ToolCalls([Call("read", {"path": "a"}, shows="hello"), Call("run", {}, shows="HELLO")], "Done.", thinks=True)


def prompt(*turns: dict[str, Any], tools: Any = TOOLS) -> str:
    return ChatTemplate(TEMPLATE, {}).render(
        [{"role": "user", "content": "Do it."}, *turns], tools=tools, add_generation_prompt=True
    )


def called(name: str, result: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    turn = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]}
    return [turn, {"role": "tool", "content": result}]


def test_each_step_follows_the_result_of_the_one_before() -> None:
    first = PART.answer(prompt())
    assert first.startswith(THOUGHT)
    assert first.endswith('<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>')
    assert '"name": "run"' in PART.answer(prompt(*called("read", "hello")))
    done = prompt(*called("read", "hello"), *called("run", "HELLO"))
    assert PART.answer(done).endswith("</think>\n\nDone.")


def test_a_result_that_got_lost_ends_the_task() -> None:
    assert "does not show 'hello'" in PART.answer(prompt(*called("read", "")))


def test_a_prompt_without_tools_is_no_step_of_the_task() -> None:
    assert PART.answer(prompt(tools=None)) == ASIDE


def test_a_tool_that_is_not_offered_is_not_called() -> None:
    assert PART.answer(prompt(tools=TOOLS[1:])) == ASIDE


def test_calls_of_one_step_are_made_in_one_turn_and_each_result_is_looked_at() -> None:
    both = ToolCalls([(Call("read", {"path": "a"}, shows="hello"), Call("read", {"path": "b"}, shows="bye"))], "Done.")
    assert both.answer(prompt()).count("<tool_call>") == 2
    first, second = called("read", "hello"), called("read", "bye")
    assert both.answer(prompt(*first, second[1])) == "Done."
    assert "does not show 'bye'" in both.answer(prompt(*first, first[1]))


def test_a_later_request_begins_a_scene_of_its_own() -> None:
    read = ToolCalls([Call("read", {"path": "a"}, shows="hello")], "Read.")
    part = Scenes([("Do it.", read), ("Again, please.", read)])
    done = called("read", "hello")
    assert part.answer(prompt(*done)) == "Read."
    again = [*done, {"role": "assistant", "content": "Read."}, {"role": "user", "content": "Again, please."}]
    assert "<tool_call>" in part.answer(prompt(*again))
    assert part.answer(prompt(*again, *done)) == "Read."


def test_an_image_is_one_mark_in_its_place() -> None:
    content = [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": "!"}]
    assert f"Look: {IMAGE}!<|im_end|>" in prompt({"role": "user", "content": content})


def test_the_template_writes_what_the_model_wrote() -> None:
    (turn, result) = called("read", "hello")
    written = prompt(turn, result).removeprefix(prompt())
    assert written.startswith('<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>')
    late = prompt(turn, result, {"role": "user", "content": "And now?"})
    assert "Hm." not in late
