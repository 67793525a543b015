"""What the load generator asks the server about itself before and after a load."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadtest.target import Held, Target, first_model, held


@contextmanager
def answering(answer: object, heads: list[str | None] | None = None) -> Iterator[Target]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if heads is not None:
                heads.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Target(f"http://127.0.0.1:{server.server_port}", "", 1.0, {"ann": "k1", "bob": "k2"})
        finally:
            server.shutdown()
            thread.join()


def load(running: int, waiting: int, blocks: int, live: int) -> dict[str, object]:
    engine = {"num_running": running, "num_waiting": waiting, "num_held_blocks": blocks}
    return {"engines": [engine, engine], "ingress": {"num_live": live}}


def test_the_first_model_is_asked_for_with_the_first_key() -> None:
    heads: list[str | None] = []
    with answering({"data": [{"id": "a"}, {"id": "b"}]}, heads) as target:
        assert first_model(target) == "a"
    assert heads == ["Bearer k1"]


def test_what_a_server_holds_is_that_of_all_engines_or_of_the_ingress_whichever_is_more() -> None:
    with answering(load(2, 1, 5, 4)) as target:
        assert held(target) == Held(6, 10)
    with answering(load(0, 0, 0, 4)) as target:
        assert held(target) == Held(4, 0)


def test_a_model_that_does_not_say_what_it_holds_is_an_error() -> None:
    models = {"one": load(0, 0, 0, 0), "two": load(0, 0, 0, 0) | {"error": {"message": "The engine is not running."}}}
    why = pytest.raises(OSError, match=r"/load does not say what two holds: The engine is not running\.")
    with answering(load(0, 0, 0, 0) | {"models": models}) as target, why:
        held(target)


@pytest.mark.parametrize("answer", [{}, [], {"engines": [{}], "ingress": {"num_live": 0}}, None])
def test_an_answer_that_does_not_say_it_is_an_error(answer: object) -> None:
    with answering(answer) as target:
        with pytest.raises(OSError, match="does not say"):
            held(target)
        with pytest.raises(OSError, match="names no model"):
            first_model(target)


def test_what_is_left_over_is_reported_and_what_was_there_before_is_not() -> None:
    assert Held(1, 5).left_over(Held(1, 5)) is None
    assert Held(0, 3).left_over(Held(1, 5)) is None
    left = Held(2, 5).left_over(Held(1, 5))
    assert left is not None
    assert "2 requests and 5 blocks" in left
    assert Held(1, 6).left_over(Held(1, 5)) is not None


def test_a_tenants_key_is_its_own_and_a_request_of_none_has_the_first() -> None:
    target = Target("http://x", "m", 1.0, {"ann": "k1", "bob": "k2"})
    assert (target.key_of("bob"), target.key_of(None)) == ("k2", "k1")
    assert Target("http://x", "m", 1.0, {}).key_of(None) is None
