"""An option that `chunkserve serve` does not have is refused in a line that says where it is set.
Never serves anything."""

from __future__ import annotations

import pytest

from serve_app.front.command.serve import main

MODEL = "smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--max-num-seq 4", "; did you mean --max-num-seqs?"),
        ("--tensor-parallel-size 2", "; in a config it is args.engine.tensor_parallel_size"),
        ("--drain-timeout=3", "; in a config it is args.drain_timeout_s"),
        ("--no-such-option", ""),
        ("more", ""),
    ],
)
def test_an_option_that_there_is_not_is_answered_by_the_option_or_the_setting_that_was_meant(
    option: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: whoever came with another server's options was told that they are unrecognized, and no more."""
    with pytest.raises(SystemExit, match="2"):
        main([MODEL, *option.split()], "chunkserve serve")
    assert f"unrecognized arguments: {option}{answer} (`chunkserve serve --help`" in capsys.readouterr().err
