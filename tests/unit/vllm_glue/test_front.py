"""Several engines in one process: what one of them can use may be registered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from inspect_lens._vllm._front import FrontEnd
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import EngineFacts, EngineProbe, LensRequest, tap_points


def facts(hidden: int, n_layers: int = 4) -> EngineFacts:
    layers = tuple(range(n_layers))
    options: dict[str, Any] = {
        "model": f"m{hidden}",
        "n_layers": n_layers,
        "hidden": hidden,
        "dtype": "float32",
        "layers": layers,
        "sites": ("resid_post",),
        "taps": tap_points(["resid_post"], layers),
        "max_step_tokens": 32,
        "ring_rows": 128,
        "bank_rows": 16,
        "vllm_version": "0",
    }
    known = EngineFacts.__dataclass_fields__
    return EngineFacts(
        **options, **({"is_speculative": False} if "is_speculative" in known else {})
    )


def probe(hidden: int) -> EngineProbe:
    return EngineProbe(layers=(1,), tensors={"weight": np.ones((1, hidden))})


def test_a_probe_needs_one_engine_that_it_fits() -> None:
    front = FrontEnd()
    front.engines = ["it is disabled", facts(8), facts(16)]
    front.register("a", probe(16))
    with pytest.raises(SpecError, match="width 5"):
        front.register("b", probe(5))
    front.engines = ["it is disabled"]
    with pytest.raises(UnsupportedError, match="it is disabled"):
        front.register("c", probe(16))
    assert front.registry.describe().keys() == {"a"}


def test_a_request_is_judged_against_its_own_engine() -> None:
    front = FrontEnd()
    front.engines = [facts(8), facts(16)]
    front.register("a", probe(16))
    request = LensRequest(probes=["a"])
    front.check_uses(request, facts(16))
    with pytest.raises(SpecError, match="m8"):
        front.check_uses(request, facts(8))
