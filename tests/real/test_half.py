"""bfloat16: rows are as near to float32 as Hugging Face's own bfloat16 rows are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from inspect_lens.spec import Add, result_name
from tests.engine.test_capture import fed
from tests.kit.reference import HuggingFace, relative_errors

from .conftest import Served
from .test_rows import capture

pytestmark = [pytest.mark.real, pytest.mark.half]

Measured = Callable[[str, float, float], None]

SITES = ("attn_out", "mlp_out", "resid_post")
RATIO = 1.5
"""Of the median error of a row to that of Hugging Face in bfloat16, at most."""


def test_rows_and_a_steered_stream(served: Served, measured: Measured) -> None:
    half = HuggingFace(served.folder)
    half.model.to(torch.bfloat16)
    layer = served.layers // 2
    vector = torch.randn(served.hidden, generator=torch.Generator().manual_seed(1))
    edit = Add(vector=vector.numpy(), layers=[layer]).model_dump(mode="json")
    prompts = [served.prompt(which) for which in ("multi-byte", "code")]
    for steered in (False, True):
        request = capture(*SITES, edits=[edit]) if steered else capture(*SITES)
        outputs = served.engine.run(prompts, request, max_tokens=1)
        change = {("resid_post", layer): lambda h: h + vector.to(h.dtype)} if steered else {}
        for output in outputs:
            ids = fed(output)
            truth = served.reference.sites(ids, change, sites=SITES)
            theirs = half.sites(ids, change, sites=SITES)
            worst = 0.0
            for site in SITES:
                ours = output.activations[result_name(site)]  # type: ignore[arg-type]
                assert ours.dtype == torch.bfloat16
                of_engine = relative_errors(ours, truth[site])
                of_theirs = relative_errors(theirs[site], truth[site])
                worst = max(worst, float(of_engine.median() / of_theirs.median()))
            what = "a steered stream" if steered else "rows"
            measured(f"bfloat16, {what}: error over that of Hugging Face", worst, RATIO)
