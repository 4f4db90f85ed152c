from __future__ import annotations

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspect_lens.errors import SpecError
from inspect_lens.probe import ProbeCard, SeenSamples
from inspect_lens.probe.card._files import render_card

SAMPLES = st.lists(st.binary(max_size=4), max_size=30)


@given(SAMPLES, SAMPLES, SAMPLES)
def test_exactly_the_samples_that_took_part_are_found(
    training: list[bytes], control: list[bytes], judged: list[bytes]
) -> None:
    seen = SeenSamples.of("content", training=training, control=control)
    seen = SeenSamples.model_validate_json(seen.model_dump_json())
    found = seen.find(judged)
    assert found.get("training", []) == [i for i, s in enumerate(judged) if s in training]
    assert found.get("control", []) == [i for i, s in enumerate(judged) if s in control]
    assert "selection" not in found
    assert (seen.count("training"), seen.count("selection")) == (len(set(training)), 0)


def test_it_is_written_as_it_says() -> None:
    seen = SeenSamples.of("content", training=[b"b", b"a", b"a"])
    hashes = sorted(hashlib.sha256(s).digest()[:6] for s in (b"a", b"b"))
    assert base64.b64decode(seen.training) == b"".join(hashes)
    assert len(seen.training) == 16
    assert (seen.control, seen.with_control([b"c"]).find([b"c"])) == (None, {"control": [0]})
    fitted = seen.with_calibration([b"d", b"a"])
    assert fitted.find([b"d", b"a"]) == {"training": [1], "calibration": [0, 1]}
    assert (
        fitted.with_calibration(None) == seen == SeenSamples(by="content", training=seen.training)
    )
    with pytest.warns(UserWarning, match="not known by their content"):
        assert seen.with_control([b"c"]).with_control(None, added=True).count("control") == 1
    card = ProbeCard(name="t/p", layers=(1,), hidden=2, seen=seen.with_control([b"c"]))
    assert "| samples listed | 2 training, 1 control, by content |" in render_card(card, sha256="")


@pytest.mark.parametrize("text", ["!", "QUJD", "QUJDREVGR"])
def test_what_is_no_list_of_hashes_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        SeenSamples(by="content", training=text)
