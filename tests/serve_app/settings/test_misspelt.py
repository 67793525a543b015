"""A setting that there is not is answered by the one that was meant, and by where that stands if it is elsewhere."""

from __future__ import annotations

import pytest

from serve_app.settings.misspelt import meant


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        (("modle",), "model"),
        (("engine", "max_seqs"), "max_num_seqs"),
        (("max_model_len",), "args.engine.max_model_len"),
        (("tensor_parallel_size",), "args.engine.tensor_parallel_size"),
        (("targets",), "args.engine.targets"),
        (("engine", "tool_parser"), "args.tool_parser"),
        (("engine", "tpot_ms"), "args.engine.targets.tpot_ms"),
        (("engine", "targets", "tpot"), "tpot_ms"),
        (("drain_timeout",), "drain_timeout_s"),
        (("num_replicas",), "engine_replicas"),
        (("engine", "kv_cache_gb"), "kv_cache_memory_gib"),
        (("auth", "keys", 0, "tenent"), "tenant"),
        (("tenant",), None),
        (("models", 1, "max_num_seqs"), "args.models.1.engine.max_num_seqs"),
        (("models", 1, "engine", "dtyp"), "dtype"),
        (("engine", "kv_tiers", "disk"), None),
        (("engine", "ngram_max"), None),
    ],
    ids=str,
)
def test_it_is_named_where_it_stands(setting: tuple[str | int, ...], found: str | None) -> None:
    """Regression: `max_model_len` beside `engine` was answered by `did you mean max_model_len?`."""
    assert meant(setting) == found
