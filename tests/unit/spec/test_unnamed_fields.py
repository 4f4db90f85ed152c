"""Fields are given by name, and who forgets it is told how."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from inspect_lens import CaptureSpec
from inspect_lens.client import Tensors
from inspect_lens.errors import SpecError


def test_a_value_without_a_name_is_told_its_name() -> None:
    make: Any = CaptureSpec
    with pytest.raises(
        SpecError, match=r"CaptureSpec: fields have names; write CaptureSpec\(layers=…\)"
    ):
        make([4])
    assert "unnamed" not in inspect.signature(make).parameters


def test_a_tensor_that_was_not_captured_is_told_beside_those_that_were() -> None:
    with pytest.raises(KeyError, match="'residual' was not captured; there is nothing"):
        Tensors({})["residual"]
