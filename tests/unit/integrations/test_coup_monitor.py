"""The coup probe's monitor uses the thresholds of a card only where they hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inspect_lens.agents.control import coup_probe_monitor_builder, probe_monitor_builder
from inspect_lens.errors import SpecError
from inspect_lens.probe import Probe, ProbeCard, Threshold, clopper_pearson


def saved(folder: Path, selection: str) -> str:
    strict = Threshold(
        value=0.5, fpr=0.01, control="harmless", n_control=300, n_above=3,
        interval=clopper_pearson(3, 300),
    )  # fmt: skip
    card = ProbeCard(
        name="tiny/p", layers=(1,), hidden=4, selection=selection, thresholds=(strict,)
    )
    Probe.from_direction(np.ones(4), card=card).save(folder / "p")
    return str(folder / "p")


def test_thresholds_for_a_part_of_the_tokens_are_used_on_that_part(tmp_path: Path) -> None:
    probe = saved(tmp_path, "reasoning")
    assert coup_probe_monitor_builder(probe=probe) is not None
    # Over other tokens than those of the card its rate does not hold.
    assert probe_monitor_builder(probe=probe) is not None
    with pytest.raises(SpecError, match="has none for these settings"):
        probe_monitor_builder(probe=probe, selection="")


def test_thresholds_for_all_tokens_are_used(tmp_path: Path) -> None:
    probe = saved(tmp_path, "")
    assert coup_probe_monitor_builder(probe=probe) is not None
    with pytest.raises(SpecError, match=r"has fpr=0\.01;"):
        coup_probe_monitor_builder(probe=probe, fpr=0.001)
