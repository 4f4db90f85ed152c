"""No receipt says how much of a prompt another tenant has sent."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

pytest.importorskip("vllm")

from inspect_lens._vllm.frontend import state
from inspect_lens._vllm.frontend.admission import compiled_of, seal_core
from inspect_lens._vllm.frontend.state import FrontEnd
from inspect_lens._vllm.http.bodies import LensBodies
from inspect_lens._vllm.registered.rows import BLOCK, RowCache, reuse_of
from inspect_lens.spec import ENVELOPE_KEY, Receipt, TensorData
from tests.kit.promises import Promise
from tests.unit.vllm.frontend.test_front import facts
from tests.unit.vllm.frontend.test_sealing import extra, parameters, steer

PROMPT = list(range(1, 2 * BLOCK + 4))


def _counts(model: type[BaseModel] = Receipt) -> Iterator[str]:
    """Fields of a receipt that say what was there before the request came."""
    for name, field in model.model_fields.items():
        if name.startswith("cached_"):
            yield f"{model.__name__}.{name}"
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _counts(part)


PROMISE = Promise("a receipt tells nothing of other tenants", surfaces=_counts())

TENANTS: list[tuple[tuple[str, str | None], tuple[str, str | None], bool]] = [
    (("", None), ("", None), True),
    (("Bearer a", None), ("Bearer a", None), True),
    (("Bearer a", None), ("Bearer b", None), False),
    (("Bearer a", None), ("", None), False),
    (("", "salt"), ("", None), False),
    (("Bearer a", "salt"), ("Bearer b", "salt"), False),
    (("Bearer a", "x"), ("Bearer a", "y"), False),
]
"""Key and salt of two requests, and whether they are one tenant's."""


def _served(key: str, run: Callable[[], Any]) -> Any:
    """Run something as the server does for whoever shows a key."""
    found: list[Any] = []

    async def never(*message: Any) -> Any:
        raise AssertionError

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(run())

    headers = [(b"authorization", key.encode())] if key else []
    scope = {"type": "http", "method": "GET", "path": "/", "headers": headers}
    serving = LensBodies(app, lambda: None)(scope, never, never)
    with pytest.raises(StopIteration):
        contextvars.copy_context().run(serving.send, None)
    return found[0]


def _sealed(asked: dict[str, Any], tenant: tuple[str, str | None], cache: RowCache) -> Any:
    processor = SimpleNamespace(inspect_lens_facts=facts(8), inspect_lens_refusal=None)
    params = parameters(asked, {})
    key, salt = tenant
    core = SimpleNamespace(
        prompt_token_ids=PROMPT,
        sampling_params=params,
        cache_salt=salt,
        lora_request=None,
        mm_features=None,
    )

    def run() -> None:
        compiled = compiled_of(processor, params) or pytest.fail("nothing is asked")
        seal_core(core, compiled, None, cache)

    _served(key, run)
    return core


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> FrontEnd:
    made = FrontEnd()
    made.engines = [facts(8)]
    monkeypatch.setattr(state._Holder, "front_end", made)
    return made


@PROMISE.on("CaptureReceipt.cached_positions")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("front")
    for first, second, is_one in TENANTS:
        cache = RowCache(1 << 20, is_served=True)
        known = reuse_of(
            _sealed(extra(capture={}), first, cache).sampling_params.extra_args[ENVELOPE_KEY]
        )
        assert known is not None
        rows = np.zeros((4, len(PROMPT), 8), dtype=np.float32)
        known.whole(TensorData(rows, "float32"), [])
        cache.settle()
        again = reuse_of(
            _sealed(extra(capture={}), second, cache).sampling_params.extra_args[ENVELOPE_KEY]
        )
        assert again is not None
        assert again.n_positions == (2 * BLOCK if is_one else 0), (first, second)


@PROMISE.on("SteerReceipt.cached_tokens")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("front")
    cache = RowCache(1 << 20, is_served=True)
    for first, second, is_one in TENANTS:
        salts = [_sealed(steer(), tenant, cache).cache_salt for tenant in (first, second)]
        assert (salts[0] == salts[1]) is is_one, (first, second)


test_promise = PROMISE.test()
