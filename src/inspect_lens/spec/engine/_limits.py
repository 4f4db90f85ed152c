"""What tensors of a request may be, known before a byte of them is unpacked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Final, cast

from pydantic import ValidationInfo

from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec.values._tensor import JudgeShape

from ._facts import SITE_TABLE, EngineFacts, Site, SiteWidth

__all__ = ["TensorLimits"]

_KEY = "inspect_lens_limits"
WEIGHT_BYTES: Final[dict[str, tuple[int, str]]] = {
    "probe": (1 << 28, f"a probe has {1 << 28} at most; use fewer units or heads"),
    "lens": (
        1 << 30,
        f"a lens that a client sends has {1 << 30} at most; store it as float16, leave out layers, "
        "or register it at the server's start with INSPECT_LENS_REGISTER",
    ),
}
"""Of one tensor: the most bytes, and what to say of more. An operator's lens comes from a file."""


class TensorLimits:
    """What an engine can use of the tensors of one request, which are counted together.

    A kilobyte of text unpacks to gigabytes. So shapes are judged as they are declared.
    """

    def __init__(
        self,
        *,
        model: str,
        hidden: int,
        n_layers: int,
        rows: int,
        widths: Sequence[SiteWidth] = (),
    ) -> None:
        """Set the limits."""
        self._widths = {width.site: width.width for width in widths}
        self._model, self._hidden = model, hidden
        self._n_layers, self._rows = n_layers, rows
        self._n_asked = 0

    @classmethod
    def of(cls, facts: EngineFacts) -> TensorLimits:
        """Limits for one request to an engine."""
        return cls(
            model=facts.model,
            hidden=facts.hidden,
            n_layers=facts.n_layers,
            rows=facts.bank_rows,
            widths=facts.widths,
        )

    @property
    def context(self) -> dict[str, TensorLimits]:
        """What pydantic hands to the validators of a model."""
        return {_KEY: self}

    def _count(self, rows: int) -> None:
        self._n_asked += rows
        if self._n_asked > self._rows:
            raise UnsupportedError(
                f"{self._n_asked} vectors and the steering table has {self._rows} rows; steer "
                "fewer positions or layers, or raise INSPECT_LENS_BANK_BYTES"
            )

    def judge_edit(
        self, shape: tuple[int, ...], itemsize: int, *, site: object = None, is_part: bool = False
    ) -> None:
        """Judge the declared shape of a tensor of an edit, whose last axis is the width."""
        width = self._widths.get(cast("Site", site), self._hidden)
        found = shape[-1] if shape else 0
        if not (0 < found <= width if is_part else found == width):
            if width == self._hidden:
                self._judge_width(shape)
            raise SpecError(
                f"width {found} in shape {shape}; {site} of {self._model} is {width} wide"
            )
        self._count(math.prod(shape[:-1]) * -(-width // self._hidden))

    def edit_judge(self, site: object, *, is_part: bool) -> JudgeShape:
        """What judges the tensors of an edit; see `judge_edit`."""
        info = SITE_TABLE.get(cast("Site", site)) if isinstance(site, str) else None
        if info is not None and not info.is_wide and site not in self._widths:
            raise UnsupportedError(
                f"this engine has no taps at {site}, so nothing is known of its width; start it "
                "with the site in INSPECT_LENS_SITES"
            )
        key = site if isinstance(site, str) else None
        return partial(self.judge_edit, site=key, is_part=is_part)

    def judge_weights(self, shape: tuple[int, ...], itemsize: int, *, axes: str, what: str) -> None:
        """Judge the declared shape of a tensor of a probe or a lens."""
        if len(shape) != len(axes) and (what == "lens" or math.prod(shape) != 1):
            raise SpecError(f"shape {shape}; it needs {len(axes)} axes")
        if len(shape) == len(axes):
            if axes.startswith("l"):
                self._judge_layers(shape)
            for i, axis in enumerate(axes):
                if axis == "h":
                    self._judge_width(shape[: i + 1])
        most, way = WEIGHT_BYTES[what]
        if (n_bytes := math.prod(shape) * itemsize) > most:
            raise SpecError(f"shape {shape} has {n_bytes} bytes; a tensor of {way}")

    def _judge_layers(self, shape: tuple[int, ...]) -> None:
        if shape[0] > self._n_layers:
            raise SpecError(
                f"shape {shape} has {shape[0]} layers; {self._model} has {self._n_layers}"
            )

    def _judge_width(self, shape: tuple[int, ...]) -> None:
        if not shape or shape[-1] != self._hidden:
            raise SpecError(
                f"width {shape[-1] if shape else 0} in shape {shape}; the residual stream of "
                f"{self._model} is {self._hidden} wide"
            )


def limits_of(info: ValidationInfo) -> TensorLimits | None:
    """Limits that a model is validated under, if any."""
    context = info.context
    return context.get(_KEY) if isinstance(context, dict) else None


def weights_judge(info: ValidationInfo, axes: str, what: str) -> JudgeShape | None:
    """What judges the shape of a tensor of a probe or a lens; None where no engine is known."""
    limits = limits_of(info)
    return None if limits is None else partial(limits.judge_weights, axes=axes, what=what)
