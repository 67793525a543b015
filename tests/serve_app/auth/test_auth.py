"""Owns the contract of API keys: who is let in, as which tenant, and that no key is shown or stored anywhere.
Never knows a key that a server knows: servers know digests."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from serve_app.admission.gate import Gate
from serve_app.auth.__main__ import main
from serve_app.auth.keys import Keys, KeysFileError
from serve_app.front.config_file import ConfigRefused, read_config
from serve_app.front.preflight import preflight
from serve_app.settings.application import AppSettings
from serve_app.settings.auth import ApiKey, AuthSettings
from serve_app.settings.limits import GatePolicy, Limits
from tests.serve_app.harness import (
    CHAT,
    MODEL,
    PROMPT,
    TIMEOUT_S,
    Answer,
    Exchange,
    ScriptedClient,
    app_for,
    finished,
    scheduled,
    tokens,
)
from tests.support.conditions import until

pytestmark = pytest.mark.anyio
ANNS, BOBS, NOBODYS = "sk-ann", "sk-bob", "sk-nobody"


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(tenant: str, key: str, **limits: int) -> ApiKey:
    return ApiKey(tenant=tenant, sha256=sha256(key), **limits)


KEYS = Keys([entry("ann", ANNS), entry("bob", BOBS)])


def hello() -> ScriptedClient:
    return ScriptedClient([scheduled()], tokens("hi"), [finished()])


async def ask(app: Any, path: str, key: str | None, body: Any = None, method: str = "POST", **more: str) -> Answer:
    headers = [("content-type", "application/json"), *more.items()]
    headers += [("authorization", key)] if key is not None else []
    return await Exchange(app, method, path, json.dumps(body).encode() if body else b"", headers).finish()


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", f"Bearer {NOBODYS}", f"Basic {ANNS}", ANNS, f"Bearer {ANNS}x", "Bearer \xff"],
)
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/completions", PROMPT),
        ("GET", "/v1/models", None),
        ("GET", f"/v1/models/{MODEL.id}", None),
        ("GET", "/load", None),
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/v1/tokenize", {"prompt": "a"}),
        ("POST", "/detokenize", {"tokens": [1]}),
        ("POST", "/v1/detokenize", {"tokens": [1]}),
        ("GET", "/tokenizer_info", None),
    ],
)
async def test_without_a_known_key_every_route_that_serves_tenants_is_a_401(
    method: str, path: str, body: Any, authorization: str | None
) -> None:
    client = hello()
    answer = await ask(app_for(client, keys=KEYS), path, authorization, body, method)
    assert (answer.status, answer.error["type"], answer.error["code"]) == (
        401,
        "authentication_error",
        "invalid_api_key",
    )
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "sk-" not in answer.error["message"]
    assert client.submissions == []


async def test_a_wrong_key_is_refused_before_the_body_is_read() -> None:
    exchange = Exchange(app_for(hello(), keys=KEYS), "POST", "/v1/completions", b"")
    exchange._inbox.get_nowait()  # no part of the body has come
    assert (await exchange.finish()).status == 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/activity", "/"])
async def test_probes_and_those_who_look_on_need_no_key(path: str) -> None:
    assert (await ask(app_for(hello(), keys=KEYS), path, None, method="GET")).status == 200


@pytest.mark.parametrize(("key", "tenant"), [(ANNS, "ann"), (BOBS, "bob")])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
async def test_the_engine_learns_whose_request_it_is(key: str, tenant: str, scheme: str) -> None:
    client = hello()
    answer = await ask(app_for(client, keys=KEYS), "/v1/completions", f"{scheme} {key}", PROMPT)
    assert answer.status == 200
    assert [submission.tenant for submission in client.submissions] == [tenant]


@pytest.mark.parametrize("authorization", [None, "", "Bearer ", "Basic x"])
async def test_a_key_may_come_as_x_api_key(authorization: str | None) -> None:
    client = hello()
    app = app_for(client, keys=KEYS)
    answer = await ask(app, "/v1/completions", authorization, PROMPT, **{"x-api-key": ANNS})
    assert answer.status == 200
    assert [submission.tenant for submission in client.submissions] == ["ann"]
    for wrong in ("", NOBODYS, f"Bearer {ANNS}"):
        assert (await ask(app, "/v1/completions", authorization, PROMPT, **{"x-api-key": wrong})).status == 401


async def test_a_wrong_bearer_token_is_not_mended_by_a_right_x_api_key() -> None:
    headers = {"x-api-key": ANNS}
    answer = await ask(app_for(hello(), keys=KEYS), "/v1/completions", f"Bearer {NOBODYS}", PROMPT, **headers)
    assert answer.status == 401


@pytest.mark.parametrize("authorization", [None, "Bearer whatever"])
async def test_without_keys_everybody_is_let_in_as_one_tenant(authorization: str | None) -> None:
    client = hello()
    assert (await ask(app_for(client), "/v1/completions", authorization, PROMPT)).status == 200
    assert client.submissions[0].tenant == ""


async def test_a_tenants_limit_is_a_429_for_it_and_for_nobody_else() -> None:
    keys = Keys([entry("ann", ANNS), entry("ann", "sk-ann-2"), entry("bob", BOBS, max_concurrent_requests=2)])
    client = ScriptedClient(asyncio.Event())
    app = app_for(client, keys=keys, gate=Gate(GatePolicy(tenant=Limits(max_concurrent_requests=1))))
    running = [begin(app, ANNS), begin(app, BOBS), begin(app, BOBS)]
    await until(lambda: len(client.submissions) >= 3)
    for key in (ANNS, "sk-ann-2", BOBS):
        answer = await ask(app, "/v1/completions", f"Bearer {key}", PROMPT)
        assert (answer.status, answer.error["type"], answer.error["code"]) == (
            429,
            "rate_limit_error",
            "rate_limit_exceeded",
        )
        assert int(answer.headers["retry-after"]) >= 1
        assert int(answer.headers["retry-after-ms"]) > 0
        assert answer.headers["x-ratelimit-limit-requests"] == ("2" if key == BOBS else "1")
    for exchange in running:
        exchange.disconnect()
        await asyncio.wait_for(exchange.task, TIMEOUT_S)


async def test_a_tenants_requests_go_before_others_by_no_more_than_it_may() -> None:
    keys = Keys([entry("ann", ANNS), entry("bob", BOBS, min_priority=-2)])
    client = hello()
    app = app_for(client, keys=keys, gate=Gate(GatePolicy(tenant_min_priority=0)))
    for key, least in ((ANNS, 0), (BOBS, -2)):
        for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
            answer = await ask(app, path, f"Bearer {key}", {**body, "priority": least - 1})
            assert (answer.status, answer.error["param"]) == (400, "priority")
            assert answer.error["message"] == (
                f"priority: the server takes {least} and greater numbers from this client, but it is {least - 1}."
            )
        answer = await ask(app, "/v1/completions", f"Bearer {key}", {**PROMPT, "priority": least})
        assert answer.status == 200
    assert [submission.priority for submission in client.submissions] == [0, -2]


def begin(app: Any, key: str) -> Exchange:
    headers = [("content-type", "application/json"), ("authorization", f"Bearer {key}")]
    return Exchange(app, "POST", "/v1/completions", json.dumps(PROMPT).encode(), headers)


async def test_no_key_is_ever_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for key in (ANNS, NOBODYS):
            await ask(app_for(hello(), keys=KEYS), "/v1/completions", f"Bearer {key}", PROMPT)
    assert "sk-" not in caplog.text


# --- the config -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dump", [json.dumps, yaml.safe_dump])
async def test_keys_of_a_file_are_added_to_those_of_the_config(tmp_path: Path, dump: Any) -> None:
    path = tmp_path / "keys"
    path.write_text(dump([{"tenant": "bob", "sha256": sha256(BOBS), "max_queued_tokens": 5}]))
    keys = Keys.load(AuthSettings(keys=(entry("ann", ANNS),), keys_file=str(path)))
    client = hello()
    for key in (ANNS, BOBS):
        assert (await ask(app_for(client, keys=keys), "/v1/completions", f"Bearer {key}", PROMPT)).status == 200
    assert [submission.tenant for submission in client.submissions] == ["ann", "bob"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[{tenant: ann, sha256: sk-secret}]", "0.sha256: String should match pattern"),
        ("[{tenant: ann, key: sk-secret, sha256: x}]", "0.key: Extra inputs are not permitted"),
        ("sk-secret", "expected a list of entries"),
        ("[sk-secret]", "0: Input should be a valid dictionary"),
        ("[sk-secret: {", "neither YAML nor JSON"),
        ("[" * 100_000, "neither YAML nor JSON"),
        ("sk-secret\xff", "is not text in UTF-8"),
        ("# sk-secret\n", "has no keys: everybody could use the server"),
        ("[]", "has no keys: everybody could use the server"),
        ("{tenant: ann, sha256: sk-secret}", "expected a list of entries"),
        (None, "No such file"),
    ],
)
def test_a_keys_file_that_cannot_be_used_is_refused_without_showing_it(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    path = tmp_path / "keys.yaml"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(KeysFileError, match=r"keys\.yaml") as caught:
        Keys.load(AuthSettings(keys_file=str(path)))
    assert reason in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_keys_file_without_keys_may_stand_beside_keys_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").touch()
    assert Keys.load(AuthSettings(keys=(entry("ann", ANNS),), keys_file=str(tmp_path / "keys.yaml"))).are_needed


def test_what_is_no_path_of_a_keys_file_is_refused() -> None:
    with pytest.raises(KeysFileError, match="expected the path of a file"):
        Keys.load(AuthSettings(keys_file="a\0b"))


def test_one_key_for_two_tenants_is_refused() -> None:
    with pytest.raises(KeysFileError, match="the same"):
        Keys.load(AuthSettings(keys=(entry("ann", ANNS), entry("bob", ANNS))))


@pytest.mark.parametrize(
    "auth",
    [
        {"keys": [{"tenant": "ann", "sha256": "sk-secret"}]},
        {"keys": [{"tenant": "ann", "key": "sk-secret"}]},
        {"keys": ["sk-secret"]},
        {"keys": "sk-secret"},
        {"admin_sha256": "sk-secret"},
        {"admin_key": "sk-secret"},
    ],
)
def test_a_key_that_was_written_into_the_config_is_refused_and_not_shown(tmp_path: Path, auth: Any) -> None:
    args = {"engine": {"executor": "fake"}, "auth": auth}
    with pytest.raises(ValidationError) as invalid:
        AppSettings.model_validate(args)
    assert "secret" not in str(invalid.value)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"applications": [{"import_path": "serve_app.app:build", "args": args}]}))
    with pytest.raises(ConfigRefused) as refused:
        preflight(read_config(path))
    assert "args.auth" in str(refused.value)
    assert "secret" not in str(refused.value)


# --- making keys ----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_key_and_the_entry_that_lets_it_in(tmp_path: Path) -> None:
    """The entry alone is a valid file of keys, as the pages for Compose and Kubernetes have it."""
    command = [sys.executable, "-m", "serve_app.auth", "ann"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    key, listed, admin = (line.partition(":")[2].strip() for line in lines)
    (tmp_path / "keys.yaml").write_text(listed)
    admin_sha256 = yaml.safe_load(admin)["admin_sha256"]
    keys = Keys.load(AuthSettings(keys_file=str(tmp_path / "keys.yaml"), admin_sha256=admin_sha256))
    scope = {"type": "http", "headers": [(b"authorization", f"Bearer {key}".encode())]}
    assert keys.tenant(scope).name == "ann"
    keys.check_admin(scope)


def test_every_key_is_a_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] != lines[3]
    assert len(lines[0].split()[-1]) >= 43, "256 bits"


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["a", "b"], ["--no-such-option"], [""]):
        with pytest.raises(SystemExit) as caught:
            main(wrong)
        assert caught.value.code == 2
        told = capsys.readouterr()
        assert "usage" in told.err
        assert "sk-" not in told.out
