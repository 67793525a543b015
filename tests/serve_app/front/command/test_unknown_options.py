"""An option that `chunkserve serve` does not have is refused in a line that says where it is set.
Never serves anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from serve_app.front.command.serve import main
from serve_app.front.command.serve_options import serve_parser

MODEL = "smollm2-135m-instruct"
PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "from-vllm-or-sglang.md"
ROWS = re.findall(r"^\|([^|]*)\|([^|]*)\|([^|]*)\|$", PAGE.read_text(), re.MULTILINE)
OPTIONS = [
    (option, re.findall(r"`([a-z_.]+)", ours))
    for theirs, others, ours in ROWS
    for option in re.findall(r"--[a-z][a-z-]+", theirs + others)
    if option not in serve_parser("").option_strings()
]
"""Options of other servers that this one does not have, each with the settings that the page names for it."""
SETTING = "; in a config it is args."


def answer_to(option: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="2"):
        main([MODEL, *option.split()], "chunkserve serve")
    (answer,) = re.findall(rf"unrecognized arguments: {re.escape(option)}(.*) \(`", capsys.readouterr().err)
    return str(answer)


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--max-num-seq 4", "; did you mean --max-num-seqs?"),
        ("--h", "; did you mean -h?"),
        ("--tensor-parallel-size 2", "; in a config it is args.engine.tensor_parallel_size"),
        ("--drain-timeout=3", "; in a config it is args.drain_timeout_s"),
        ("--tpot=75", "; in a config it is args.engine.targets.tpot_ms"),
        ("--long-prefill-token-threshold 4", "; in a config it is args.engine.scheduler.long_prefill_token_threshold"),
        ("--data-parallel-size 2", ""),
        ("--pipeline-parallel-size 2", ""),
        ("--ssl-keyfile k", ""),
        ("--max-logprobs 5", ""),
        ("--tensor-parallel 2", ""),
        ("--max-tokens 5", ""),
        ("--priority 1", ""),
        ("--tenant ann", ""),
        ("--no-such-option", ""),
        ("more", ""),
    ],
)
def test_an_option_that_there_is_not_is_answered_by_the_option_or_the_setting_of_its_name(
    option: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: whoever came with another server's options was told that they are unrecognized, and no more; and then
    of settings with similar names, of which `tensor_parallel_size` is not `--data-parallel-size`."""
    assert answer_to(option, capsys) == answer


@pytest.mark.parametrize(("option", "settings"), OPTIONS, ids=str)
def test_no_answer_contradicts_the_page_of_other_servers_options(
    option: str, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = answer_to(f"{option} 1", capsys)
    assert not answer.startswith(SETTING) or answer.removeprefix(SETTING) in settings
