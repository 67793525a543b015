"""Owns the script that the model follows in each program's task: which of the program's tools it calls, and what their
results must show.
Never says how a program is started; programs.py does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.clients.scripted_model import IMAGE, Call, Part, Scenes, Texts, ToolCalls

FILE, BEFORE, AFTER = "greeting.txt", "hello\n", "goodbye\n"
COMMAND = f"tr a-z A-Z < {FILE}"
SHOUTED = "GOODBYE"
"""A text that only the command's output has: it is in the model's last answer only if the output reached the model."""
FINAL = f"The greeting now reads {SHOUTED} when shouted."
THANKS = "Thank you. Say it once more, please."
TASK = f"Read {FILE}, make it say goodbye instead of hello, then shout it by a command."


def claude_code(project: Path) -> ToolCalls:
    path = str(project / FILE)
    edit = {"file_path": path, "old_string": "hello", "new_string": "goodbye"}
    return ToolCalls(
        [
            Call("Read", {"file_path": path}, shows="hello"),
            Call("Edit", edit, shows="updated"),
            Call("Bash", {"command": COMMAND, "description": "Shout the greeting"}, shows=SHOUTED),
        ],
        FINAL,
        thinks=True,
    )


PATCH = f"*** Begin Patch\n*** Update File: {FILE}\n@@\n-hello\n+goodbye\n*** End Patch\n"


def codex(project: Path) -> ToolCalls:
    """A model that Codex does not know edits by the shell tool."""
    return ToolCalls(
        [
            Call("exec_command", {"cmd": f"cat {FILE}"}, shows="hello"),
            Call("exec_command", {"cmd": f"apply_patch <<'EOF'\n{PATCH}EOF\n"}, shows="Success"),
            Call("exec_command", {"cmd": COMMAND}, shows=SHOUTED),
        ],
        FINAL,
        thinks=True,
    )


def codex_patching(project: Path) -> Part:
    """A model that Codex takes for one of its own edits by a patch tool without JSON."""
    return ToolCalls(
        [
            Call("exec_command", {"cmd": f"cat {FILE}"}, shows="hello"),
            Call("apply_patch", {"input": PATCH}, shows="Success"),
            Call("exec_command", {"cmd": COMMAND}, shows=SHOUTED),
        ],
        FINAL,
        thinks=True,
    )


def opencode(project: Path) -> Part:
    path = str(project / FILE)
    return ToolCalls(
        [
            Call("read", {"filePath": path}, shows="hello"),
            Call("edit", {"filePath": path, "oldString": "hello", "newString": "goodbye"}),
            Call("bash", {"command": COMMAND, "description": "Shout the greeting"}, shows=SHOUTED),
        ],
        FINAL,
        thinks=True,
    )


PICTURE_FILE = "picture.png"
SUBTASK = "Look whether the file is there, and say what you found."
NOW = "What does the greeting say now?"
SUMMARY = "<summary>\nThe greeting was changed.\n</summary>"


def _thanked(first: ToolCalls) -> list[tuple[str, Part]]:
    return [(TASK, replace(first, thinks=False)), (THANKS, Texts([("", FINAL)]))]


def claude_code_turns(project: Path) -> Part:
    """The conversation is continued, summed up, and continued again."""
    summed_up = ("create a detailed summary of the conversation", Texts([("", SUMMARY)]))
    return Scenes([*_thanked(claude_code(project)), summed_up, (NOW, Texts([("", FINAL)]))])


LOOK = {"description": "Look", "prompt": SUBTASK}


def claude_code_team(project: Path) -> Part:
    """The task needs another agent, two calls at once, a picture, and a tool reached by MCP, whose schema Claude Code
    only sends once the model has searched for it."""
    path = str(project / FILE)
    steps = [
        Call("Agent", {**LOOK, "subagent_type": "general-purpose", "run_in_background": False}, shows=FINAL),
        (
            Call("Read", {"file_path": path}, shows="hello"),
            Call("Read", {"file_path": str(project / PICTURE_FILE)}),
        ),
        Call("Write", {"file_path": path, "content": AFTER}, shows="updated"),
        Call("ToolSearch", {"query": "select:mcp__shouter__shout", "max_results": 1}, shows="mcp__shouter__shout"),
        Call("mcp__shouter__shout", {"text": AFTER}, shows=SHOUTED),
    ]
    looks = ToolCalls([Call("Bash", {"command": "ls", "description": "List files"}, shows=FILE)], FINAL)
    return Scenes([(SUBTASK, looks), (TASK, ToolCalls(steps, FINAL))])


def claude_code_form(project: Path) -> Part:
    return ToolCalls([Call("StructuredOutput", {"text": FINAL})], FINAL)


def codex_turns(project: Path) -> Part:
    """A tool is reached by MCP. The conversation is continued, summed up, and continued again."""
    edits = codex(project).steps[:2]
    shouts = Call("mcp__shouter__shout", {"text": AFTER}, shows=SHOUTED)
    summed_up = ("CONTEXT CHECKPOINT COMPACTION", Texts([("", SUMMARY)]))
    return Scenes([*_thanked(ToolCalls([*edits, shouts], FINAL)), summed_up, (NOW, Texts([("", FINAL)]))])


def codex_repairing(project: Path) -> Part:
    """The model looks at a picture, and its first patch does not fit the file."""
    wrong = PATCH.replace("-hello", "-good morning")
    steps = [
        Call("view_image", {"path": PICTURE_FILE}),
        Call("exec_command", {"cmd": f"cat {FILE}"}, shows="hello"),
        Call("apply_patch", {"input": wrong}, shows="Failed to find expected lines"),
        Call("apply_patch", {"input": PATCH}, shows="Success"),
        Call("exec_command", {"cmd": COMMAND}, shows=SHOUTED),
    ]
    return ToolCalls(steps, FINAL)


def opencode_turns(project: Path) -> Part:
    """The task needs a to-do list, another agent, two calls at once and a picture; then the conversation is
    continued."""
    path = str(project / FILE)
    todo = {"content": "Say goodbye", "status": "in_progress", "priority": "high", "id": "1"}
    steps = [
        Call("todowrite", {"todos": [todo]}),
        Call("task", {"description": "Look", "prompt": SUBTASK, "subagent_type": "general"}, shows=FINAL),
        (
            Call("read", {"filePath": path}, shows="hello"),
            Call("bash", {"command": "ls", "description": "List files"}, shows=FILE),
        ),
        Call("write", {"filePath": path, "content": AFTER}),
        Call("bash", {"command": COMMAND, "description": "Shout the greeting"}, shows=SHOUTED),
    ]
    looks = ToolCalls([Call("bash", {"command": "ls", "description": "List files"}, shows=FILE)], FINAL)
    thanked = _thanked(ToolCalls(steps, FINAL))
    return Scenes([(SUBTASK, looks), *thanked])


NOT_YET = "the greeting is not right yet"
AIDER_TEST = f"grep -q goodbye {FILE} || (echo {NOT_YET} | tr a-z A-Z; exit 1)"


def aider(project: Path) -> Part:
    """Edits are text. The command is the user's test, and the model is told of its failure."""

    def edited(says: str, text: str) -> str:
        return f"{says}\n\n{FILE}\n```\n{text}\n```\n"

    return Texts([("", edited("I change it.", "goodby")), (NOT_YET.upper(), edited(FINAL, "goodbye"))])


