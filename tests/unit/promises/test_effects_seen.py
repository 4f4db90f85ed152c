"""No effect is reported where the unedited answers are at a floor or ceiling and nothing moves."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import pkgutil
from typing import Any

import pytest
from inspect_ai.scorer import SampleScore, Score
from inspect_ai.util import registry_info

import inspect_lens.scorer
from inspect_lens.scorer import dose_curves, dose_metric, dose_table
from tests.kit.promises import Promise


def reports() -> set[str]:
    """What reads the cells of a whole sweep: all but the scorers, which see one sample."""
    found = set()
    for info in pkgutil.iter_modules(inspect_lens.scorer.__path__):
        module = importlib.import_module(f"inspect_lens.scorer.{info.name}")
        uses = {getattr(value, "__module__", "") for value in vars(module).values()}
        if info.name != "_sweeps" and "inspect_lens.scorer._sweeps" in uses:
            tree = ast.parse(inspect.getsource(module))
            own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            public = own & set(inspect_lens.scorer.__all__)
            found |= {n for n in public if registry_type(getattr(module, n)) != "scorer"}
    return found


def registry_type(value: Any) -> str:
    try:
        return str(registry_info(value).type)
    except ValueError:
        return ""


PROMISE = Promise("no effect is reported at a floor or a ceiling", surfaces=reports())


def swept(rate: float) -> list[SampleScore]:
    cells = [["baseline", None, 0.0, rate, None, False], ["vector", 3, 1.0, rate, "v", False],
             ["random", 3, 1.0, rate, "v", False]]  # fmt: skip
    score = Score(value=rate, metadata={"cells": cells})
    return [SampleScore(score=score, sample_id=str(i)) for i in range(12)]


@PROMISE.on("dose_metric")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    for by in ("best", "variant"):
        compute: Any = dose_metric(by=by, n_resamples=50)  # type: ignore[arg-type]
        for rate in (0.0, 1.0):
            assert not any("effect" in name for name in compute(swept(rate)))


@PROMISE.on("dose_table")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    for rate in (0.0, 1.0):
        for row in dose_table(swept(rate), n_resamples=50):
            assert (row.interval, row.usable) == (None, False)
            assert math.isnan(row.effect)
            assert row.unseen


@PROMISE.on("dose_curves")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    for rate in (0.0, 1.0):
        curve = dose_curves(swept(rate), n_resamples=50)["vector"]
        assert math.isnan(curve.effect)
        assert math.isnan(curve.effect_interval.low)
        assert "all values are one" in curve.effect_interval.method


test_promise = PROMISE.test()
