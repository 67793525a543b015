"""Owns the programs that finish a task against the scripted model: their commands, and the script the model follows for
each.
Never says how a user sets one up: docs/how-to/agents.md does, and programs run here with the settings it shows."""

from __future__ import annotations

from functools import partial

from tests.clients.libraries import AI_SDK, LIBRARIES
from tests.clients.parts import (
    AIDER_TEST,
    BEFORE,
    FILE,
    NOW,
    TASK,
    THANKS,
    aider,
    aider_architect,
    aider_diff,
    aider_udiff,
    claude_code,
    claude_code_form,
    claude_code_team,
    claude_code_turns,
    codex,
    codex_patching,
    codex_repairing,
    codex_turns,
    opencode,
    opencode_turns,
)
from tests.clients.props import describe_to_codex, describe_to_codex_and_draw, draw, speak_by
from tests.clients.running import Program

AIDER_OPTIONS = "--yes-always --no-git --no-pretty --no-check-update --analytics-disable --map-tokens 0 --auto-test"

FORM = '{{"type": "object", "properties": {{"text": {{"type": "string"}}}}, "required": ["text"]}}'
"""A JSON schema, with its braces doubled as commands here need them."""

CODEX = ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")

CATALOG = ("-c", "model_catalog_json={home}/.codex/models.json")

QUIET_OPENCODE = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}

PROGRAMS = {
    "claude-code": Program(
        command=("claude", "-p", TASK, "--allowedTools", "Read,Edit,Bash"),
        part=claude_code,
        section="Claude Code",
        package="@anthropic-ai/claude-code",
        environment={"DISABLE_AUTOUPDATER": "1"},
    ),
    "claude-code-turns": Program(
        command=("claude", "-p", TASK, "--allowedTools", "Read,Edit,Bash", "--effort", "low"),
        then=tuple(("claude", "--continue", "-p", said) for said in (THANKS, "/compact", NOW)),
        part=claude_code_turns,
        section="Claude Code",
        environment={"DISABLE_AUTOUPDATER": "1"},
        grows=False,
    ),
    "claude-code-team": Program(
        command=("claude", "-p", TASK, "--dangerously-skip-permissions", "--mcp-config", "{home}/mcp.json"),
        part=claude_code_team,
        section="Claude Code",
        environment={"DISABLE_AUTOUPDATER": "1", "IS_SANDBOX": "1"},
        prepare=draw,
        grows=False,
    ),
    "claude-code-form": Program(
        command=(
            "claude",
            "-p",
            TASK,
            "--output-format",
            "json",
            "--json-schema",
            FORM,
            "--append-system-prompt",
            THANKS,
        ),
        part=claude_code_form,
        section="Claude Code",
        environment={"DISABLE_AUTOUPDATER": "1"},
        leaves=BEFORE,
        grows=False,
    ),
    "codex-turns": Program(
        command=(*CODEX, "-c", "model_reasoning_effort=high", "-c", "web_search=live", TASK),
        then=(
            (*CODEX, "resume", "--last", THANKS),
            (*CODEX, "-c", "model_auto_compact_token_limit=100", "resume", "--last", NOW),
        ),
        part=codex_turns,
        section="Codex",
        prepare=draw,
        grows=False,
    ),
    "codex-repairing": Program(
        command=(
            *CODEX,
            "-c",
            "model_catalog_json={home}/.codex/models.json",
            "-i",
            "{project}/picture.png",
            "--",
            TASK,
        ),
        part=codex_repairing,
        section="Codex",
        prepare=describe_to_codex_and_draw,
        grows=False,
    ),
    "opencode-turns": Program(
        command=("opencode", "run", TASK),
        then=(("opencode", "run", "--continue", THANKS),),
        part=opencode_turns,
        section="opencode",
        environment=QUIET_OPENCODE,
        grows=False,
    ),
    **{
        f"aider-{form}": Program(
            command=("aider", *AIDER_OPTIONS.split(), "--test-cmd", AIDER_TEST, *options, "--message", TASK, FILE),
            part=part,
            section="aider",
        )
        for form, options, part in (
            ("diff", ("--edit-format", "diff"), aider_diff),
            ("udiff", ("--edit-format", "udiff"), aider_udiff),
            ("architect", ("--architect",), aider_architect),
        )
    },
    "codex": Program(
        command=(*CODEX, TASK),
        part=codex,
        section="Codex",
        package="@openai/codex",
    ),
    "codex-patching": Program(
        command=(*CODEX, *CATALOG, TASK),
        part=codex_patching,
        section="Codex",
        prepare=describe_to_codex,
    ),
    "opencode": Program(
        command=("opencode", "run", TASK),
        part=opencode,
        section="opencode",
        package="opencode-ai",
        environment=QUIET_OPENCODE,
    ),
    **{
        f"opencode-{npm}": Program(
            command=("opencode", "run", TASK),
            part=opencode,
            section="opencode",
            environment=QUIET_OPENCODE,
            prepare=partial(speak_by, npm),
        )
        for npm in ("anthropic", "openai")
    },
    "aider": Program(
        command=("aider", *AIDER_OPTIONS.split(), "--test-cmd", AIDER_TEST, "--message", TASK, FILE),
        part=aider,
        section="aider",
        package="aider-chat",
    ),
}

NEEDS_NODE = {name for name in (*PROGRAMS, *AI_SDK) if not name.startswith("aider")}
ALL = PROGRAMS | AI_SDK | LIBRARIES
