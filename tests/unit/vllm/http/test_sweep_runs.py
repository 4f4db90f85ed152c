"""Runs of a sweep that the engine answered without what was asked."""

from __future__ import annotations

import pytest

from inspect_lens._vllm.http.sweep_runs import _check_ran
from inspect_lens.errors import CaptureError
from inspect_lens.spec import CaptureSpec, LensRequest, Receipt, Zero

ASKED = (
    LensRequest(edits=(Zero(layers=(1,), site="attn_out"),)),
    LensRequest(capture=CaptureSpec(layers=(1,))),
)
BARE = Receipt(
    n_prompt=3, n_completion=1, cache_salted=False, paths=(), engine="inspect_lens",
    version="0", vllm_version="0",
)  # fmt: skip


@pytest.mark.parametrize("asked", ASKED, ids=["edit", "capture"])
@pytest.mark.parametrize("receipt", [None, BARE], ids=["none", "bare"])
def test_a_run_without_what_was_asked_is_refused(
    asked: LensRequest, receipt: Receipt | None
) -> None:
    with pytest.raises(CaptureError, match="without its edit or capture"):
        _check_ran(asked, receipt)
