"""Owns the contract that the OpenAPI document is true: schemathesis, as a stranger, makes bodies from it alone.
Never adds hand-made bodies; what a schema cannot express is named here, with the reason."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from engine.build.engine import build_engine
from engine.config import EngineConfig, FakeConfig
from serve_app.api.ingress import create_app
from serve_app.api.openapi.operations import OPERATIONS, UNVERSIONED, Operation
from serve_app.api.requests.deadline import HEADER as DEADLINE
from serve_app.api.text.tokenizer import Tokenizer
from serve_app.auth.keys import Keys
from tests.serve_app.harness import MODEL, LocalClient
from tests.support.seeds import run_seed

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "25"))
"""Cases for each operation and kind."""
KEY = "x"
ALWAYS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
]
SCHEMA = checks.response_schema_conformance
# positive_data_acceptance is written out below: it knows statuses, but not the reasons that no schema can express.

ROUTES = [one for one in OPERATIONS if one not in UNVERSIONED]
"""Routes, without a second one for the same handler, which would cost as much and find the same."""
each_operation = pytest.mark.parametrize("operation", ROUTES, ids=lambda one: f"{one.method} {one.path}")


@pytest.fixture(scope="module")
def schema() -> Iterator[Any]:
    fake = FakeConfig(reply="It rains.")
    engine = build_engine("", EngineConfig(executor="fake", fake=fake, max_model_len=256, max_loras=2))
    keys = Keys(admin_sha256=hashlib.sha256(KEY.encode()).hexdigest())
    model = replace(MODEL, pooling="mean")
    app = create_app(LocalClient(engine), Tokenizer.byte_level(), model, keys=keys, allow_lora_updates=True)
    yield schemathesis.openapi.from_asgi("/openapi.json", app)
    engine.shutdown()


ENOUGH_MS = 60_000
"""A deadline for every request: one of a millisecond would end in a 504 where the machine has other things to do."""


def sensible(body: Any) -> Any:
    """Change a generated body as rules between fields demand, and to what it cannot know (the model). Otherwise all
    bodies would be refused for the same few reasons, and none would be answered."""
    if isinstance(body, list):
        return [sensible(entry) for entry in body]
    if not isinstance(body, dict):
        # JSON Schema's integers include 5.0; a client that sends that has mistaken the field.
        return int(body) if isinstance(body, float) and body.is_integer() else body
    fixed = {key: sensible(value) for key, value in body.items()}
    if "model" in fixed:
        fixed["model"] = MODEL.id
    if isinstance(fixed.get("messages"), list):
        fixed["messages"] = [{"role": "user", "content": one.get("content") or "x"} for one in fixed["messages"]]
    if fixed.get("timeout_ms") is not None:
        fixed["timeout_ms"] = ENOUGH_MS
    if "stream_options" in fixed:
        fixed["stream"] = True
    return fixed


BEYOND_A_SCHEMA = re.compile(
    r"maximum context length|out of vocabulary|The prompt is empty|min_tokens"  # the model's numbers
    r"|only allowed when|not allowed together|not allowed when stream|should be equal to|at most 128 choices"
    r"|characters together|at least 1 unless echo|item_reference to an item|^previous_response_id: this server keeps no"
    r"|chat template|does not call tools|does not think"
    r"|should be a JSON object, written as a string|only allowed in a message of|calls a tool, and no message follows"
    r"|except in an assistant's message|only allowed in an assistant's message"
    r"|takes no images|parts are only allowed in a user's message"
    r"|should have exactly one of json|should begin with exactly one of the triggers|no structure begins with"
    r"|^(response_format|structured_outputs|json_schema|regex|ebnf|text\.format|output_\w+)\b.*: "  # for llguidance
    r"|No message has any content|no text that a model could read|can(?:not)? be used here|less than max_tokens"
    r"|expected an adapter there"  # no directory has an adapter
    r"|^tools\.\d+\.[\w.]+: |only allowed, and needed, where|which is not among the tools"
    r"|at least 1 item after validation"  # all that were given are hints
    r"|nothing is stored|this server runs no such tool|the name of tools of several namespaces"
)
"""Reasons for which a body that is valid by the document may be refused."""


def run_cases(schema: Any, operation: Operation, mode: GenerationMode, check: Callable[[Any], None]) -> None:
    strategy = schema[operation.path][operation.method].as_strategy(mode)
    bounded = settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    hypothesis.seed(run_seed())(bounded(given(case=strategy)(check)))()


@each_operation
def test_what_the_document_allows_is_answered_as_the_document_says(schema: Any, operation: Operation) -> None:
    def check(case: Any) -> None:
        if operation.body is not None:
            case.body = sensible(case.body)
        if DEADLINE in (case.headers or {}):
            case.headers[DEADLINE] = str(ENOUGH_MS)
        response = case.call(headers={"x-api-key": KEY})
        # The check applies a stream's schema to each event, which OpenAPI 3.1 does not say; test_openapi checks frames.
        is_stream = response.headers["content-type"][0].startswith("text/event-stream") if response.content else False
        case.validate_response(response, checks=ALWAYS if is_stream else [*ALWAYS, SCHEMA])
        if response.status_code == 400:
            for mistake in re.split(r"; (?=[\w.]+: )", response.json()["error"]["message"]):
                assert BEYOND_A_SCHEMA.search(mistake), (mistake, case.body)

    run_cases(schema, operation, GenerationMode.POSITIVE, check)


@pytest.mark.parametrize("operation", [one for one in ROUTES if one.body is not None], ids=lambda one: one.path)
def test_what_the_document_forbids_is_refused_as_the_document_says(schema: Any, operation: Operation) -> None:
    def check(case: Any) -> None:
        response = case.call(headers={"x-api-key": KEY})
        # A body beyond the limit is refused unread, which Schemathesis does not count.
        refused = [] if response.status_code == 413 else [checks.negative_data_rejection]
        case.validate_response(response, checks=[*ALWAYS, SCHEMA, *refused])

    run_cases(schema, operation, GenerationMode.NEGATIVE, check)
