"""Checks the Triton kernels without a GPU: what they mean, and that they compile.

`python -m tests.kit.off_gpu` puts Triton into `build`, beside the environment and not into it: vLLM
for CPUs would warn of a Triton that it cannot use at each start.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.kit.repository import ROOT

__all__: list[str] = []

_TORCH: Final = "2.13"
_TRITON: Final = "3.7.1"
"""What this release of torch asks for on a machine with CUDA."""

_TESTS: Final = ("test_kernel.py", "test_logits.py", "test_programs.py", "test_readout.py")


def _triton() -> Path:
    """Folder that has Triton; it is installed where there is none."""
    torch = importlib.metadata.version("torch")
    if not torch.startswith(f"{_TORCH}."):
        sys.exit(f"torch is {torch}: name the Triton that it asks for in {Path(__file__).name}")
    folder = ROOT / "build" / f"triton-{_TRITON}"
    if not (folder / "triton").is_dir():
        sys.stdout.write(f"installing Triton {_TRITON} into {folder}: 200 MB, unpacked 700 MB\n")
        sys.stdout.flush()
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), f"triton=={_TRITON}"], check=True)
    return folder


def main() -> None:
    """Run both checks, and say in the last line how they went."""
    parser = argparse.ArgumentParser(prog="python -m tests.kit.off_gpu", description=__doc__)
    parser.add_argument(
        "--all", action="store_true", help="wide rows and many tokens too: far longer"
    )
    parser.add_argument("--capability", default="90", help="of the GPU to compile for; 90: H100")
    args = parser.parse_args()
    folder = _triton()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }
    # It meets infinity where a `where` throws it away.
    plugin = ["-p", "tests.kit.off_gpu.interpreted", "-W", "ignore::RuntimeWarning"]
    plugin += ["--all-cases"] if args.all else []
    tests = [f"tests/gpu/{name}" for name in _TESTS]
    commands = {
        "meaning": (["pytest", "-q", "-n", "auto", *plugin, *tests], {"TRITON_INTERPRET": "1"}),
        "compilation": (
            ["tests.kit.off_gpu.compiled", "--capability", args.capability],
            {"TRITON_INTERPRET": "0"},
        ),
    }
    failed = []
    for name, (command, more) in commands.items():
        ran = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment | more)
        if ran.returncode:
            failed.append(name)
    if failed:
        sys.exit(f"the kernels FAILED: {' and '.join(failed)}")
    sys.stdout.write(
        f"the kernels mean what their definitions say, and compile for {args.capability} "
        f"(Triton {_TRITON}); races and speed show on a GPU only\n"
    )


if __name__ == "__main__":
    main()
