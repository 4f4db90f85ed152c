"""`patch_sweep` and `causal_trace` as solvers: one map of layers and positions per sample."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import anyio.from_thread
import anyio.to_thread
from inspect_ai.log import transcript
from inspect_ai.model import Model, ModelOutput, get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens import patch
from inspect_lens.client import LensClient
from inspect_lens.errors import LensError, SpecError, UnsupportedError
from inspect_lens.patch import Align, CausalTrace, PatchCell, PatchSweep, Prompt
from inspect_lens.reading._shared import shared_parameters
from inspect_lens.spec import RESID_POST, Site

__all__ = ["causal_trace", "patch_sweep"]


@solver
@shared_parameters
def patch_sweep(
    corrupted: str = "corrupted",
    foil: str = "foil",
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    site: Site = RESID_POST,
    align: Align = "equal",
    window: int = 1,
    alpha: float = 1.0,
    raw: bool = False,
    picture: bool = True,
) -> Solver:
    """Patch rows of each sample's prompt into a corrupted one, for each layer and position.

    The sample's input is the clean prompt, and its target what the model says next. The result is
    in the store under `patch_sweep`, for `inspect_lens.patch.PatchSweep.from_json`, and its best
    cell is the sample's output. The requests of the cells are not in the log.

    Args:
        corrupted: key of the sample metadata with the corrupted prompt: a text, which takes the
            place of the last message, or a list of messages with `role` and `content`.
        foil: key of the metadata with what the corrupted prompt is followed by; a sample without
            it is judged by the log-probability of the target.
        layers: to sweep; all that the server serves by default.
        positions: of the corrupted prompt.
        site: what is patched.
        align: what to do with prompts of unequal token length.
        window: layers that are patched together.
        alpha: share of the row that is put in.
        raw: the input is text without a chat template, and so is the corrupted prompt.
        picture: put the heat map into the transcript, if matplotlib is installed.

    Raises:
        SpecError: while solving, a sample without a corrupted prompt or a target, or prompts that
            cannot be aligned.
        UnsupportedError: the model is of another provider, or there is no such site.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.dataset import Sample

        from inspect_lens.patch import PatchSweep
        from inspect_lens.solver import patch_sweep

        sample = Sample(
            input="The river Talmo is found in",
            target=" Verun",
            metadata={"corrupted": "The town Velosh is found in"},
        )
        task = Task(dataset=[sample], solver=patch_sweep(raw=True, align="ends", layers=[0, 5]))
        (log,) = eval(task, model="vllm-lens/organism/checkpoint")
        sweep = PatchSweep.from_json(log.samples[0].store["patch_sweep"])
        assert sweep.recovered.shape == (2, len(sweep.positions))
        ```
    """

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        clean = _prompt(state, raw)
        other = state.metadata.get(corrupted)
        if not other:
            raise SpecError(
                f"sample {state.sample_id}: has no {corrupted!r} in its metadata; allowed is a "
                "text or a list of messages"
            )
        if isinstance(other, str) and not raw:
            messages = cast("list[dict[str, Any]]", clean)
            other = [*messages[:-1], messages[-1] | {"content": other}]

        def run(client: LensClient) -> PatchSweep:
            return patch.patch_sweep(
                client, clean, other, answer=_target(state), foil=state.metadata.get(foil),
                layers=layers, positions=positions, site=site, align=align, window=window,
                alpha=alpha, on_cell=_stop_if_cancelled, progress=False,
            )  # fmt: skip

        return await _solve(state, "patch_sweep", run, picture)

    return solve


@solver
@shared_parameters
def causal_trace(
    subject: str = "subject",
    noise: float = 3.0,
    std: float | None = None,
    draws: int = 10,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    site: Site = RESID_POST,
    window: int = 1,
    raw: bool = False,
    picture: bool = True,
) -> Solver:
    """Trace where the model keeps what it says next of a subject in each sample's prompt.

    The sample's input is the prompt, and its target what the model says next. The result is in the
    store under `causal_trace`, for `inspect_lens.patch.CausalTrace.from_json`, and its best cell
    is the sample's output. The requests of the cells are not in the log.

    Args:
        subject: key of the sample metadata with the subject's text, which the prompt has once, or
            with the positions of its tokens.
        noise: standard deviations of the noise.
        std: standard deviation of an embedding's numbers; that of the prompt's tokens by default.
        draws: of the noise.
        seed: of the draws.
        layers: to restore; all that the server serves by default.
        site: what is restored.
        window: layers that are restored together.
        raw: the input is text without a chat template.
        picture: put the heat map into the transcript, if matplotlib is installed.

    Raises:
        SpecError: while solving, a sample without a subject or a target.
        UnsupportedError: the model is of another provider, or there is no such site.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.dataset import Sample

        from inspect_lens.patch import CausalTrace
        from inspect_lens.solver import causal_trace

        sample = Sample(
            input="The river Talmo is found in", target=" Verun", metadata={"subject": "Talmo"}
        )
        task = Task(dataset=[sample], solver=causal_trace(raw=True, draws=2, layers=[0, 5]))
        (log,) = eval(task, model="vllm-lens/organism/checkpoint")
        trace = CausalTrace.from_json(log.samples[0].store["causal_trace"])
        assert trace.best(layers=(0,)).position in trace.subject
        ```
    """

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        named = state.metadata.get(subject)
        if not named:
            raise SpecError(
                f"sample {state.sample_id}: has no {subject!r} in its metadata; allowed is a text "
                "that the prompt has once, or positions of tokens"
            )

        def run(client: LensClient) -> CausalTrace:
            return patch.causal_trace(
                client, _prompt(state, raw), subject=named, answer=_target(state), noise=noise,
                std=std, draws=draws, seed=seed, layers=layers, site=site, window=window,
                on_cell=_stop_if_cancelled, progress=False,
            )  # fmt: skip

        return await _solve(state, "causal_trace", run, picture)

    return solve


async def _solve(
    state: TaskState,
    name: str,
    run: Callable[[LensClient], PatchSweep | CausalTrace],
    picture: bool,
) -> TaskState:
    """Run in a thread, and put the result into store, transcript and output."""
    model = get_model()
    client = await _client(model, name)
    try:
        found = await anyio.to_thread.run_sync(run, client)
    finally:
        client.close()
    state.store.set(name, found.to_json())
    best = found.best()
    said = (
        f"layer {best.layer}, position {best.position} {found.tokens[best.position]!r}: "
        f"{best.value:.4g}, recovered {best.recovered:.3f}"
    )
    if picture:
        with suppress(LensError):  # without matplotlib there is none
            image = base64.b64encode(found.figure()).decode()
            shown = f"![{said}](data:image/png;base64,{image})"
            transcript().info(shown, source=f"inspect_lens/{name}")
    state.output = ModelOutput.from_content(model=str(model), content=said)
    return state


async def _client(model: Model, name: str) -> LensClient:
    plain = getattr(model.api, "plain_client", None)
    if plain is None:
        raise UnsupportedError(
            f"{name}: needs a vllm-lens/ model, and this one is {model}; pass --model vllm-lens/…"
        )
    return cast("LensClient", await plain())


def _stop_if_cancelled(_: PatchCell) -> None:
    # A limit of the sample ends a sweep between two cells.
    anyio.from_thread.check_cancelled()


def _prompt(state: TaskState, raw: bool) -> Prompt:
    if raw:
        return state.input_text
    return [{"role": message.role, "content": message.text} for message in state.messages]


def _target(state: TaskState) -> str:
    if not state.target.text:
        raise SpecError(
            f"sample {state.sample_id}: has no target; allowed is what the model says next, with "
            "the space that it begins with"
        )
    return state.target.text
