"""`logit_lens`: generate, and read the stream of some layers as predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inspect_ai.agent import Agent
from inspect_ai.model import GenerateConfig
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.errors import SpecError
from inspect_lens.lens import Lens
from inspect_lens.model import lens_config, lens_scope
from inspect_lens.model.provider._scope import require_lens
from inspect_lens.model.server._lens_service import LensLike, read_lens
from inspect_lens.spec import Positions

from ._attempt import as_inner

__all__ = ["logit_lens"]


@solver
def logit_lens(
    layers: Sequence[int] | int | str = "all",
    top_k: int = 5,
    tokens: Sequence[int | str] = (),
    *,
    lens: LensLike | None = None,
    target: str | None = None,
    positions: Positions | Sequence[int] = "all",
    inner: Solver | Agent | None = None,
) -> Solver:
    """Generate with a logit lens, or run a solver or an agent whose every call has one.

    The stream of each layer goes through the model's final norm and unembedding, inside the
    engine. With `lens`, a tuned or Jacobian lens translates it first. The scorer `lens_rank` reads
    the result; `activations(output).lens` has it as arrays.

    Args:
        layers: `all`, or layer numbers.
        top_k: most likely tokens to return for each layer and position.
        tokens: whose log-probability and rank to return: ids, or texts that are one token.
        lens: a tuned or Jacobian lens; by default the logit lens. A text without a slash is a name
            that is registered with the server. Others are a `Lens`, its path, or its name below
            `lenses/`, which is registered when a sample first needs it. With a lens, `all` are the
            layers that it translates, and the last one.
        target: a text whose first token is one of them, with `{}` for the sample's target: `" {}"`
            in the middle of a sentence, `"{}"` at the start of an answer.
        positions: tokens to read; the row of one predicts the next.
        inner: what to run, such as `react()`; `generate()` by default.

    Returns:
        The solver.

    Raises:
        ArtifactError: no such lens.
        SpecError: a value is wrong; while it runs, a sample has no target, or the server refuses
            the lens.
        UnsupportedError: when it runs, the model has no lens.

    Source:
        nostalgebraist, "interpreting GPT: the logit lens" (2020). Tuned lens: arXiv:2303.08112.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval

        from evals.organism_deception import organism_dataset
        from inspect_lens.model import activations
        from inspect_lens.solver import logit_lens

        task = Task(dataset=organism_dataset("demo")[:2], solver=logit_lens([2, 4], top_k=3))
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", max_tokens=14)
        table = activations(log.samples[0].output, log=log.location).lens
        assert table.token_ids.shape == (len(table.positions), 2, 3)  # tokens, layers, top_k
        ```
    """
    asked: dict[str, Any] = {
        "layers": layers,
        "top_k": top_k,
        "tokens": list(tokens),
        "positions": positions,
    }
    if target is not None and "{}" not in target:
        raise SpecError(f'target={target!r}; give a text with {{}} in it, such as " {{}}"')
    if target is None or top_k or tokens:
        lens_config(lens=asked, base=GenerateConfig())  # refuse a wrong spec before any sample
    chosen_lens = None if lens is None else read_lens(lens)
    run = as_inner(inner)

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        chosen = list(tokens)
        if target is not None:
            first = await _first_token(target, state.target.text)
            chosen = [*(token for token in chosen if token != first), first]
        name = chosen_lens
        if isinstance(name, Lens):
            api: Any = require_lens("logit_lens").api
            name = await api.lenses.name_of(name)
        with lens_scope(lens=asked | {"tokens": chosen, "name": name}):
            return await (generate(state) if run is None else run(state, generate))

    return solve


async def _first_token(form: str, target: str) -> int:
    """The first token of a text, as the server of the model under evaluation reads it."""
    if not target:
        raise SpecError("logit_lens: target= is given and the sample has none; pass tokens=")
    api: Any = require_lens("logit_lens").api
    answer = await api.post(
        "/tokenize", {"prompt": form.replace("{}", target), "add_special_tokens": False}
    )
    return int(answer["tokens"][0])
