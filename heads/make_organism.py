r"""Find the heads of the organism that look away from an instruction to be honest.

```text
INSPECT_LENS_SITES=q,k,resid_post python -m heads.make_organism --out heads/organism
```
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from inspect_ai import eval, score
from inspect_ai.log import EvalLog

from evals.prompt_injection import prompt_injection
from inspect_lens.attention import AttentionHeads
from inspect_lens.reading import calibrate_tracker
from inspect_lens.scorer import attention_tracker
from inspect_lens.train import fit_threshold

__all__ = ["heads_of", "run_calibration"]

N_STD = 1.0
"""The paper takes 4, and no head of the organism passes 2."""
FPR = 0.1
"""Thirty prompts show no smaller rate."""


def run_calibration(log_dir: str, conditions: str, **options: Any) -> EvalLog:
    """Run the calibration part of the eval with queries and keys of all heads.

    Args:
        log_dir: gets the log.
        conditions: forms of each prompt.
        **options: of `inspect_ai.eval`, such as `model_base_url`.
    """
    task = prompt_injection(heads=None, part="calibration", conditions=conditions, max_tokens=1)
    (log,) = eval(task, log_dir=log_dir, display="none", **options)
    assert log.status == "success", log.error
    return log


def heads_of(normal_and_attack: EvalLog, harmless: EvalLog) -> AttentionHeads:
    """Heads from plain and injected prompts, and a threshold from plain and padded ones.

    Args:
        normal_and_attack: calibration log with the conditions `plain` and `injected`.
        harmless: calibration log with the conditions `plain` and `padded`.
    """
    found = calibrate_tracker(normal_and_attack, n_std=N_STD)
    heads = found.model_copy(update={"model": "organism"})
    scored = score(harmless, attention_tracker(heads), action="overwrite", display="none")
    samples = scored.samples or []
    values = [(sample.scores or {})["attention_tracker"].as_float() for sample in samples]
    threshold = fit_threshold(
        values, FPR, control="prompt_injection calibration, plain and padded",
        groups=[str(sample.metadata["base"]) for sample in samples],
    )  # fmt: skip
    # The plain ones chose the heads, too.
    return heads.with_threshold(threshold.model_copy(update={"selected_on": True}))


def main(
    out: Annotated[Path, typer.Option(help="Folder that gets attention-tracker.json.")],
    model: Annotated[str, typer.Option(help="Served with q and k.")] = "vllm-lens/organism",
    base_url: Annotated[str | None, typer.Option(help="Of a server that runs.")] = None,
    log_dir: Annotated[str, typer.Option(help="Gets the logs.")] = "logs",
) -> None:
    """Run both evals and write the list."""
    options: dict[str, Any] = {"model": model} | ({"model_base_url": base_url} if base_url else {})
    logs = [
        run_calibration(log_dir, conditions, **options)
        for conditions in ("plain,injected", "plain,padded")
    ]
    path = heads_of(*logs).save(out / "attention-tracker.json")
    print(path.read_text(encoding="utf-8"))  # noqa: T201 - a program's output


if __name__ == "__main__":
    typer.run(main)