def aider_diff(project: Path) -> Part:
    def edited(says: str, before: str, after: str) -> str:
        block = f"<<<<<<< SEARCH\n{before}\n=======\n{after}\n>>>>>>> REPLACE"
        return f"{says}\n\n{FILE}\n```\n{block}\n```\n"

    wrong = edited("I change it.", "good morning", "goodbye")
    right = edited("I change it.", "hello", "goodby")
    last = edited(FINAL, "goodby", "goodbye")
    return Texts([("", wrong), ("failed to match", right), (NOT_YET.upper(), last)])


def aider_udiff(project: Path) -> Part:
    patch = f"--- {FILE}\n+++ {FILE}\n@@ ... @@\n-hello\n+goodbye\n"
    return Texts([("", f"{FINAL}\n\n```diff\n{patch}```\n")])


def aider_architect(project: Path) -> Part:
    """One turn says what to do, and another does it."""
    edited = f"{FINAL}\n\n{FILE}\n```\n{AFTER}```\n"
    return Texts([("", "Have the greeting say goodbye."), ("Have the greeting say goodbye.", edited)])


def by_functions(project: Path) -> Part:
    """Use the three tools of tasks.py and ai_sdk.mjs."""
    return ToolCalls(
        [
            Call("read_file", {"path": FILE}, shows="hello"),
            Call("replace_in_file", {"path": FILE, "old": "hello", "new": "goodbye"}, shows="Replaced"),
            Call("run_command", {"command": COMMAND}, shows=SHOUTED),
        ],
        FINAL,
        thinks=True,
    )


def by_forced_function(project: Path) -> Part:
    """Each call is of one function that is forced, so that the model has no room for thoughts."""

    def action(tool: str, **arguments: str) -> dict[str, object]:
        return {"tool": tool, "arguments": arguments}

    return ToolCalls(
        [
            Call("Action", action("read_file", path=FILE), shows="hello"),
            Call("Action", action("replace_in_file", path=FILE, old="hello", new="goodbye"), shows="Replaced"),
            Call("Action", action("run_command", command=COMMAND), shows=SHOUTED),
            Call("Action", action("answer", text=FINAL)),
        ],
        FINAL,
    )


