"""Owns HAProxy's rules for CORS. Its own refusals name the page that may read them. A preflight that it refuses gets
200, so that the browser sends the request and the page reads why it is refused.
Never touches what a replica has answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from serve_app.edge.cors import EXPOSED, METHODS, PREFLIGHT_VARY, RAYS_OWN, Policy

_ALLOWED = "{ var(txn.cors_allow) -m found } !{ var(txn.from_replica) -m found }"
_PREFLIGHT = f"{_ALLOWED} {{ var(txn.cors_preflight) -m found }}"


def cors_rules(policies: Sequence[Policy], directory: Path) -> list[str]:
    """Write the frontend's rules, which go before any rule that refuses. `directory` has the `pattern_files`."""
    if not policies:
        return []
    chosen = [rule for number, policy in enumerate(policies) for rule in _choice(number, policy, directory)]
    return [
        "http-request set-var(txn.cors_origin) req.fhdr(origin)",
        *(f"acl cors_{number} {where}" for number, policy in enumerate(policies) for where in _paths(policy)),
        "http-request set-var(txn.cors_preflight) bool(true) "
        "if METH_OPTIONS { req.fhdr(access-control-request-method) -m found }",
        "http-request set-var(txn.cors_headers) req.fhdr(access-control-request-headers)",
        "http-request set-var(txn.cors_private) req.fhdr(access-control-request-private-network)",
        *chosen,
        "http-response set-var(txn.from_replica) bool(true)",
        *_told(),
    ]


def pattern_files(policies: Sequence[Policy], directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files that the rules name, with their contents. In the configuration, a regex would need quoting."""
    for number, policy in enumerate(policies):
        for method, patterns in _patterns(policy).items():
            yield _pattern_file(directory, number, method), "".join(f"{pattern}\n" for pattern in patterns)


def _patterns(policy: Policy) -> dict[str, list[str]]:
    """Return the patterns by HAProxy's matching method."""
    expression = [] if policy.allow_origin_regex is None else [f"^(?:{policy.allow_origin_regex})$"]
    return {"str": list(policy.allow_origins), "reg": expression}


def _paths(policy: Policy) -> list[str]:
    return [f"path {policy.prefix}", f"path_beg {policy.prefix.rstrip('/')}/"]


def _choice(number: int, policy: Policy, directory: Path) -> Iterator[str]:
    """Yield the rules that apply a policy. Only the policy of the longest matching prefix counts."""
    mine = f"{{ var(txn.cors_policy) -m int {number} }} {{ var(txn.cors_origin) -m found }}"
    yield (
        f"http-request set-var(txn.cors_policy) int({number}) "
        f"if cors_{number} !{{ var(txn.cors_policy) -m found }} !{{ path_beg {RAYS_OWN} }}"
    )
    yield f"http-request set-var(txn.cors_max_age) int({policy.max_age}) if {mine}"
    if policy.allows_all:
        yield f"http-request set-var(txn.cors_allow) str(*) if {mine}"
        return
    yield f"http-request set-var(txn.cors_varies) bool(true) if {{ var(txn.cors_policy) -m int {number} }}"
    for method in _patterns(policy):
        allowed = f"{{ var(txn.cors_origin) -m {method} -f {_pattern_file(directory, number, method)} }}"
        yield f"http-request set-var(txn.cors_allow) var(txn.cors_origin) if {mine} {allowed}"


def _told() -> list[str]:
    says = "http-after-response set-header"
    return [
        f"{says} vary Origin if {{ var(txn.cors_varies) -m found }} !{{ var(txn.from_replica) -m found }}",
        f"{says} access-control-allow-origin %[var(txn.cors_allow)] if {_ALLOWED}",
        f'{says} access-control-expose-headers "{", ".join(EXPOSED)}" if {_ALLOWED}',
        f"http-after-response set-status 200 if {_PREFLIGHT}",
        f'{says} vary "{PREFLIGHT_VARY}" if {_PREFLIGHT}',
        f'{says} access-control-allow-methods "{", ".join(METHODS)}" if {_PREFLIGHT}',
        f"{says} access-control-max-age %[var(txn.cors_max_age)] if {_PREFLIGHT}",
        f"{says} access-control-allow-headers %[var(txn.cors_headers)] "
        f"if {_PREFLIGHT} {{ var(txn.cors_headers) -m found }}",
        f"{says} access-control-allow-private-network true if {_PREFLIGHT} {{ var(txn.cors_private) -m found }}",
    ]


def _pattern_file(directory: Path, number: int, method: str) -> Path:
    return directory / f"cors-{number}-{method}.lst"
