"""Defines the names that an adapter may have.
Never knows which adapters there are: `serve_app.adapters.names` does."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]
"""A name has no colon, because the colon separates a model's name from its adapter's."""
