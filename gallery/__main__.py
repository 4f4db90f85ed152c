"""`python -m gallery NAME`: measure, and write the numbers, the page and its figure."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gallery._chart import draw
from gallery._page import page
from gallery._replication import MissingDataError, run, stem, work_folder
from gallery.replications import REPLICATIONS
from inspect_lens.errors import LensError
from organism._options import positive
from tests.kit.child import ChildError
from tests.kit.real_models import REAL_MODELS, IndexUnreachableError

MODELS = "~/.cache/inspect_lens/real-models"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one replication; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m gallery", description=(__doc__ or "").partition(": ")[2]
    )
    parser.add_argument("name", choices=list(REPLICATIONS))
    parser.add_argument("--model", choices=list(REAL_MODELS), help="another than the page's")
    parser.add_argument("--data", type=Path, help="folder that has the files of the page")
    parser.add_argument("--n", type=positive, help="samples of each kind; the page's by default")
    parser.add_argument("--models", type=Path, default=MODELS, help="where models are kept")
    parser.add_argument("--out", type=Path, help="folder of the result; else one of logs/gallery")
    asked = parser.parse_args(arguments)
    replication = REPLICATIONS[asked.name]
    model = asked.model or replication.model
    called = stem(asked.name, replication, model)
    out = asked.out or Path("logs/gallery") / called
    try:
        result = run(
            asked.name, replication, model=model, models=asked.models.expanduser(),
            work=work_folder(out, model, asked.n), data=asked.data, n=asked.n,
        )  # fmt: skip
    except (MissingDataError, IndexUnreachableError, LensError, ChildError) as error:
        sys.stderr.write(f"gallery: {error}\n")
        return 2
    (out / "result.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    shown = replication.show(result["numbers"])
    made = "this command of result.json, which is beside it"
    text = page(asked.name, replication, {model: result}, figures=".", made=made)
    (out / "page.md").write_text(text)
    for palette in ("light", "dark"):
        (out / f"replication-{called}-{palette}.svg").write_text(draw(shown.chart, palette))
    sys.stdout.write(f"{shown.verdict}\n{out / 'page.md'}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
