"""Owns a stand-in for a rank's follower: it says where it runs, and then waits for the word that ends it.
Never computes anything. Both go through named pipes, so that nobody has to look again and again."""

from __future__ import annotations

import json
import os

import ray


def follow(spec: bytes) -> None:
    """`spec`: the paths of the pipes, `{"up": ..., "down": ...}`. The word `fail` is an error of the rank's own."""
    pipes = json.loads(spec)
    here = ray.get_runtime_context()
    with open(pipes["up"], "w", encoding="utf-8") as up:
        json.dump({"pid": os.getpid(), "node": here.get_node_id(), "gpus": here.get_accelerator_ids()}, up)
    with open(pipes["down"], encoding="utf-8") as down:
        word = down.read()
    if word == "fail":
        raise RuntimeError("out of memory, says the stand-in")
