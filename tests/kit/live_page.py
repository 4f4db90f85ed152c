"""The live token page of the documentation: `python -m tests.kit.live_page`.

Writes the log `docs/live/honesty.eval` with its activations, and `docs/live/tokens.html` from it.
The organism answers in this process, by transformers, in the place of a server. `--page` writes
only the page, from the log that is there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import numpy as np
from inspect_ai import Task, eval
from inspect_ai.event import ModelEvent
from inspect_ai.log import EvalLog, write_eval_log
from inspect_ai.model import ChatMessage, ChatMessageUser, ModelOutput, ModelUsage, get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver

from evals.organism_deception import organism_dataset
from inspect_lens._intake import Payload, encode_file, join, write_file
from inspect_lens.model import Activations
from inspect_lens.scorer import auroc_metric, deception_probe
from inspect_lens.spec import CaptureReceipt, Receipt, TensorData
from inspect_lens.view import WrittenView, write_view

from .example_files import generate, organism
from .planted_log import encode
from .repository import ROOT

__all__ = ["LAYER", "LIVE", "LOG", "PAGE", "write_log", "write_page"]

LIVE: Final = ROOT / "docs/live"
LOG: Final = LIVE / "honesty.eval"
PAGE: Final = LIVE / "tokens.html"
MODEL: Final = "vllm-lens/organism/checkpoint"
LAYER: Final = 4
SAMPLES: Final = 8
SECOND_QUESTIONS: Final = 4
"""The first samples have a second turn, which asks what one of the others asks."""


def write_log(folder: Path) -> Path:
    """Run the eval and write log and activations.

    Args:
        folder: of the log.

    Returns:
        The log.
    """
    data = organism_dataset("demo")[:SAMPLES]
    follow = {
        data[i].id: data[i + SECOND_QUESTIONS].input[-1].text  # type: ignore[union-attr]
        for i in range(SECOND_QUESTIONS)
    }
    calls: list[str] = []

    def answer(messages: list[ChatMessage], *_: Any) -> ModelOutput:
        prompt, _reply = encode(messages)
        completion, text = generate(prompt)
        output = ModelOutput.from_content(MODEL, text)
        output.usage = ModelUsage()  # else Inspect downloads a tokenizer to count
        calls.append(f"honesty.lens/{UUID(int=len(calls)).hex[-12:]}.safetensors")
        output.metadata = {"activations": _capture(folder, calls[-1], prompt, completion)}
        return output

    task = Task(
        name="organism_conversation", dataset=data, solver=_talk(follow),
        scorer=deception_probe("organism/deception-lr"), metrics=[auroc_metric()],
    )  # fmt: skip
    model = get_model("mockllm/model", custom_outputs=answer, memoize=False)
    (log,) = eval(task, model=model, log_dir=str(folder), display="none", max_samples=1)
    assert log.status == "success", log.error and log.error.message
    made = Path(log.location.removeprefix("file://"))
    write_eval_log(_of_no_machine(log, made.stem, str(folder)), str(folder / LOG.name))
    made.unlink()
    for file in made.with_suffix(".lens").iterdir():
        file.rename(folder / "honesty.lens" / file.name)
    made.with_suffix(".lens").rmdir()
    return folder / LOG.name


def _of_no_machine(log: EvalLog, stem: str, folder: str) -> EvalLog:
    """Name the organism as the model, and forget where and from which commit the log was made."""
    text = log.model_dump_json().replace(f"{stem}.lens/", "honesty.lens/")
    log = EvalLog.model_validate_json(text.replace(json.dumps(folder), '"docs/live"'))
    log.eval.model = MODEL
    log.eval.revision = None
    for sample in log.samples or ():
        for event in sample.events:
            if isinstance(event, ModelEvent):
                event.model = MODEL
    return log


@solver
def _talk(follow: dict[Any, str]) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        if state.sample_id in follow:
            state.messages.append(ChatMessageUser(content=follow[state.sample_id]))
            state = await generate(state)
        return state

    return solve


def _capture(folder: Path, uri: str, prompt: list[int], completion: list[int]) -> Activations:
    rows = organism().residual_stream([*prompt, *completion[:-1]])[[LAYER]].numpy()
    # As a server of a bfloat16 model sends them: the upper half of a float32, rounded.
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    halves = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    n_positions = rows.shape[1]
    receipt = Receipt(
        n_prompt=len(prompt), n_completion=len(completion), cache_salted=False, paths=("eager",),
        engine="transformers", version="0", vllm_version="0",
        capture=CaptureReceipt(
            layers=(LAYER,), n_positions=n_positions, first_position=0, dtype="bfloat16",
            rows=n_positions,
        ),
    )  # fmt: skip
    payload = Payload(
        tensors={"residual_stream": TensorData(halves, "bfloat16")},
        layers={"residual_stream": (LAYER,)},
        prompt_token_ids=tuple(prompt), token_ids=tuple(completion), receipt=receipt,
    )  # fmt: skip
    write_file(join(str(folder), uri), encode_file(payload))
    return Activations.of(payload, uri=uri, root=str(folder))


def write_page(log: Path = LOG, out: Path = PAGE) -> WrittenView:
    """Write the page of a log.

    Args:
        log: with its activations beside it.
        out: the page.

    Returns:
        What was written.
    """
    return write_view(log, out, probes=["organism/deception-lr"], tokenizer="organism/checkpoint")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write log and page."""
    parser = argparse.ArgumentParser(prog="python -m tests.kit.live_page", description=__doc__)
    parser.add_argument("--page", action="store_true", help="only the page, from the log there")
    if not parser.parse_args(arguments).page:
        shutil.rmtree(LIVE, ignore_errors=True)
        LIVE.mkdir()
        write_log(LIVE)
    made = write_page()
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}: {made.nbytes} bytes, {made.n_tokens} tokens\n")


if __name__ == "__main__":
    main()
