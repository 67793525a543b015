"""Owns how near comparisons came to their tolerances: each is noted for whoever reports the run.
Never says what a tolerance is, nor what may be compared."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Distance(NamedTuple):
    distance: float
    tolerance: float

    @property
    def share(self) -> float:
        """The share of the tolerance that is used; NaN, which is beyond every tolerance, if a value was not finite."""
        return self.distance / self.tolerance if self.tolerance else float(self.distance > 0)


_noted: list[Distance] = []


def is_within(distance: float, tolerance: float) -> bool:
    """NaN is not."""
    _noted.append(Distance(float(distance), tolerance))
    return distance < tolerance


def assert_close(got: Tensor, want: Tensor, *, atol: float, rtol: float, equal_nan: bool = False) -> None:
    """torch.testing's. What is noted is the largest difference in units of what is allowed there."""
    allowed = atol + rtol * want.double().abs()
    shares = ((got.double() - want.double()).abs() / allowed).nan_to_num(
        nan=0.0 if equal_nan or not atol else torch.nan
    )
    _noted.append(Distance(float(shares.max()) if shares.numel() else 0.0, 1.0))
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol, equal_nan=equal_nan)


def take_noted() -> list[Distance]:
    """Since the last call."""
    found = _noted.copy()
    _noted.clear()
    return found
