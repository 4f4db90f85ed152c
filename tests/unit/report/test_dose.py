"""The dose-response figure and page."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspect_lens.errors import SpecError
from inspect_lens.vector import DoseResponse, Response, dose_response
from inspect_lens.view import write_dose_response


def curves() -> dict[str, DoseResponse]:
    rng = np.random.default_rng(0)
    made = {}
    for kind, slope in (("vector", 3.0), ("random", 0.0)):
        steered = [
            Response(str(p), float(s), float(rng.random() < 1 / (1 + np.exp(-slope * s))))
            for p in range(30)
            for s in (-2, -1, 1, 2)
        ]
        made[kind] = dose_response(steered, {str(p): float(p % 2) for p in range(30)})
    return made


def test_the_same_curves_give_the_same_picture(tmp_path: Path) -> None:
    def png(**how: Any) -> bytes:
        return write_dose_response(
            curves(), tmp_path / "dose.png", value="share", **how
        ).read_bytes()

    assert png(title="t").startswith(b"\x89PNG")
    assert png(title="t") == png(title="t")
    assert png(title="t") != png(extra=curves(), extra_value="x")


def test_the_page_holds_figure_and_numbers_and_needs_no_network(tmp_path: Path) -> None:
    made = curves()
    page = write_dose_response(made, tmp_path / "a" / "dose.html", title="A <b> sweep").read_text()
    image = re.search(r'src="data:image/png;base64,([^"]+)"', page)
    assert image is not None
    assert base64.b64decode(image[1]).startswith(b"\x89PNG")
    assert "A &lt;b&gt; sweep" in page
    own = made["vector"]
    assert f"{own.flip_rate:.2f} [{own.flip_rate_interval.low:.2f}, " in page
    assert f"{own.effect:.2f} [{own.effect_interval.low:.2f}, 1.00]" in page
    assert own.effect_interval.low < 0.8, "the same in all prompts, which is no certainty"
    assert "http" not in page
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["dose.html"]


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="run steering_sweep"):
        write_dose_response({}, tmp_path / "dose.png")
    with pytest.raises(SpecError, match="allowed endings"):
        write_dose_response(curves(), tmp_path / "dose.pdf")
