"""Child of test 9: evaluates over HTTP with a probe scorer, or scores a finished log again.

Runs where the backend's own Inspect provider is installed. The scorer reads the activations in
the way the backend's documentation says: `output.metadata["activations"]["residual_stream"]`, and
for inspect_lens in a log `inspect_lens.model.activations`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from inspect_ai import Task, score
from inspect_ai import eval as inspect_eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalError, EvalLog, read_eval_log
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer
from inspect_ai.solver import TaskState, generate

__all__ = ["main"]

LAYER = 2


def _rows(state: TaskState) -> Any:
    if os.environ["CONFORMANCE_BACKEND"] == "inspect-lens":
        from inspect_lens.model import activations

        found: Any = activations(state.output)
    else:
        found = (state.output.metadata or {})["activations"]
    rows = found["residual_stream"]
    if rows is None:
        raise LookupError("the log holds null where the activations were")
    return torch.as_tensor(rows)


@scorer(metrics=[mean()])
def linear_probe() -> Scorer:
    """Mean score of a fixed random probe over all rows."""

    async def run(state: TaskState, target: Target) -> Score:
        rows = _rows(state)[0].double()
        direction = torch.randn(
            rows.shape[-1], generator=torch.Generator().manual_seed(9), dtype=torch.float64
        )
        return Score(value=float((rows @ direction).mean()))

    return run


def _scores(log: EvalLog) -> dict[str, Any]:
    if log.status != "success" or not log.samples:
        return {"error": f"{log.status}: {_told(log.error) if log.error else 'no samples'}"}
    return {str(sample.id): (sample.scores or {})["linear_probe"].value for sample in log.samples}


def _told(error: EvalError) -> str:
    """The message, and where it was raised: the last place in the traceback."""
    places = [line.strip() for line in error.traceback.splitlines() if " line " in line]
    return f"{error.message} ({places[-1]})" if places else error.message


def _evaluate(url: str, folder: str) -> dict[str, Any]:
    config = GenerateConfig(
        max_tokens=6,
        temperature=0.0,
        extra_body={"extra_args": {"output_residual_stream": [LAYER]}},
    )
    samples = [
        Sample(input=" ".join(f"t{17 * i + j}" for j in range(5 + i)), id=str(i))
        for i in range(1, 7)
    ]
    # Both packages register `vllm-lens`; where both are installed, the other name is ours alone.
    provider = "lens" if os.environ["CONFORMANCE_BACKEND"] == "inspect-lens" else "vllm-lens"
    log = inspect_eval(
        Task(dataset=samples, solver=generate(), scorer=linear_probe()),
        model=f"{provider}/{os.environ['CONFORMANCE_MODEL']}",
        model_base_url=f"{url}/v1",
        log_dir=folder,
        display="none",
        **config.model_dump(exclude_none=True),
    )[0]
    scores = _scores(log)
    if "error" in scores:
        return scores
    return {"log": log.location.removeprefix("file://"), "scores": scores}


def _score_again(path: str) -> dict[str, Any]:
    log = score(read_eval_log(path), linear_probe(), action="overwrite", display="none")
    scores = _scores(log)
    return scores if "error" in scores else {"scores": scores}


def main(arguments: list[str]) -> int:
    """Run one command; the last line printed is the result as JSON."""
    try:
        result = (
            _evaluate(*arguments[1:]) if arguments[0] == "eval" else _score_again(*arguments[1:])
        )
    except Exception as error:  # noqa: BLE001 (what is raised is the result)
        result = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
