"""What a sweep is asked for, by a function's arguments or by the body of a request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from inspect_lens.errors import SpecError
from inspect_lens.spec import (
    RESID_POST,
    Site,
    as_tensor_data,
    check_counts,
    encode_tensor,
    judging,
    shown,
)

from ._align import Align
from ._cells import check_site
from ._result import Source
from ._runs import Prompt

__all__ = ["IN_FLIGHT", "MOST_IN_FLIGHT", "SweepSpec", "specs_of", "to_body"]

IN_FLIGHT = 256
"""Requests that an engine gets at once."""
MOST_IN_FLIGHT = 1024
"""Requests that a server starts at once for one sweep, at most."""


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """One sweep; `inspect_lens.patch.patch_sweep` says what the fields mean."""

    clean: Prompt
    corrupted: Prompt
    answer: str | int
    foil: str | int | None = None
    layers: Sequence[int] | None = None
    positions: Sequence[int] | Sequence[bool] | None = None
    site: Site = RESID_POST
    source: Source = "clean"
    rows: ArrayLike | None = None
    alpha: float = 1.0
    window: int = 1
    align: Align = "equal"
    floor_runs: int = 4
    in_flight: int = IN_FLIGHT

    def check(self) -> None:
        """Refuse what can be told without an engine.

        Raises:
            SpecError: an argument is out of range, or two do not fit together.
            UnsupportedError: there is no such site.
        """
        check_site(self.site, "site")
        if self.source not in get_args(Source):
            raise SpecError(
                f"source={shown(self.source)}; allowed are {', '.join(get_args(Source))}"
            )
        if (self.rows is None) != (self.source in ("clean", "zero")):
            raise SpecError(
                f"source={shown(self.source)} and rows={'none' if self.rows is None else 'given'}; "
                "rows belong to source='mean' and source='rows'"
            )
        if not math.isfinite(self.alpha):
            raise SpecError(f"alpha={self.alpha}; allowed is a finite number, mostly from 0 to 1")
        if self.floor_runs < 1 or self.in_flight < 1:
            raise SpecError(
                f"floor_runs={self.floor_runs}, in_flight={self.in_flight}; allowed is 1 or more "
                "of each"
            )


class _Body(BaseModel):
    """Body of `POST /v1/inspect_lens/patch_sweep`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    clean: StrictStr | list[StrictInt] | list[dict[str, Any]]
    corrupted: StrictStr | list[StrictInt] | list[dict[str, Any]]
    answer: StrictStr | StrictInt
    foil: StrictStr | StrictInt | None = None
    sites: list[str] = Field(default=[RESID_POST], min_length=1)
    layers: list[StrictInt] | None = None
    positions: list[StrictBool] | list[StrictInt] | None = None
    source: str = "clean"
    rows: list[Any] | dict[str, Any] | None = None
    alpha: float = 1.0
    window: int = Field(default=1, ge=1)
    align: str = "equal"
    floor_runs: int = Field(default=4, ge=1, le=64)
    in_flight: int = Field(default=IN_FLIGHT, ge=1, le=MOST_IN_FLIGHT)


def specs_of(body: Any) -> tuple[str | None, list[SweepSpec]]:
    """Read the body of a request.

    Args:
        body: its JSON value.

    Returns:
        The model that is asked for, and one sweep for each site, in their order.

    Raises:
        SpecError: a field is missing, unknown or out of range; the message names it.
        UnsupportedError: there is no such site.
    """
    if not isinstance(body, Mapping):
        raise SpecError(f"the body: a JSON object is wanted, not {type(body).__name__}")
    check_counts(dict(body))
    if unknown := sorted(str(name)[:80] for name in body.keys() - _Body.model_fields.keys()):
        raise SpecError(
            f"{', '.join(unknown)}: unknown; allowed are {', '.join(_Body.model_fields)}"
        )
    with judging(""):
        asked = _Body.model_validate(dict(body))
    if len(set(asked.sites)) < len(asked.sites):
        raise SpecError(f"sites={shown(asked.sites)}: one stands there twice; name each once")
    for name in ("clean", "corrupted", "answer", "foil"):
        if getattr(asked, name) in ("", []):
            raise SpecError(f"{name}: is empty; give a text, token ids, or messages")
    for name in ("clean", "corrupted"):
        _check_prompt(getattr(asked, name), name)
    fields = {name: getattr(asked, name) for name in _Body.model_fields}
    model, sites = fields.pop("model"), fields.pop("sites")
    if asked.rows is not None:
        fields["rows"] = as_tensor_data(asked.rows, field="rows").to_float32()
        if not np.isfinite(fields["rows"]).all():
            raise SpecError("rows: hold NaN or infinity; allowed are finite numbers")
        if len(sites) > 1:
            raise SpecError(
                f"rows with {len(sites)} sites: rows are of one site; send a request for each"
            )
    specs = [SweepSpec(site=site, **fields) for site in sites]
    for spec in specs:
        spec.check()
    return model, specs


def _check_prompt(prompt: Prompt, name: str) -> None:
    for i, part in enumerate(() if isinstance(prompt, str) else prompt):
        if isinstance(part, int):
            if not 0 <= part < 1 << 31:
                raise SpecError(f"{name}[{i}]: {shown(part)}; token ids are 0 to 2**31 - 1")
        elif isinstance(part, Mapping):
            for key in ("role", "content"):
                if key not in part or not (key == "content" or isinstance(part[key], str)):
                    raise SpecError(
                        f"{name}[{i}].{key}: {shown(part.get(key))}; a message has a role and "
                        'content, such as {"role": "user", "content": "Hello"}'
                    )


def to_body(spec: SweepSpec, model: str) -> dict[str, Any]:
    """The body that asks a server for a sweep.

    Args:
        spec: of the sweep.
        model: that is asked for.
    """
    rows = None if spec.rows is None else encode_tensor(as_tensor_data(np.asarray(spec.rows)))
    return {
        "model": model, "clean": _plain(spec.clean), "corrupted": _plain(spec.corrupted),
        "answer": spec.answer, "foil": spec.foil, "sites": [spec.site],
        "layers": _listed(spec.layers), "positions": _listed(spec.positions),
        "source": spec.source, "rows": rows, "alpha": float(spec.alpha), "window": spec.window,
        "align": spec.align, "floor_runs": spec.floor_runs,
        "in_flight": spec.in_flight,
    }  # fmt: skip


def _plain(prompt: Prompt) -> Any:
    if isinstance(prompt, str):
        return prompt
    return [dict(part) if isinstance(part, Mapping) else int(part) for part in prompt]


def _listed(values: Sequence[int] | Sequence[bool] | None) -> list[int] | None:
    return None if values is None else np.asarray(values).tolist()
