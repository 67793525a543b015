"""Owns API keys: who sends a request, and who may use the admin routes. `python -m serve_app.auth` makes a key.
Never holds, logs or shows a key: all it knows are digests."""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.admission.limits import ANYBODY, Limits, Tenant
from serve_app.errors import ApiError
from serve_app.settings import ApiKey, AuthSettings

_KEY_BYTES = 32
_TENANT = "chunkserve.tenant"


class KeysFileError(ValueError):
    """The message says what is wrong with the file, and shows nothing of what is in it."""


class Keys:
    """The keys of a deployment. Without API keys everybody may use it, as one tenant; without an admin key nobody may
    administer it."""

    def __init__(self, keys: Sequence[ApiKey] = (), admin_sha256: str | None = None) -> None:
        """Raises ValueError if two entries have the same digest."""
        if len({key.sha256 for key in keys}) < len(keys):
            raise ValueError("two of the API keys are the same.")
        self._keys = tuple(keys)
        self._admin = admin_sha256

    @property
    def are_needed(self) -> bool:
        return bool(self._keys)

    @property
    def admin_is_open(self) -> bool:
        return self._admin is not None

    @classmethod
    def load(cls, settings: AuthSettings) -> Keys:
        """Read `keys_file`, if there is one, once.

        Raises:
            KeysFileError: it cannot be used.
        """
        listed = () if settings.keys_file is None else _read(Path(settings.keys_file))
        try:
            return cls((*settings.keys, *listed), settings.admin_sha256)
        except ValueError as error:
            raise KeysFileError(f"auth.keys and {settings.keys_file}: {error}") from None

    def tenant(self, scope: Scope) -> Tenant:
        """Whose key a request carries.

        Raises:
            ApiError: 401, none of ours.
        """
        if not self._keys:
            return ANYBODY
        found = self._entry(_digest(scope))
        if found is None:
            raise _unauthorized("API key")
        return Tenant(
            name=found.tenant,
            limits=Limits(
                max_concurrent_requests=found.max_concurrent_requests, max_queued_tokens=found.max_queued_tokens
            ),
        )

    def check_admin(self, scope: Scope) -> None:
        """Return if the request carries the admin key.

        Raises:
            ApiError: 401, it carries no key of ours; 403, it carries a user's, or there is no admin key.
        """
        if self._admin is None:
            text = "The admin routes are closed: they need auth.admin_sha256 in the server's config."
            raise ApiError(403, text, type="permission_error", code="admin_disabled")
        given = _digest(scope)
        if hmac.compare_digest(given, self._admin):
            return
        if self._entry(given) is not None:
            text = "This API key is no admin key."
            raise ApiError(403, text, type="permission_error", code="admin_key_required")
        raise _unauthorized("admin key")

    def _entry(self, given: str) -> ApiKey | None:
        found = None
        for key in self._keys:  # all of them: how long it takes tells nothing about which one was close
            if hmac.compare_digest(given, key.sha256):
                found = key
        return found


class NeedsKey:
    """A route for those with an API key, if there are any. Refused before the body is read."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, _TENANT: self._keys.tenant(scope)}, receive, send)


class NeedsAdminKey:
    """A route for whoever has the admin key."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._keys.check_admin(scope)
        await self._app(scope, receive, send)


def tenant_of(scope: Scope) -> Tenant:
    """The tenant that NeedsKey found."""
    tenant = scope[_TENANT]
    assert isinstance(tenant, Tenant)
    return tenant


def _digest(scope: Scope) -> str:
    """Of the bearer token, or where there is none of X-Api-Key; "", which is no digest, without both."""
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    key = bearer or headers.get("x-api-key", "").strip()
    # Headers are decoded as Latin-1, which gives back the bytes that were sent.
    return digest(key.encode("latin-1")) if key else ""


def digest(key: bytes) -> str:
    """What the config holds of a key. A fast hash is enough: keys are random, and too long to be guessed."""
    return hashlib.sha256(key).hexdigest()


def _unauthorized(what: str) -> ApiError:
    text = f"This needs a valid {what}, sent as `Authorization: Bearer <key>` or `X-Api-Key: <key>`."
    challenge = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, text, type="authentication_error", code="invalid_api_key", headers=challenge)


def _read(path: Path) -> tuple[ApiKey, ...]:
    try:
        return TypeAdapter(tuple[ApiKey, ...]).validate_python(yaml.safe_load(path.read_text()) or ())
    except OSError as error:
        raise KeysFileError(f"auth.keys_file: {path}: {error.strerror}") from None
    except yaml.YAMLError:
        raise KeysFileError(f"auth.keys_file: {path} is neither YAML nor JSON.") from None
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise KeysFileError(f"auth.keys_file: {path}: {reasons}") from None


def main(arguments: Sequence[str]) -> int:
    """Print a new key and what the config needs to know of it."""
    parser = argparse.ArgumentParser(
        prog="python -m serve_app.auth",
        description="Make a random key, and print it with the lines that make it an API key or the admin key in a "
        "config.",
    )
    parser.add_argument("tenant", nargs="?", default="default", help="tenant that the key belongs to (%(default)s)")
    tenant = parser.parse_args(arguments).tenant
    if not tenant:
        parser.error("tenant is empty: expected a name")
    key = f"sk-{secrets.token_urlsafe(_KEY_BYTES)}"
    sha256 = digest(key.encode())
    print(f"key, shown only now:       {key}")
    print(f"entry of auth.keys:        {json.dumps({'tenant': tenant, 'sha256': sha256})}")
    print(f"or, for the admin routes:  admin_sha256: {sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
