"""`python -m gallery NAME`: measure, and write the numbers, the page and its figure."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gallery._chart import draw
from gallery._page import page
from gallery._replication import MissingDataError, run
from gallery.replications import REPLICATIONS
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
    parser.add_argument("--n", type=int, help="samples of each kind; the page's by default")
    parser.add_argument("--models", type=Path, default=MODELS, help="where models are kept")
    parser.add_argument("--out", type=Path, help="folder of the result; logs/gallery/NAME")
    asked = parser.parse_args(arguments)
    replication = REPLICATIONS[asked.name]
    out = asked.out or Path("logs/gallery") / asked.name
    try:
        result = run(
            asked.name, replication, model=asked.model or replication.model,
            models=asked.models.expanduser(), work=out.resolve() / "work", data=asked.data,
            n=asked.n,
        )  # fmt: skip
    except (MissingDataError, IndexUnreachableError) as error:
        sys.stderr.write(f"gallery: {error}\n")
        return 2
    (out / "result.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    shown = replication.show(result["numbers"])
    (out / "page.md").write_text(page(asked.name, replication, result, figures=".") + "\n")
    for palette in ("light", "dark"):
        (out / f"replication-{asked.name}-{palette}.svg").write_text(draw(shown.chart, palette))
    sys.stdout.write(f"{shown.verdict}\n{out / 'page.md'}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
