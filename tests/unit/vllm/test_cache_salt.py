"""Whose blocks a request finds: salts are taken apart, and a caller's own stay as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspect_lens._vllm.cache_salt import SALT_WRAPPERS, salt_of, salted


def vllms(request: Any, start: int, end: int, mm: int) -> tuple[Any, int]:
    """As vLLM has it: the salt is a key of the first block."""
    keys = [("lora", "a")] if request.lora else []
    if start == 0 and request.cache_salt:
        keys.append(("cache_salt", request.cache_salt))
    return (tuple(keys) or None), mm + 1


keys_of = SALT_WRAPPERS["block_keys"](vllms)


def blocks(salt: str | None, *, lora: bool = False) -> list[Any]:
    request = SimpleNamespace(cache_salt=salt, lora=lora)
    found = [keys_of(request, start, start + 16, 3) for start in range(0, 64, 16)]
    assert request.cache_salt == salt
    assert {n for _, n in found} == {4}
    return [keys for keys, _ in found]


@given(st.none() | st.text(), st.integers(0, 10**9 - 1), st.text())
def test_a_salt_comes_apart_as_it_was_made(callers: str | None, first: int, own: str) -> None:
    if "|inspect_lens@" not in own:
        assert salt_of(salted(callers, first, own)) == (callers or None, first, own)


@pytest.mark.parametrize("first", [0, 15, 16, 40, 63, 64])
def test_a_block_has_the_key_where_the_first_edit_is(first: int) -> None:
    found = blocks(salted("theirs", first, "t:abc"))
    wanted: list[Any] = [(("cache_salt", "theirs"),), None, None, None]
    if first < 64:
        wanted[first // 16] = (*(wanted[first // 16] or ()), ("cache_salt", "t:abc"))
    assert found == wanted
    with_lora = blocks(salted(None, first, "t:abc"), lora=True)
    assert all(keys[0] == ("lora", "a") for keys in with_lora)


@pytest.mark.parametrize(
    "salt",
    [None, "", "theirs", "|inspect_lens@", "|inspect_lens@x:y", "|inspect_lens@" + "9" * 9999],
)
def test_a_callers_own_salt_stays_as_it_is(salt: str | None) -> None:
    assert blocks(salt) == [(("cache_salt", salt),) if salt else None, None, None, None]


def test_a_fault_of_vllms_own_leaves_the_request_as_it_was() -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("broken")

    request = SimpleNamespace(cache_salt=salted(None, 5, "own"))
    with pytest.raises(ValueError, match="broken"):
        SALT_WRAPPERS["block_keys"](broken)(request, 0, 16, 0)
    assert request.cache_salt == salted(None, 5, "own")
