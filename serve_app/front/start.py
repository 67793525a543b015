"""Owns the time from a submitted config to a server that answers, and the lines that a user reads of it.
Never imports Ray before it is called: Ray Serve reads its environment when it is imported."""

from __future__ import annotations

import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.config import ResolvedConfig
from serve_app.front.config_file import ServeConfig, address_of
from serve_app.front.preflight import Application
from serve_app.settings.instance import HEADER, VARIABLE

Say = Callable[[str], None]

_POLL_S = 0.25
_ANSWER_TIMEOUT_S = 60
# fmt: off
_OURS = (
    "AdapterError", "ConfigError", "ModelError", "CheckpointError", "KeysFileError", "EngineError", "MissingExporter",
)
# fmt: on
"""Refusals that another try does not cure: Serve tries a replica several times, with longer and longer pauses."""
_RAISED = re.compile(r"^\s*(?:[\w]+\.)*(?P<kind>\w+(?:Error|Exception|Exporter|Refused)): (?P<text>.+)$", re.MULTILINE)


def in_a_line(error: Exception) -> str:
    """Its type, and what says most: the last line of a traceback that Ray sends as a message, else the first line."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[-1 if lines[0].startswith('ray::') else 0].strip()}"


class StartFailed(Exception):
    """An application will not run. The message is one line."""


def wait_until_running(names: Sequence[str], status: Callable[[], Any], say: Say) -> None:
    """Until all applications run. status: `serve.status`; what a deployment waits for is said once.

    Raises:
        StartFailed: one of them failed, or a replica of ours refuses to start.
    """
    said: set[str] = set()
    while True:
        found = status().applications
        for name in names:
            if name in found:
                check(name, found[name])
                for line in _waiting(found[name]):
                    if line not in said:
                        say(f"{name}: {line}")
                        said.add(line)
        if all(name in found and found[name].status == "RUNNING" for name in names):
            return
        time.sleep(_POLL_S)


def check(name: str, application: Any) -> None:
    """Raises StartFailed: by a line, for the page of tracebacks that is Serve's message."""
    if application.status == "DEPLOY_FAILED":
        messages = [application.message, *(of.message for of in application.deployments.values())]
        raise StartFailed(f"application {name} failed to start: {_reason(messages)}")
    for deployment, of in application.deployments.items():
        for found in _RAISED.finditer(of.message):
            if found["kind"] in _OURS:
                raise StartFailed(f"application {name} failed to start: {deployment}: {found['text']}")


def _reason(messages: Sequence[str]) -> str:
    raised = [found for message in messages for found in _RAISED.finditer(message)]
    if raised:
        return f"{raised[-1]['kind']}: {raised[-1]['text']}"
    return " ".join(messages[0].split()) or "Ray Serve does not say why"


def _waiting(application: Any) -> Iterator[str]:
    """What a deployment lacks, in Serve's words, without its advice."""
    for name, of in application.deployments.items():
        if "taken more than" in of.message and "to be scheduled" in of.message:
            yield f"{name} waits: {of.message.splitlines()[0]}"


def wait_until_answering(url: str) -> None:
    """Until the server that this process started answers /health.

    Raises:
        StartFailed: another server does, or none for a minute.
    """
    expected, deadline, last = os.environ.get(VARIABLE), time.monotonic() + _ANSWER_TIMEOUT_S, "no answer"
    unverified = ssl._create_unverified_context()  # the certificate is for another name than this machine's own
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified)
    )
    while time.monotonic() < deadline:
        try:
            with opener.open(f"{url}/health", timeout=5) as response:
                if expected is None or response.headers.get(HEADER) == expected:
                    return
                raise StartFailed(f"another server answers at {url}: stop it, or choose another port")
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            last = str(error)
            time.sleep(_POLL_S)
    raise StartFailed(f"{url}/health is not answered by this server ({last})")


def url_of(config: ServeConfig, route_prefix: str) -> str:
    """Where somebody on this machine reaches an application."""
    host, port = address_of(config)
    scheme = "https" if (config.content.get("http_options") or {}).get("ssl_certfile") else "http"
    here = "127.0.0.1" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    return f"{scheme}://{here}:{port}{route_prefix.rstrip('/')}"


def engine_lines(application: Application, resolved: ResolvedConfig) -> list[str]:
    """What an engine chose, and what it holds."""
    reasons, settings = resolved.reasons, application.settings
    engines = f"{settings.most_engines} engines" if settings.most_engines > 1 else "1 engine"
    if settings.autoscaling is not None:
        engines = f"{settings.autoscaling.min_replicas} to {settings.autoscaling.max_replicas} engines"
    tokens = resolved.num_kv_blocks * resolved.block_size
    contexts = tokens / resolved.max_model_len
    lines = [
        f"model    {settings.model_id}: {resolved.max_model_len:,} tokens of context, {engines}",
        f"device   {resolved.device}, {resolved.dtype} ({reasons.get('device', 'executor is fake')})",
        f"kernels  {reasons.get('kernels', resolved.kernels)}",
        f"KV cache {resolved.num_kv_blocks:,} blocks hold {tokens:,} tokens, {contexts:.1f} full contexts "
        f"({reasons.get('num_kv_blocks', 'num_kv_blocks')})",
    ]
    if "scheduler" in reasons:
        lines.append(f"schedule {reasons['scheduler']}")
    if resolved.max_request_tokens < resolved.max_model_len:
        lines.append(
            f"warning  a request may have {resolved.max_request_tokens:,} tokens, as many as the KV cache holds: raise "
            "kv_cache_memory_gib, or lower max_model_len"
        )
    return lines


def ready_lines(application: Application, url: str, took_s: float) -> str:
    """How to use it."""
    settings = application.settings
    messages = '[{"role": "user", "content": "What is the capital of France?"}]'
    key = " -H 'Authorization: Bearer <your key>'" if settings.auth.keys or settings.auth.keys_file else ""
    return (
        f"chunkserve is ready after {took_s:.0f} s: {url}/v1 is the API, {url}/ is a page to try it on\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f"""    -d '{{"model": "{settings.model_id}", "temperature": 0, "messages": {messages}}}'"""
    )
