"""Who has no room left for unfetched results is told before a request costs anything."""

# ruff: noqa: F811 - pytest finds the fixture by its name

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from inspect_lens._vllm.frontend import admission
from inspect_lens._vllm.http.payloads import PayloadStore
from inspect_lens.errors import UnsupportedError
from tests.unit.vllm.frontend.test_sealing import (  # noqa: F401
    IDS,
    call,
    extra,
    parameters,
    processor,
)

ROW_BYTES = 4 * 4 * 8
"""Four layers of the engine, eight float32 each."""


@pytest.mark.parametrize(
    ("asked", "changes", "n_bytes"),
    [
        ({}, {}, 3 * ROW_BYTES),  # a text may end with its first token
        ({}, {"min_tokens": 2}, 4 * ROW_BYTES),
        ({}, {"ignore_eos": True}, 4 * ROW_BYTES),
        ({}, {"ignore_eos": True, "stop": ["x"]}, 3 * ROW_BYTES),
        ({}, {"ignore_eos": True, "stop_token_ids": [1]}, 3 * ROW_BYTES),
        ({}, {"ignore_eos": True, "max_tokens": None}, 63 * ROW_BYTES),
        ({}, {"n": 3}, 9 * ROW_BYTES),
        ({"layers": [1]}, {}, 3 * ROW_BYTES // 4),
        ({"positions": [0, 3]}, {}, ROW_BYTES),
        ({"positions": "completion"}, {}, 0),
        ({"reduce": "mean"}, {}, ROW_BYTES),
        ({"reduce": "last"}, {}, ROW_BYTES),
        ({"reduce": "norm"}, {}, 3 * 4 * 4),
        ({"dtype": "bfloat16"}, {}, 3 * ROW_BYTES // 2),
    ],
)
def test_who_has_no_room_is_told_before_anything_is_scheduled(
    processor: Any,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    changes: dict[str, Any],
    n_bytes: int,
) -> None:
    """By what is sure to come, however soon the text ends."""
    monkeypatch.setattr(admission, "is_serving", lambda: True)
    params = parameters(extra(capture={"transport": "binary", **asked}), changes)
    for room in {n_bytes, max(n_bytes - 1, 0)}:
        store = PayloadStore(max_bytes=2000 * ROW_BYTES)
        monkeypatch.setattr(admission, "payloads", store)
        store.put(b"x" * (1000 * ROW_BYTES - room))
        if room == n_bytes:
            call(processor, IDS, params)
        else:
            with pytest.raises(Exception, match="bytes of this client's results wait") as caught:
                call(processor, IDS, params)
            assert caught.type.__name__ in ("GenerationError", "GracefulHTTPError")
    inline = parameters(extra(capture=asked), changes)
    call(processor, IDS, inline)


def test_what_is_larger_than_the_store_is_refused_at_once(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "is_serving", lambda: True)
    monkeypatch.setattr(admission, "payloads", PayloadStore(max_bytes=4 * ROW_BYTES))
    with pytest.raises(UnsupportedError, match="raise INSPECT_LENS_STORE_BYTES"):
        call(processor, IDS, parameters(extra(capture={"transport": "binary"}), {}))
