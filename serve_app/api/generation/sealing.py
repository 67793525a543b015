"""Owns sealed thoughts, which a client keeps and sends back without reading, and only its tenant can have opened.
Never keeps a thought. The format is Fernet: encrypted and authenticated."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF


class Seal:
    """Seals one tenant's thoughts. What lies in a client's logs is of no use to another tenant, who could otherwise ask
    the model to repeat it."""

    def __init__(self, keys: Sequence[str], tenant: str = "") -> None:
        """The first key seals; all of them open, so that an old one can be replaced."""
        self._keys = tuple(keys)
        self._fernet = MultiFernet([Fernet(_own_key(key, tenant)) for key in keys])

    def of(self, tenant: str) -> Seal:
        """Return the seal of a tenant, with the same keys."""
        return Seal(self._keys, tenant)

    def close(self, text: str) -> str:
        return self._fernet.encrypt(text.encode()).decode()

    def open(self, sealed: str) -> str | None:
        """Open sealed thoughts. Return None if they were sealed elsewhere, for another tenant, or with a key that is
        gone."""
        try:
            return self._fernet.decrypt(sealed).decode()
        except (InvalidToken, ValueError):  # ValueError: not ASCII
            return None


def of_tenant(seal: Seal | None, tenant: str) -> Seal | None:
    """Return the seal of a tenant, if there is any."""
    return None if seal is None else seal.of(tenant)


def _own_key(key: str, tenant: str) -> bytes:
    """Derive a tenant's key (RFC 5869)."""
    derived = HKDF(SHA256(), length=32, salt=None, info=b"chunkserve thoughts of " + tenant.encode())
    return urlsafe_b64encode(derived.derive(urlsafe_b64decode(key)))


def make_seal(keys: Sequence[str], num_replicas: int) -> Seal | None:
    """Make the seal of one of `num_replicas` replicas. Without keys, a single replica draws its own; others have no
    common key, and so no seal."""
    if keys:
        return Seal(keys)
    return Seal([Fernet.generate_key().decode()]) if num_replicas == 1 else None
