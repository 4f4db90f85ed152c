"""Named places in the residual stream."""

from __future__ import annotations

from typing import Literal

__all__ = ["RESID_POST", "Site"]

Site = Literal["resid_post"]
"""Where a tap sits. `resid_post` is the residual stream after a decoder block, before the
next norm: what a Hugging Face forward hook on the decoder layer returns."""

RESID_POST: Site = "resid_post"
