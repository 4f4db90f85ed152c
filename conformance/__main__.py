"""`python -m conformance --backend inspect-lens --model FOLDER --out result.json`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kit.api_server import flags
from tests.kit.arguments import key_and_json
from tests.kit.files import write_json

from .protocol import PROFILES, Backend, FloatArray, Suite
from .suite import NAMES, run_suite

__all__ = ["main"]


class HuggingFaceTruth:
    """The checkpoint in float32, run by transformers on the CPU."""

    def __init__(self, folder: Path) -> None:
        from tests.kit.reference import HuggingFace

        self._twin = HuggingFace(folder)
        config = json.loads((folder / "config.json").read_text())
        self.layers = int(config["num_hidden_layers"])
        self.hidden = int(config["hidden_size"])

    def residual_stream(self, tokens: Sequence[int]) -> FloatArray:
        """Residual stream after each layer."""
        rows: FloatArray = self._twin.residual_stream(tokens).numpy()
        return rows


def write_model(folder: Path) -> None:
    """Write the marked model, in the type that the engines of this machine will use."""
    import torch

    from tests.kit.tiny_models import marked_llama

    from .offline import has_gpu

    marked_llama(folder, dtype=torch.bfloat16 if has_gpu() else torch.float32)


def _backend(options: argparse.Namespace, model: Path, work: Path) -> Backend:
    from .offline import OWN, PEER, Offline

    if options.backend.startswith(("http://", "https://")):
        from .over_http import OverHttp

        return OverHttp(
            options.backend, model, profile=options.profile, inspect_path=options.inspect_path
        )
    packages = {"inspect-lens": OWN, "vllm-lens": PEER}
    if options.backend not in packages:
        raise SystemExit(f"--backend {options.backend!r}: {sorted(packages)} or http://HOST:PORT")
    return Offline(
        packages[options.backend],
        model,
        work=work,
        path=options.path,
        options=dict(options.engine_option),
        inspect_path=options.inspect_path,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; the exit code is 1 where a test failed."""
    options = _options(arguments)
    if options.print_server:
        words = ["python -m vllm.entrypoints.openai.api_server", f"--model {options.model}"]
        words += [*flags(PROFILES[options.print_server]), "--enable-prompt-tokens-details"]
        sys.stdout.write(" ".join(words) + "\n")
        return 0
    model = Path(options.model).absolute()
    if not (model / "config.json").exists():
        model.mkdir(parents=True, exist_ok=True)
        write_model(model)
    with contextlib.ExitStack() as stack:
        scratch = tempfile.TemporaryDirectory(prefix="conformance-")
        work = Path(options.logs or stack.enter_context(scratch)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        backend = _backend(options, model, work)
        suite = Suite(backend, HuggingFaceTruth(model), work, aborts=options.aborts)
        words = list(sys.argv[1:] if arguments is None else arguments)

        def keep(result: dict[str, Any]) -> None:
            # Without folders, which are of one machine.
            shown = [Path(w).name if "/" in w and "://" not in w else w for w in words]
            result["command"] = " ".join(["python -m conformance", *shown])
            if options.out:
                write_json(Path(options.out), result)

        result = run_suite(suite, options.tests, keep)
        keep(result)
    return int(any(row["passed"] is False for row in result["results"]))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m conformance", description="Ten tests of an engine that captures and steers."
    )
    parser.add_argument(
        "--backend", default="inspect-lens", help="inspect-lens, vllm-lens, or http://HOST:PORT"
    )
    parser.add_argument(
        "--model", required=True, help="folder of the marked model; written if it is not there"
    )
    parser.add_argument("--out", help="JSON file for the result")
    parser.add_argument("--path", help="folder where the backend's package lies, if not installed")
    parser.add_argument(
        "--inspect-path",
        default="",
        help="folder where Inspect lies for test 9, if not beside the engine",
    )
    parser.add_argument(
        "--engine-option", action="append", type=key_and_json, default=[], metavar="KEY=JSON",
        help="option of every engine that is started, such as enforce_eager=true",
    )  # fmt: skip
    parser.add_argument("--tests", type=int, nargs="+", default=list(NAMES), help="numbers")
    parser.add_argument("--aborts", type=int, default=500, help="clients that go away in test 7")
    parser.add_argument(
        "--profile", choices=list(PROFILES), default="wide", help="that an HTTP server was given"
    )
    parser.add_argument("--logs", help="keep what engines print, and Inspect's logs, here")
    parser.add_argument(
        "--print-server", choices=list(PROFILES), help="print a server's command and end"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
