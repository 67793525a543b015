"""Owns the promise that the pages that may read refusals come from one variable, which is refused by name if wrong, and
that the edge decides about a page as the app does."""

from __future__ import annotations

import pytest
from starlette.middleware.cors import CORSMiddleware

from serve_app.edge.cors import VARIABLE, CorsError, Policy, policies_in, written

PAGE, LOCAL = "https://chat.example.com", "http://localhost:3000"


def test_what_is_written_is_read_the_longest_prefix_first() -> None:
    policies = [Policy("/"), Policy("/a", ("*",)), Policy("/a/b", (PAGE,), "x|y", 0)]
    assert policies_in({VARIABLE: written(policies)}) == tuple(reversed(policies))


@pytest.mark.parametrize("environ", [{}, {VARIABLE: ""}, {VARIABLE: " "}, {VARIABLE: "{}"}])
def test_without_it_no_page_is_named(environ: dict[str, str]) -> None:
    assert policies_in(environ) == ()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("https://a.example", "Expecting value"),
        ("[]", "items"),
        ('{"/": "*"}', "mapping"),
        ('{"/": {"allow_credentials": true}}', "allow_credentials"),
        ('{"/": {"allow_origins": "*"}}', "allow_origins must be a list of origins"),
        ('{"/": {"allow_origins": ["a\\nb"]}}', "allow_origins must be a list of origins"),
        ('{"/": {"allow_origin_regex": "("}}', "missing \\)"),
        ('{"/": {"allow_origin_regex": "a\\nb"}}', "allow_origin_regex must be an expression on one line"),
        ('{"/": {"max_age": -1}}', "max_age must be 0 or more seconds, not -1"),
        ('{"a": {}}', "the route prefix 'a'"),
        ('{"/a b": {}}', "the route prefix '/a b'"),
    ],
)
def test_what_is_none_is_refused_by_name_and_value(given: str, reason: str) -> None:
    with pytest.raises(CorsError, match=f"{VARIABLE} must be JSON such as .*{reason}"):
        policies_in({VARIABLE: given})


@pytest.mark.parametrize("prefix", ["/", "/a"])
def test_a_prefix_ends_at_a_slash(prefix: str) -> None:
    policy = Policy(prefix)
    assert policy.governs("/a")
    assert policy.governs("/a/b")
    assert policy.governs("/ab") is (prefix == "/")


@pytest.mark.parametrize("origin", [PAGE, LOCAL, PAGE + ".evil.net", "null", "*", "", "HTTPS://CHAT.EXAMPLE.COM"])
@pytest.mark.parametrize(
    "policy",
    [Policy("/"), Policy("/", ("*",)), Policy("/", (PAGE,)), Policy("/", (), "http://localhost(:[0-9]+)?|a")],
)
def test_a_page_is_allowed_exactly_where_the_app_allows_it(policy: Policy, origin: str) -> None:
    app = CORSMiddleware(
        lambda *_: None, allow_origins=policy.allow_origins, allow_origin_regex=policy.allow_origin_regex
    )
    assert (policy.allowed(origin) is not None) is app.is_allowed_origin(origin)
