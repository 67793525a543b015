"""Checks API keys: identifies the sender of a request, and decides who may use the admin routes.
Never holds, logs or shows a key: it only knows digests."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.errors.api_error import ApiError
from serve_app.settings.auth import ApiKey, AuthSettings
from serve_app.settings.limits import ANYBODY, Limits, Tenant

_TENANT = "chunkserve.tenant"


class KeysFileError(ValueError):
    """The keys file is not valid. The message says why, and shows none of the file's contents."""


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
            KeysFileError: the file cannot be used, or there is no key although a file is set: such a server would be
                open to everybody.
        """
        listed = () if settings.keys_file is None else _read(Path(settings.keys_file))
        if settings.keys_file is not None and not (settings.keys or listed):
            raise KeysFileError(f"auth.keys_file: {settings.keys_file} has no keys: everybody could use the server")
        try:
            return cls((*settings.keys, *listed), settings.admin_sha256)
        except ValueError as error:
            raise KeysFileError(f"auth.keys and {settings.keys_file}: {error}") from None

    def tenant(self, scope: Scope) -> Tenant:
        """Return the tenant whose key a request carries.

        Raises:
            ApiError: 401, the request has no valid key.
        """
        if not self._keys:
            return ANYBODY
        entry = self._entry(_digest(scope))
        if entry is None:
            raise _unauthorized("API key")
        return Tenant(
            name=entry.tenant,
            limits=Limits(
                max_concurrent_requests=entry.max_concurrent_requests, max_queued_tokens=entry.max_queued_tokens
            ),
            min_priority=entry.min_priority,
        )

    def check_admin(self, scope: Scope) -> None:
        """Return if the request carries the admin key.

        Raises:
            ApiError: 401, it has no valid key; 403, it has a user's key, or the server has no admin key.
        """
        if self._admin is None:
            text = "The admin routes are closed: they need auth.admin_sha256 in the server's config."
            raise ApiError(403, text, type="permission_error", code="admin_disabled")
        given = _digest(scope)
        if hmac.compare_digest(given, self._admin):
            return
        if self._entry(given) is not None:
            text = "This API key is not an admin key."
            raise ApiError(403, text, type="permission_error", code="admin_key_required")
        raise _unauthorized("admin key")

    def _entry(self, given: str) -> ApiKey | None:
        entry = None
        for key in self._keys:  # compares with all of them, so that the time does not reveal which one was close
            if hmac.compare_digest(given, key.sha256):
                entry = key
        return entry


class NeedsKey:
    """Middleware of routes that need an API key, if the server has any. Refuses before the body is read."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, _TENANT: self._keys.tenant(scope)}, receive, send)


class NeedsAdminKey:
    """Middleware of routes that need the admin key."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._keys.check_admin(scope)
        await self._app(scope, receive, send)


def tenant_of(scope: Scope) -> Tenant:
    """Return the tenant that NeedsKey found."""
    tenant = scope[_TENANT]
    assert isinstance(tenant, Tenant)
    return tenant


def _digest(scope: Scope) -> str:
    """Return the digest of the bearer token, or else of X-Api-Key; without either "", which equals no digest."""
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    key = bearer or headers.get("x-api-key", "").strip()
    # Headers were decoded as Latin-1; encoding restores the bytes that were sent.
    return digest(key.encode("latin-1")) if key else ""


def digest(key: bytes) -> str:
    """Compute a key's digest for the config. A fast hash is enough: keys are random, and too long to be guessed."""
    return hashlib.sha256(key).hexdigest()


def _unauthorized(what: str) -> ApiError:
    text = f"This needs a valid {what}, sent as `Authorization: Bearer <key>` or `X-Api-Key: <key>`."
    challenge = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, text, type="authentication_error", code="invalid_api_key", headers=challenge)


def _read(path: Path) -> tuple[ApiKey, ...]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return TypeAdapter(tuple[ApiKey, ...]).validate_python(() if content is None else content)
    except OSError as error:
        raise KeysFileError(f"auth.keys_file: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeysFileError(f"auth.keys_file: {path} is not text in UTF-8.") from None
    except (yaml.YAMLError, RecursionError):
        raise KeysFileError(f"auth.keys_file: {path} is neither YAML nor JSON.") from None
    except ValidationError as error:
        reasons = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}" if item["loc"] else "expected a list of entries"
            for item in error.errors()
        )
        raise KeysFileError(f"auth.keys_file: {path}: {reasons}") from None
    except ValueError:  # a path with a null character
        raise KeysFileError(f"auth.keys_file: expected the path of a file, not {str(path)!r}.") from None
