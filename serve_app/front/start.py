"""Waits from a submitted config until the server answers, and writes the lines that the user reads meanwhile.
Never imports Ray when it is imported itself: Ray Serve reads its environment at import."""

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
"""Errors that another attempt cannot fix: Serve retries a replica several times, with longer and longer pauses."""
_RAISED = re.compile(r"^\s*(?:[\w]+\.)*(?P<kind>\w+(?:Error|Exception|Exporter|Refused)): (?P<text>.+)$", re.MULTILINE)


def in_a_line(error: Exception) -> str:
    """Return an error's type and its most informative line: the last of a traceback sent by Ray, otherwise the
    first."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[-1 if lines[0].startswith('ray::') else 0].strip()}"


class StartFailed(Exception):
    """An application will not run. The message is one line."""


def wait_until_running(names: Sequence[str], status: Callable[[], Any], say: Say) -> None:
    """Wait until all applications run. `status`: `serve.status`. What a deployment waits for is reported once.

    Raises:
        StartFailed: an application failed, or one of our replicas refuses to start.
    """
    reported: set[str] = set()
    while True:
        applications = status().applications
        for name in names:
            if name in applications:
                check(name, applications[name])
                for line in _waiting(applications[name]):
                    if line not in reported:
                        say(f"{name}: {line}")
                        reported.add(line)
        if all(name in applications and applications[name].status == "RUNNING" for name in names):
            return
        time.sleep(_POLL_S)


def check(name: str, application: Any) -> None:
    """Raises StartFailed: an application failed. The message is one line instead of Serve's page of tracebacks."""
    if application.status == "DEPLOY_FAILED":
        messages = [application.message, *(deployment.message for deployment in application.deployments.values())]
        raise StartFailed(f"application {name} failed to start: {_reason(messages)}")
    for deployment_name, deployment in application.deployments.items():
        for raised in _RAISED.finditer(deployment.message):
            if raised["kind"] in _OURS:
                raise StartFailed(f"application {name} failed to start: {deployment_name}: {raised['text']}")


def _reason(messages: Sequence[str]) -> str:
    raised = [match for message in messages for match in _RAISED.finditer(message)]
    if raised:
        return f"{raised[-1]['kind']}: {raised[-1]['text']}"
    return " ".join(messages[0].split()) or "Ray Serve does not say why"


def _waiting(application: Any) -> Iterator[str]:
    """Yield what each deployment waits for, in Serve's words, without its advice."""
    for name, deployment in application.deployments.items():
        if "taken more than" in deployment.message and "to be scheduled" in deployment.message:
            yield f"{name} waits: {deployment.message.splitlines()[0]}"


def wait_until_answering(url: str) -> None:
    """Wait until the server that this process started answers /health.

    Raises:
        StartFailed: another server answers, or none does for a minute.
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
    """Return the URL of an application for clients on this machine."""
    host, port = address_of(config)
    scheme = "https" if (config.content.get("http_options") or {}).get("ssl_certfile") else "http"
    here = "127.0.0.1" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    return f"{scheme}://{here}:{port}{route_prefix.rstrip('/')}"


def engine_lines(application: Application, resolved: ResolvedConfig) -> list[str]:
    """Describe an engine's configuration and its capacity."""
    reasons, settings = resolved.reasons, application.settings
    engines = f"{settings.most_engines} engines" if settings.most_engines > 1 else "1 engine"
    if settings.autoscaling is not None:
        engines = f"{settings.autoscaling.min_replicas} to {settings.autoscaling.max_replicas} engines"
    tokens = resolved.num_kv_blocks * resolved.block_size * resolved.expert_parallel_size
    ranks = f"{resolved.expert_parallel_size} x " if resolved.expert_parallel_size > 1 else ""
    contexts = tokens / resolved.max_model_len
    lines = [
        f"model    {settings.model_id}: {resolved.max_model_len:,} tokens of context, {engines}",
        f"device   {resolved.device}, {resolved.dtype} ({reasons.get('device', 'executor is fake')})",
        f"kernels  {reasons.get('kernels', resolved.kernels)}",
        *([f"weights  {reasons['quantize']}"] if "quantize" in reasons else []),
        f"KV cache {ranks}{resolved.num_kv_blocks:,} blocks hold {tokens:,} tokens, {contexts:.1f} full contexts "
        f"({reasons.get('num_kv_blocks', 'num_kv_blocks')})",
    ]
    lines += _tier_lines(resolved)
    if "scheduler" in reasons:
        lines.append(f"schedule {reasons['scheduler']}")
    if resolved.max_request_tokens < resolved.max_model_len:
        lines.append(
            f"warning  a request may have {resolved.max_request_tokens:,} tokens, as many as the KV cache holds: raise "
            "kv_cache_memory_gib, or lower max_model_len"
        )
    return lines


def _tier_lines(resolved: ResolvedConfig) -> list[str]:
    """Describe where KV is kept besides the KV cache, and how much of it."""
    tiers, lines = resolved.kv_tiers, []
    if tiers.host_memory_gib:
        held = _held_tokens(resolved, tiers.host_memory_gib)
        lines.append(f"KV host  {tiers.host_memory_gib:g} GiB of memory for each engine{held}")
    if tiers.disk_path is not None:
        held = _held_tokens(resolved, tiers.disk_gib)
        key = "not encrypted" if tiers.disk_key_file is None else f"encrypted by the key in {tiers.disk_key_file}"
        lines.append(f"KV disk  {tiers.disk_path}: {tiers.disk_gib:g} GiB for all engines of a machine{held}, {key}")
    return lines


def _held_tokens(resolved: ResolvedConfig, memory_gib: float) -> str:
    if not resolved.tier_block_bytes:
        return ""
    blocks, dtype = int(memory_gib * 2**30) // resolved.tier_block_bytes, resolved.kv_tiers.dtype
    narrow = "" if dtype == "auto" else f" in {dtype}"
    return f", {blocks:,} blocks or {blocks * resolved.block_size:,} tokens{narrow}"


def ready_lines(application: Application, url: str, took_s: float) -> str:
    """Say how to use the server."""
    settings, first = application.settings, application.settings.each_model()[0]
    messages = '[{"role": "user", "content": "What is the capital of France?"}]'
    key = " -H 'Authorization: Bearer <your key>'" if settings.auth.keys or settings.auth.keys_file else ""
    return (
        f"chunkserve is ready after {took_s:.0f} s: {url}/v1 is the API, {url}/ is a page to try it\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f"""    -d '{{"model": "{first.model_id}", "temperature": 0, "messages": {messages}}}'"""
    )
