"""Compiles what a worker's warm-up compiles, for a GPU that is not there, and tells what it takes.

`python -m tests.kit.off_gpu.compiled --capability 90`
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from inspect_lens._engine.readout.logit_lens import warm_up_lens
from inspect_lens._engine.readout.readers import warm_up_readout
from inspect_lens._engine.tap.buffers import TapState
from inspect_lens._engine.tap.op import warm_up
from inspect_lens.spec import TapPoint

from .host_as_gpu import HostAsGpu

__all__: list[str] = []

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)

_WIDTHS: Final = {
    896: (128, 4864),
    2048: (128, 512, 4096),
    3584: (512, 2048, 4096, 14336, 18944),
    4096: (128, 1024, 14336),
    5120: (1024, 13824, 27648),
    7168: (256, 16384, 18432),
    8192: (1024, 28672),
    16384: (1024, 53248),
}
"""By width of the stream, those of heads, experts and neurons in models that have it."""

_VOCAB: Final = 128_256
"""Tokens of a vocabulary."""

_KEPT: Final = 8192
"""Rows up to this width have to fit into registers. What does not lies in memory, which costs time
in each edit, and on the whole device as much as its threads could have at once."""

_LITTLE: Final = 64
"""Bytes of a thread outside registers that do not matter."""


class Usage(NamedTuple):
    """What a kernel takes."""

    registers: int
    """Of a thread."""
    stack: int
    """Bytes that a thread has in memory, for want of registers."""
    warps: int
    shared: int
    """Bytes of a program."""


class _NoDevice:
    """What Triton asks of a machine before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def _compiled_only(launches: list[tuple[dict[str, Any], Any]]) -> Callable[..., Any]:
    """`JITFunction.run` that compiles, and notes the arguments and the kernel in `launches`."""
    run: Any = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        made = run(kernel, *args, grid=grid, warmup=True, **named)
        launches.append((named | {"kernel": kernel.__name__}, made))
        return made

    return compile_only


def _usage(kernel: Any) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True, check=True, text=True,
        ).stdout  # fmt: skip
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    meta = kernel.metadata
    return Usage(int(found[1]), int(found[2]), meta.num_warps, meta.shared)


def _launches(stream: int) -> Iterator[tuple[str, int, Usage]]:
    """Name, width of the rows and usage of each kernel that a worker compiles when it starts."""
    made: list[tuple[dict[str, Any], Any]] = []
    JITFunction.run = _compiled_only(made)
    with HostAsGpu():
        for dtype in _DTYPES:
            state = TapState(
                taps=(TapPoint("resid_post", 0), TapPoint("resid_post", 1)),
                hidden=stream,
                dtype=dtype,
                max_tokens=1,
                max_groups=1,
                ring_rows=64,
                bank_rows=1,
                device=torch.device("cuda"),
            )
            warm_up(state, _WIDTHS[stream])
            warm_up_readout(state.ring, state.scratch.new_empty(1))
            warm_up_lens(_VOCAB, dtype, torch.device("cuda"))
    for named, kernel in made:
        yield named["kernel"], named.get("WIDTH", _VOCAB), _usage(kernel)


def main() -> None:
    """Print a line per kernel and width, and fail where rows should have fit into registers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--capability", type=int, default=90, help="of the GPU; 90 is an H100")
    parser.add_argument("--stream", type=int, action="append", choices=_WIDTHS, help="all of them")
    args = parser.parse_args()
    driver.set_active(_NoDevice(args.capability))
    sys.stdout.write("kernel      stream  width  warps  registers  stack  shared\n")
    too_much = []
    for stream in args.stream or _WIDTHS:
        most: dict[tuple[str, int], Usage] = {}
        for name, width, usage in _launches(stream):
            known = most.get((name, width), usage)
            most[name, width] = Usage(*map(max, known, usage))
        for (name, width), usage in most.items():
            sys.stdout.write(
                f"{name:10} {stream:7} {width:6} {usage.warps:6} {usage.registers:10}"
                f" {usage.stack:6} {usage.shared:7}\n"
            )
            if usage.stack > _LITTLE and max(stream, width) <= _KEPT:
                too_much.append(f"{name} at width {width} of {stream}")
        sys.stdout.flush()
    if too_much:
        sys.exit("more than the registers hold: " + ", ".join(too_much))


if __name__ == "__main__":
    main()
