"""Owns sealed thoughts, which a client keeps and sends back without reading, and only this deployment can open.
Never keeps a thought. The format is Fernet: encrypted and authenticated."""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.fernet import Fernet, InvalidToken, MultiFernet


class Seal:
    def __init__(self, keys: Sequence[str]) -> None:
        """The first key seals; all of them open, so that an old one can be replaced."""
        self._fernet = MultiFernet([Fernet(key) for key in keys])

    def close(self, text: str) -> str:
        return self._fernet.encrypt(text.encode()).decode()

    def open(self, sealed: str) -> str | None:
        """Open sealed thoughts. Return None if they were sealed elsewhere or with a key that is gone."""
        try:
            return self._fernet.decrypt(sealed).decode()
        except (InvalidToken, ValueError):  # ValueError: not ASCII
            return None


def make_seal(keys: Sequence[str], num_replicas: int) -> Seal | None:
    """Make the seal of one of `num_replicas` replicas. Without keys, a single replica draws its own; others have no
    common key, and so no seal."""
    if keys:
        return Seal(keys)
    return Seal([Fernet.generate_key().decode()]) if num_replicas == 1 else None