def by_tools_in_text(project: Path) -> Part:
    """smolagents reports results as text, and has a tool of its own that ends the task."""
    read = Call("read_file", {"path": FILE})
    change = Call("replace_in_file", {"path": FILE, "old": "hello", "new": "goodbye"})
    run = Call("run_command", {"command": COMMAND})
    final = Call("final_answer", {"answer": FINAL})
    signs = ("", "Observation:\nhello", "Replaced in", SHOUTED)
    calls = (read, change, run, final)
    return Texts([(sign, call.text()) for sign, call in zip(signs, calls, strict=True)])


def by_code(project: Path) -> Part:
    def block(code: str) -> str:
        return f"Thought: the next step.\n<code>\n{code}\n</code>"

    return Texts(
        [
            ("", block(f'print(read_file("{FILE}"))')),
            ("Execution logs:\nhello", block(f'print(replace_in_file("{FILE}", "hello", "goodbye"))')),
            ("Replaced in", block(f'print(run_command("{COMMAND}"))')),
            (SHOUTED, block(f"final_answer({json.dumps(FINAL)})")),
        ]
    )


def by_functions_at_once(project: Path) -> Part:
    """Make two calls in the first turn."""
    look = (Call("read_file", {"path": FILE}, shows="hello"), Call("run_command", {"command": "ls"}, shows=FILE))
    change = Call("replace_in_file", {"path": FILE, "old": "hello", "new": "goodbye"}, shows="Replaced")
    return ToolCalls([look, change, Call("run_command", {"command": COMMAND}, shows=SHOUTED)], FINAL, thinks=True)


def _functions(*before: Call) -> ToolCalls:
    """Call without thoughts, because a later request of the user leaves those out of the prompt."""
    read = Call("read_file", {"path": FILE}, shows="hello")
    change = Call("replace_in_file", {"path": FILE, "old": "hello", "new": "goodbye"}, shows="Replaced")
    return ToolCalls([*before, read, change, Call("run_command", {"command": COMMAND}, shows=SHOUTED)], FINAL)


def by_functions_without_thoughts(project: Path) -> Part:
    return _functions()


REPORT = {"text": FINAL, "mood": "calm", "words": ["goodbye"], "note": {"line": 1, "says": SHOUTED}}
"""The fields of a Report of form_tasks.py."""


def by_functions_and_thanks(project: Path) -> Part:
    return Scenes([("Judge this request.", by_report(project)), (TASK, _functions()), (THANKS, Texts([("", FINAL)]))])


def by_functions_asked_again(project: Path) -> Part:
    """The first call is sent back to the model."""
    refused = Call("read_file", {"path": FILE}, shows="ask again")
    return Scenes([(TASK, _functions(refused)), (THANKS, Texts([("", FINAL)]))])


def by_handoff(project: Path) -> Part:
    return _functions(Call("transfer_to_coder", {}))


@dataclass(frozen=True, slots=True)
class Form:
    """Fills a form: as the arguments of a function where one is offered, and as text otherwise."""

    value: Mapping[str, Any]

    def answer(self, prompt: str) -> str:
        tools, mark, _ = prompt.partition("</tools>")
        names = re.findall(r'"name": "([\w-]+)"', tools) if mark else []
        return Call(names[0], self.value).text() if names else json.dumps(self.value)


def by_report(project: Path) -> Part:
    return Form(REPORT)


def by_text(project: Path) -> Part:
    return Texts([("", FINAL)])


def by_sight(project: Path) -> Part:
    return Texts([(IMAGE, FINAL)])


def by_code_in_json(project: Path) -> Part:
    def block(code: str) -> str:
        return json.dumps({"thought": "The next step.", "code": code})

    return Texts(
        [
            ("", block(f'print(read_file("{FILE}"))')),
            ("Execution logs:\nhello", block(f'print(replace_in_file("{FILE}", "hello", "goodbye"))')),
            ("Replaced in", block(f'print(run_command("{COMMAND}"))')),
            (SHOUTED, block(f"final_answer({json.dumps(FINAL)})")),
        ]
    )


def by_reasons_and_actions(project: Path) -> Part:
    def act(tool: str, **arguments: str) -> str:
        return f"Thought: the next step.\nAction: {tool}\nAction Input: {json.dumps(arguments)}"

    return Texts(
        [
            ("", act("read_file", path=FILE)),
            ("Observation: hello", act("replace_in_file", path=FILE, old="hello", new="goodbye")),
            ("Observation: Replaced in", act("run_command", command=COMMAND)),
            (f"Observation: {SHOUTED}", f"Thought: I can answer without using any more tools.\nAnswer: {FINAL}"),
        ]
    )
