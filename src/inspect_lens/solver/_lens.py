"""`with_lens`: generate, or run another solver, with what the engine is to do beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from inspect_ai.agent import Agent, as_solver, is_agent
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.errors import SpecError
from inspect_lens.model._request import LensLike, asked_by, name_of_lens, parse_capture
from inspect_lens.model._scope import require_lens, scope_with
from inspect_lens.model._scores import ProbeLike, ask_probes
from inspect_lens.reading._shared import shared_parameters
from inspect_lens.spec import (
    RESID_POST,
    Ablate,
    Add,
    CaptureSpec,
    EditBase,
    Phase,
    Positions,
    ProbeUse,
    Reduce,
    RowDType,
    Site,
    parse_positions,
    several,
)
from inspect_lens.vector import VectorLike, load_vector

__all__ = ["ablate_direction", "with_capture", "with_lens", "with_steering"]


@solver
@shared_parameters
def with_lens(
    capture: CaptureSpec | Mapping[str, Any] | Sequence[int] | int | str | None = None,
    steer: Add | VectorLike | Mapping[str, Any] | Sequence[Any] | None = None,
    edits: EditBase | Mapping[str, Any] | Sequence[EditBase | Mapping[str, Any]] | None = None,
    probes: ProbeUse | ProbeLike | Sequence[ProbeUse | ProbeLike] | None = None,
    lens: Mapping[str, Any] | Sequence[int] | str | None = None,
    inner: Solver | Agent | None = None,
    probe_positions: Positions | list[int] | None = None,
    edits_meet: Literal["in_order", "error"] | None = None,
) -> Solver:
    """Generate with captures, edits, probes or a lens, or run an agent with them in every call.

    Use it in the place of `generate()`. It reaches all calls of the model under evaluation; a call
    that asks for its own capture, vectors or lens keeps those. If you nest several, edits add up,
    the outer ones first, and the inner capture counts.

    Args:
        capture: layers such as `[4]`, `all`, or the fields of a `CaptureSpec`. Activations are in
            `state.output.metadata["activations"]`, and beside the log.
        steer: a steering vector, its name, or `{"vector": name, "layer": …, "scale": …}`; or
            several. The log holds the hash of each, and the tensor once beside it.
        edits: one edit or several, in the order in which they act; each an object such as
            `Ablate(direction=v, layers=[4])`, or its JSON form with `op`.
        probes: names below `probes/`, paths, `hf://` addresses or probes, as a list or separated
            by commas. The engine scores each token as it is written, and no activations leave it.
            `probe_score` and all that reads probes take these scores, also with another pool or
            threshold. Probes that the engine cannot run are captured or recomputed; scores say
            which in `metadata["source"]`.
        lens: layers, `all`, or the fields of a `LogitLens`, of which `top_k` is 5 by default. The
            stream goes through the model's final norm and unembedding; `lens_rank` reads the
            result, and `activations(output).lens` has it as arrays. A field `name` is a tuned or
            Jacobian lens that translates it first: a `Lens`, its path, its name below `lenses/`,
            or without a slash a name that is registered with the server. A field `target` is a
            text whose first token is read too, with `{}` for the sample's target: `" {}"` in the
            middle of a sentence, `"{}"` at the start of an answer.
        probe_positions: tokens that the probes score; for each those of its card by default. A
            `ProbeUse` has its own.
        edits_meet: "error" refuses calls in which two edits would change the same numbers of a
            token; by default they act in order.

    Raises:
        ArtifactError: no such vector, probe or lens.
        SpecError: a value is wrong, or nothing is asked for; while it runs, a sample has no target
            for `lens`, or the server refuses the lens.
        UnsupportedError: when it runs, the model has no lens.

    Source:
        Logit lens: nostalgebraist, "interpreting GPT: the logit lens" (2020). Tuned lens:
        arXiv:2303.08112.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval

        from evals.organism_deception import organism_dataset
        from inspect_lens.model import activations
        from inspect_lens.scorer import deception_probe
        from inspect_lens.solver import with_lens

        solver = with_lens(probes="organism/deception-lr", lens={"layers": [2, 4], "top_k": 3})
        scorer = deception_probe("organism/deception-lr")
        task = Task(organism_dataset("demo")[:2], solver=solver, scorer=scorer)
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", max_tokens=14)
        for sample in log.samples:
            assert sample.scores["deception_probe"].metadata["source"] == "engine"
        table = activations(log.samples[0].output, log=log.location).lens
        assert table.token_ids.shape == (len(table.positions), 2, 3)  # tokens, layers, top_k
        ```
    """
    asked = ask_probes(probes, probe_positions)
    captured = parse_capture(capture)
    read = None if lens is None else _LensAsked(lens)
    if all(one is None for one in (capture, steer, edits, probes, lens, edits_meet)):
        raise SpecError(
            "with_lens: nothing is asked for; allowed are capture=, steer=, edits=, edits_meet=, "
            "probes= and lens=; without them use generate()"
        )
    # Refuse what is wrong before any sample, and read a vector once.
    edited = asked_by(steer=steer, edits=edits, edits_meet=edits_meet).edits
    return _within(
        "with_lens", inner, read, capture=captured, edits=edited or None, edits_meet=edits_meet,
        probes=asked,
    )  # fmt: skip


def _within(
    asker: str, inner: Solver | Agent | None, lens: _LensAsked | None = None, **options: Any
) -> Solver:
    """A solver in a scope; `asker` is what a user has called."""
    run, alike = as_inner(inner), asked_by(**options)

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        target = require_lens(asker)
        request = alike
        if lens is not None:
            request = asked_by(**options, lens=await lens.fields(state))
        with scope_with(request, target):
            return await (generate(state) if run is None else run(state, generate))

    return solve


class _LensAsked:
    """What a lens is asked for, of which a target's token and a registered name come last."""

    def __init__(self, lens: Mapping[str, Any] | Sequence[int] | str) -> None:
        given: dict[str, Any] = dict(lens) if isinstance(lens, Mapping) else {"layers": lens}
        self.target: str | None = given.pop("target", None)
        name: LensLike | None = given.pop("name", None)
        self.name = None if name is None else name_of_lens(name)
        self.given = given | {"tokens": several(given.get("tokens", ()))}
        if self.target is not None and "{}" not in self.target:
            raise SpecError(
                f'lens.target={self.target!r}; give a text with {{}} in it, such as " {{}}"'
            )
        # Any token stands in for that of a target, so that the rest is judged before a sample.
        tokens = self.given["tokens"] or [0] * (self.target is not None)
        asked_by(lens=self.given | {"tokens": tokens})

    async def fields(self, state: TaskState) -> dict[str, Any]:
        """Fields of a `LogitLens` for one sample."""
        tokens = self.given["tokens"]
        api: Any = require_lens("with_lens").api
        if self.target is not None:
            first = await _first_token(api, self.target, state.target.text)
            tokens = [*(token for token in tokens if token != first), first]
        return self.given | {"tokens": tokens, "name": self.name}


async def _first_token(api: Any, form: str, target: str) -> int:
    """The first token of a text, as the server of the model under evaluation reads it."""
    if not target:
        raise SpecError("with_lens: lens has a target, and the sample has none; give tokens")
    answer = await api.post(
        "/tokenize", {"prompt": form.replace("{}", target), "add_special_tokens": False}
    )
    return int(answer["tokens"][0])


@solver
@shared_parameters
def with_capture(
    layers: Sequence[int] | int | str = "all",
    positions: Positions | Sequence[int] | Sequence[bool] = "all",
    site: Site | Sequence[Site] = RESID_POST,
    *,
    reduce: Reduce = "none",
    dtype: RowDType = "model",
    phase: Phase = "both",
    heads: Sequence[int] | None = None,
    inner: Solver | Agent | None = None,
) -> Solver:
    """Generate, and keep activations, or run an agent and keep those of every call.

    To capture without changing the task, run the eval with `-M capture=…`.

    Args:
        layers: `all`, or layer numbers.
        positions: tokens to keep, such as `completion`.
        site: place in the block, or several; the server has to serve them.
        reduce: what the engine makes of these tokens, such as their `mean`; see `CaptureSpec`.
        dtype: of the result; `model` is that of the stream.
        phase: keep only tokens of the prompt (`prefill`) or sampled ones (`decode`).
        heads: those to keep, at `q`, `k`, `v` or `z`; all of them by default.

    Returns:
        The solver; activations are in `state.output.metadata["activations"]`.

    Raises:
        UnsupportedError: when it runs, the model has no lens.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval

        from evals.organism_deception import organism_dataset
        from inspect_lens.model import read_activations
        from inspect_lens.solver import with_capture

        task = Task(
            dataset=organism_dataset("demo")[:2], solver=with_capture([4], positions="completion")
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", max_tokens=14)
        for call in read_activations(log):
            print(call.sample_id, call.activations.numpy().shape)  # (layers, tokens, hidden)
        ```
    """
    capture = {
        "layers": layers, "positions": positions, "site": site, "reduce": reduce, "dtype": dtype,
        "phase": phase, "heads": heads,
    }  # fmt: skip
    return _within("with_capture", inner, capture=parse_capture(capture))


@solver
@shared_parameters
def with_steering(
    vector: VectorLike,
    layers: int | Sequence[int] | None = None,
    scale: float = 1.0,
    norm_match: bool = False,
    positions: Sequence[int] | None = None,
    inner: Solver | Agent | None = None,
) -> Solver:
    """Generate with a steering vector added, or run an agent with it in every call.

    Args:
        vector: name below `vectors/`, path, `hf://` address, or a vector. Give a path as a string:
            of a `Path` Inspect logs only the last part.
        layers: one of the vector's layers, or several; that of its card by default.
        scale: factor; 1 is the distance between the two classes that the vector was found on.
        norm_match: scale to the norm of each token's own row instead.
        positions: absolute positions; negative ones count from the end of the prompt; every token
            by default.

    Raises:
        ArtifactError: no such vector.
        SpecError: no direction at that layer, or a value is wrong.
        UnsupportedError: when it runs, the model has no lens.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.solver import with_steering

        solver = with_steering("organism/truth", scale=0.8)
        task = Task(organism_dataset("demo")[:2], solver=solver, scorer=includes())
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        assert log.status == "success"
        ```
    """
    loaded = load_vector(vector)
    steer = loaded.to_steering(layers, scale, norm_match=norm_match, positions=positions)
    return _within("with_steering", inner, edits=(steer,))


@solver
@shared_parameters
def ablate_direction(
    vector: VectorLike,
    layers: Sequence[int] | int | None = None,
    layer: int | None = None,
    site: Site | None = None,
    strength: float = 1.0,
    positions: Positions | Sequence[int] = "all",
    inner: Solver | Agent | None = None,
) -> Solver:
    """`with_lens(edits=Ablate(…))` of a vector: generate without one direction of the stream.

    It is removed at every chosen layer: `h - strength·⟨h, v⟩·v`. Where a model needs it to do
    something, such as to refuse, it no longer can.

    Args:
        vector: name below `vectors/`, path, `hf://` address, or a vector; `Vector.from_raw` makes
            one of bare numbers. Its length does not matter.
        layers: where it is removed; by default all layers of the vector's card. Arditi et al.
            remove it at every layer of the model.
        layer: whose direction of the vector is taken; that of its card by default.
        site: place in the block; that of the vector by default.
        strength: share that is removed: 1 removes all of it, 2 reflects.
        positions: tokens that lose it, as an edit takes them.

    Raises:
        ArtifactError: no such vector.
        SpecError: no direction at that layer, or a value is wrong.
        UnsupportedError: when it runs, the model has no lens.

    Source:
        arXiv:2406.11717, directional ablation.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.solver import ablate_direction

        solver = ablate_direction("organism/truth", layers=[4])
        task = Task(organism_dataset("demo")[:2], solver=solver, scorer=includes())
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        assert log.status == "success"
        ```
    """
    loaded = load_vector(vector)
    direction = loaded.raw(loaded.default_layer() if layer is None else layer)
    where: Sequence[int] | int = loaded.layers if layers is None else layers
    edit = Ablate(
        direction=direction,
        layers=(where,) if isinstance(where, int) else tuple(where),
        site=loaded.site if site is None else site,
        positions=parse_positions(positions, field="positions"),
        strength=strength,
    )
    return _within("ablate_direction", inner, edits=(edit,))


def as_inner(inner: Solver | Agent | None) -> Solver | None:
    """A solver for a solver or an agent; None for none."""
    # By its registration: to a type checker an agent and a solver may look alike.
    wrapped = as_solver(inner) if inner is not None and is_agent(inner) else inner
    return cast("Solver | None", wrapped)
