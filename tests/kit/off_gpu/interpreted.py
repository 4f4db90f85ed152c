"""Plug-in for pytest: tests of kernels run in Triton's interpreter, on a machine without a GPU.

`TRITON_INTERPRET=1 python -m pytest -p tests.kit.off_gpu.interpreted tests/gpu/test_kernel.py`
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from triton import knobs
from triton.runtime import interpreter

from .host_as_gpu import HostAsGpu
from .kernels import kernel_modules

__all__: list[str] = []

_LARGEST: Final = {
    "n_tokens": 100,
    "width": 512,
    "row": 512,
    "tokens": 70,
    "columns": 20,
    "vocab": 2000,
}
"""Of the arguments of a case: an interpreter takes seconds for what a GPU does in microseconds."""

_convert: Any = interpreter._convert_float
_launch: Any = interpreter.GridExecutor.__call__
_launches: list[str] = []
"""Kernels that the running test has launched."""


def _counted(self: Any, *args: Any, **kwargs: Any) -> Any:
    _launches.append(self.fn.__name__)
    return _launch(self, *args, **kwargs)


def _rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
    """Make bfloat16 of float32 as a GPU does; the interpreter cuts the last bits off."""
    if source.name != "fp32" or target.name != "bf16":
        return _convert(values, source, target, mode)
    rounded = torch.from_numpy(values.copy()).bfloat16()
    return rounded.view(torch.int16).numpy().view("uint16")


def _range(*bounds: Any) -> Iterator[Any]:
    """What `range` is inside a kernel: its numbers are tensors, with `to` and a type."""
    for i in range(*[int(bound) for bound in bounds]):
        yield interpreter.interpreter_semantic.to_tensor(i, False)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for cases that take minutes."""
    parser.addoption("--all-cases", action="store_true", help="large tensors, too")


def pytest_configure(config: pytest.Config) -> None:
    """Make tests believe in a GPU, and kernels read as on one."""
    if not knobs.runtime.interpret:
        raise pytest.UsageError("set TRITON_INTERPRET=1: without it Triton compiles for a GPU")
    # Files of tests ask when they are imported.
    torch.cuda.is_available = lambda: True
    torch.cuda.synchronize = lambda device=None: None
    interpreter._convert_float = _rounded
    interpreter.GridExecutor.__call__ = _counted
    for name in kernel_modules():
        importlib.import_module(name).__dict__["range"] = _range


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out large cases, and tests of the compiler, or of what no kernel does."""
    left_out = [
        item
        for item in items
        if "compiled" in item.name
        or "on_the_host" in item.name
        or not (config.getoption("all_cases") or _is_small(item))
    ]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def _is_small(item: pytest.Item) -> bool:
    values = getattr(getattr(item, "callspec", None), "params", {})
    return all(values.get(name, 0) <= most for name, most in _LARGEST.items())


@pytest.fixture(autouse=True)
def _host_as_gpu() -> Iterator[None]:
    _launches.clear()
    with HostAsGpu():
        yield
    assert _launches, "this test was to run a kernel, and ran none"
