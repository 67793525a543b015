"""Owns what an adapter may be called.
Never knows which there are: `serve_app.adapters.names` does."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]
"""Without the colon, which stands between a model's name and its adapter's."""
