"""Owns the room that the gates of several models share: its limits, what is reserved for each, and the tenants' counts.
Never lets a request in: each model's gate does, and asks here whether the others leave room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serve_app.admission.backlog import Backlog
from serve_app.settings.limits import RoomPolicy


class Account:
    """Holds the counts of a model, of all requests, or of one tenant."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.requests = Backlog(clock)
        self.tokens = Backlog(clock)


@dataclass(slots=True)
class Room:
    """Half of each limit is reserved for the models, in proportion to their shares, and the rest is for whichever
    requests come first. So a model below its reserved part is always let in, however many requests others have: they
    never take it. A model's only request is let in as well, whatever its size, as with a single model."""

    policy: RoomPolicy
    tenants: dict[str, Account] = field(default_factory=dict)
    """What the tenants have, of all models together."""
    _models: list[Account] = field(default_factory=list)

    def join(self, account: Account) -> Place:
        """Add the next model, in the order of the policy's shares."""
        self._models.append(account)
        return Place(self, len(self._models) - 1)

    def excess(self, limit: tuple[int, Sequence[int]] | None, amounts: Sequence[int], model: int, more: int) -> int:
        """By how much `more` of one model would exceed the limit. `amounts`: what each model has."""
        if limit is None or not amounts[model]:
            return 0
        most, reserved = limit
        wanted = [amount + more * (number == model) for number, amount in enumerate(amounts)]
        if wanted[model] <= reserved[model]:
            return 0
        return max(0, sum(map(max, wanted, reserved)) - most)

    @property
    def models(self) -> Sequence[Account]:
        return self._models


@dataclass(frozen=True, slots=True)
class Place:
    """One model's place in a room."""

    room: Room
    number: int

    def requests(self) -> tuple[int, int] | None:
        """Return the limit of the room on requests, and by how much one more of this model would exceed it."""
        limit = self.room.policy.requests()
        amounts = [account.requests.amount for account in self.room.models]
        return None if limit is None else (limit[0], self.room.excess(limit, amounts, self.number, 1))

    def tokens(self, more: int) -> tuple[int, int] | None:
        """Return the limit on queued prompt tokens, and by how much `more` of this model would exceed it."""
        limit = self.room.policy.tokens()
        amounts = [account.tokens.amount for account in self.room.models]
        return None if limit is None else (limit[0], self.room.excess(limit, amounts, self.number, more))
