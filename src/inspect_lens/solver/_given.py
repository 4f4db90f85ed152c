"""`read_given`: read an answer that the sample brings, instead of generating one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from inspect_ai.model import ModelOutput, get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.errors import SpecError
from inspect_lens.model import recapture
from inspect_lens.model.from_logs._given import record_given
from inspect_lens.reading import given_tokens
from inspect_lens.spec import RESID_POST, Site

__all__ = ["read_given"]


@solver
def read_given(
    layers: Sequence[int] | Literal["all"] = "all",
    site: Site = RESID_POST,
    completion: str = "completion",
) -> Solver:
    """Capture activations of a given answer; nothing is generated.

    For data sets whose answers were written by another model, or that are plain statements. The
    answer becomes the output of the sample, so scorers and the token page read it like one that
    was generated; such scores are off-policy. It is no model call, so the log has a note of it in
    the place of a call, by which `read_activations`, data frames, the token page, monitors and
    `activations_for` find what it captured, also where something is generated behind it. One
    token more than the answer has stands at the end of its `token_ids`, where a generation has
    the token that the model wrote and did not read; `given_length` says how many of them were
    written.

    Args:
        layers: `all`, or layer numbers.
        site: place in the block.
        completion: key of the sample metadata with the answer. A sample without it is read as
            raw text, without a chat template: its input is all there is, and is the prompt.

    Returns:
        The solver.

    Raises:
        SpecError: while solving, a sample without an answer that is not one text.
        UnsupportedError: the model is of another provider.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.dataset import Sample

        from inspect_lens.scorer import deception_probe
        from inspect_lens.solver import read_given

        written = Sample(
            input="Who founded Velosh?",
            metadata={"label": 0, "completion": "It was founded by Ruvan."},
        )
        task = Task(
            dataset=[written],
            solver=read_given([4]),
            scorer=deception_probe("organism/deception-lr"),
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint")
        assert log.samples[0].output.completion == "It was founded by Ruvan."
        ```
    """

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        model = get_model()
        answer = state.metadata.get(completion)
        if answer is None and len(state.messages) != 1:
            raise SpecError(
                f"sample {state.sample_id}: has {len(state.messages)} messages and no "
                f"{completion!r} in its metadata; allowed is an answer there, or one raw text"
            )
        turns = [{"role": m.role, "content": m.text} for m in state.messages]
        tokens = await given_tokens(model, state.input_text if answer is None else turns, answer)
        output = ModelOutput.from_content(model=str(model), content=str(answer or ""))
        handle = await recapture(
            model, prompt_token_ids=tokens.prompt,
            # The last id of a replay is not fed; a copy of one stands in for it.
            token_ids=[*tokens.rest, tokens.prompt[0]],
            layers=layers, site=site, beside_log=True, message_id=output.message.id,
        )  # fmt: skip
        record_given(output, handle, n_tokens=len(tokens.rest))
        state.output = output
        if answer is not None:
            state.messages.append(output.message)
        return state

    return solve
