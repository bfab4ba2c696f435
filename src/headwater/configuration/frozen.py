"""What all tables of settings are."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Strict: TOML has types, and text from elsewhere is read before it comes here."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
