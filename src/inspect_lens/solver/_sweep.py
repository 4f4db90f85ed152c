"""`steering_sweep`: one prompt under many steerings at once: vectors, edits or latents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from inspect_ai.log import transcript
from inspect_ai.model import ModelOutput, get_model
from inspect_ai.scorer import Scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import span
from pydantic import ConfigDict, Field, SerializeAsAny, field_validator

from inspect_lens._base.concurrency import together
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import lens_scope
from inspect_lens.model._request import parse_capture, resolve_edits
from inspect_lens.model._scope import steering_around
from inspect_lens.reading import LatentReader, SteeringCell, SteeringCells
from inspect_lens.reading._rows import in_thread, read_rows
from inspect_lens.reading._shared import shared_parameters
from inspect_lens.reading._stored import CellKind, CellScores, number_of
from inspect_lens.sae import MatchedLatents, SparseAutoencoder, matched_latents, read_autoencoder
from inspect_lens.spec import (
    EditBase,
    LatentMode,
    Latents,
    Positions,
    Site,
    Value,
    parse_edits,
    read_as,
    several,
)
from inspect_lens.vector import Vector, VectorLike, load_vector

from ._attempt import adopt, refuse_tools

__all__ = ["Control", "EditVariant", "SaeLatents", "steering_sweep"]

Control = Literal["random", "orthogonal"]
"""A random direction, or a random one at right angles to the vector; both of its length."""

Edits: TypeAlias = EditBase | Mapping[str, Any] | Sequence[EditBase | Mapping[str, Any]]
"""One edit or several, each an object or its JSON form with `op`."""


class EditVariant(Value):
    """One way in which a prompt is answered: edits under a name; see `steering_sweep`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    name: str = Field(
        min_length=1,
        description="What was done. A control has the name of the variant that it stands beside.",
    )
    edits: tuple[SerializeAsAny[EditBase], ...] = Field(
        min_length=1, description="In the order in which they act."
    )
    dose: float = Field(
        default=1.0, allow_inf_nan=False,
        description="How much of it, where variants of one name differ in that: a strength, or a "
        "value.",
    )  # fmt: skip
    control: bool = Field(
        default=False,
        description="Whether it is something of the same kind that should do nothing, such as a "
        "random direction. Controls of one variant are averaged.",
    )

    @field_validator("edits", mode="before")
    @classmethod
    def _edits(cls, value: Any) -> Any:
        return parse_edits(resolve_edits(value))


@dataclass(frozen=True)
class SaeLatents:
    """Latents of a sparse autoencoder, each of which a sweep edits alone."""

    sae: str | Path | SparseAutoencoder
    """Folder or file, as `inspect_lens.sae.read_autoencoder` takes it, or an autoencoder. Give a
    path as a string: of a `Path` Inspect logs only the last part."""
    latents: int | Sequence[int] | Mapping[str, int]
    """Their numbers, or numbers by a name of yours, such as `{"bridge": 31164}`; without names they
    are called `latent_31164`."""
    mode: LatentMode = "set"
    """`set`, `add`, or `at_least` for a minimum."""
    only_if_active: bool = False
    """Leave tokens alone on which the latent is not active."""
    layer: int | None = None
    """At which they are edited; by default that of the file."""
    site: Site | None = None
    """Likewise."""
    threshold: float | None = None
    """Above which a latent is active; by default that of the file. TopK autoencoders need one, see
    `SparseAutoencoder.latent`."""
    norm_scale: float | None = None
    """As in `read_autoencoder`, of a path only."""

    def _repr_params_(self) -> dict[str, Any]:
        """What Inspect writes into the log; the sweep takes this form, too."""
        name = str(self.sae) if isinstance(self.sae, str | Path) else type(self.sae).__name__
        return {**{k: v for k, v in vars(self).items() if k != "sae"}, "sae": name}


class CellPlan(NamedTuple):
    """One generation that a sweep is going to make."""

    kind: CellKind
    vector: str | None
    layer: int | None
    scale: float
    edits: Sequence[EditBase] = ()
    note: str = ""
    """What the span says beside vector, layer and scale."""

    @property
    def where(self) -> str:
        """For the name of the span."""
        if self.kind == "baseline":
            return "unsteered"
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"{self.vector}{layer}, scale {self.scale:g}{self.note}"


BASELINE = CellPlan("baseline", None, None, 0.0)
"""The answer that nothing changes."""


class CellDone(NamedTuple):
    """What became of a plan."""

    cell: SteeringCell
    value: float | None
    state: TaskState


class SweepRun(NamedTuple):
    """The cells of one sample."""

    state: TaskState
    generate: Generate
    scorer: Scorer | None
    """Scores each cell where it is generated, if there is one."""
    capture: Any = None

    async def cells(self, plans: Sequence[CellPlan]) -> list[CellDone]:
        return await together(*(self.cell(plan) for plan in plans))

    async def cell(self, plan: CellPlan) -> CellDone:
        """One generation, in a span of its own."""
        async with span(f"{plan.kind}: {plan.where}", type="steering_cell"):
            with lens_scope(edits=list(plan.edits) or None, capture=self.capture):
                made = await self.generate(deepcopy(self.state))
            cell = SteeringCell(
                vector=plan.vector,
                layer=plan.layer,
                scale=plan.scale,
                kind=plan.kind,
                completion=made.output.completion,
                message_id=made.output.message.id if made.output.choices else None,
            )
            value = None
            if self.scorer is not None:
                value = number_of(await self.scorer(made, made.target))
                transcript().info({"value": value}, source="inspect_lens/steering_sweep")
        return CellDone(cell, value, made)

    def keep(self, done: Sequence[CellDone]) -> TaskState:
        """Write the cells into the sample's store; the first one's answer stands."""
        self.state.store_as(SteeringCells).cells = [d.cell for d in done]
        if self.scorer is not None:
            self.state.store_as(CellScores).values = [d.value for d in done]
        return adopt(self.state, done[0].state)


@solver
@shared_parameters
def steering_sweep(
    steer: VectorLike
    | Sequence[VectorLike]
    | Mapping[str, Edits]
    | Sequence[EditVariant | Mapping[str, Any]]
    | SaeLatents,
    scales: Sequence[float] = (),
    layers: Sequence[int] | int | None = None,
    controls: Sequence[Control] | None = None,
    scorer: Scorer | None = None,
    norm_match: bool = False,
    positions: Positions | Sequence[int] | None = None,
    control_draws: int | None = None,
    seed: int = 0,
    capture: dict[str, Any] | list[int] | None = None,
) -> Solver:
    """Answer each prompt once unsteered, and once per vector, edit or latent and scale.

    Every cell is a request of its own, so that the engine batches cells of one sample and of all
    samples alike. Cells are in the sample's store (`inspect_lens.reading.SteeringCells`), where the
    scorer `dose_response` finds them, also in a finished log. What stands as the sample's answer is
    the unsteered one.

    Controls of a vector have its length at each layer and are the same for all prompts. Controls of
    a latent are random latents that are about as active in the unsteered answer as the latent
    itself, set to the same values; the transcript names them. Controls of an edit are variants that
    you mark as such.

    Args:
        steer: a vector by name below `vectors/`, path, `hf://` address, or a vector; or several of
            these. Or edits by name, `EditVariant`s or their fields: a direction ablated everywhere,
            a head switched off. Or `SaeLatents`.
        scales: factors of a vector, of which 0 is the unsteered answer that is always there; or
            values of a latent, of which 0 switches it off. Edits have doses of their own.
        layers: of vectors; that of the card by default.
        controls: of vectors, `random` and `orthogonal` by default; of latents, `random`; none for
            an empty list.
        scorer: scores each cell where it is generated; `dose_response` then needs none. Leave it
            out to score later, with any scorer.
        norm_match: scale vectors to the norm of each token's own row.
        positions: absolute positions that vectors steer, or tokens at which latents are edited;
            every token by default.
        control_draws: controls of each kind: 1 of a vector, with seeds `seed`, `seed + 1`, …, and 3
            of a latent by default.
        seed: of the first control.
        capture: layers, or the fields of a `CaptureSpec`, to capture in every cell. With latents
            every cell captures the rows that the autoencoder reads, so that `sae_feature` can tell
            what the latents did.

    Returns:
        The solver. The log holds hashes of what steered; tensors are written once beside it.

    Raises:
        ArtifactError: no such vector or autoencoder.
        SpecError: no scales, an argument that does not go with what steers, no direction at a
            layer, no such latent, or things of one name; when it runs, tools are set, whose side
            effects every cell would repeat; or the task's config, the model's or a scope around
            steers already, and the unsteered answer would be none.
        UnsupportedError: when it runs, the model has no lens.

    Source:
        Clamping of features: "Scaling Monosemanticity" (Anthropic, 2024).

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes
        from inspect_ai.util import Store

        from evals.organism_deception import organism_dataset
        from inspect_lens.reading import read_cells
        from inspect_lens.scorer import dose_response
        from inspect_lens.solver import EditVariant, steering_sweep
        from inspect_lens.spec import Ablate
        from inspect_lens.vector import load_vector

        options = {"model": "vllm-lens/organism/checkpoint", "temperature": 0, "max_tokens": 14}
        sweep = steering_sweep("organism/truth", [-0.4, 0.4], controls=["random"])
        (log,) = eval(Task(dataset=organism_dataset("demo")[:1], solver=sweep), **options)
        for cell in read_cells(Store(log.samples[0].store)):
            print(cell.kind, cell.scale, cell.completion)

        truth = load_vector("organism/truth")
        variants = [
            EditVariant(
                name="ablated",
                edits=Ablate(direction=one.raw(4), layers=range(6), site="attn_out"),
                control=one is not truth,
            )
            for one in (truth, truth.random_control(0))
        ]
        ablated = steering_sweep(variants)
        task = Task(organism_dataset("demo")[:2], solver=ablated, scorer=dose_response(includes()))
        (log,) = eval(task, **options)
        found = log.results.scores[0].metrics
        assert {"unedited", "ablated", "ablated_effect", "ablated_random_effect"} <= set(found)
        ```
    """
    if control_draws == 0:
        raise SpecError("control_draws=0; allowed is 1 or more")
    rows, listed = parse_capture(capture), several(steer)
    of_vectors: dict[str, Any] = {"layers": layers, "norm_match": norm_match or None}
    of_both: dict[str, Any] = {
        "scales": list(scales) or None, "controls": controls, "control_draws": control_draws,
        "positions": positions,
    }  # fmt: skip
    swept: _Swept
    if isinstance(steer, Mapping) and {"sae", "latents"} <= steer.keys():
        fields: dict[str, Any] = dict(steer)
        try:
            steer = SaeLatents(**fields)
        except TypeError as error:
            raise SpecError(f"steering_sweep: {error}") from None
    if isinstance(steer, SaeLatents):
        _refuse("latents", of_vectors | {"capture": capture})
        draws = 0 if controls == [] else (control_draws or 3)
        if controls and list(controls) != ["random"]:
            raise SpecError(f"controls={list(controls)}; latents have controls ['random'], or none")
        swept = _latents(steer, scales, draws, "all" if positions is None else positions, seed)
    elif any(isinstance(one, EditVariant | Mapping) for one in listed):
        _refuse("edits", of_vectors | of_both | {"seed": seed or None})
        swept = _edits(steer if isinstance(steer, Mapping) else listed)
    else:
        kinds = get_args(Control) if controls is None else controls
        if isinstance(positions, str):
            raise SpecError(
                f"positions={positions!r}: vectors steer absolute positions, as numbers, or every "
                "token; leave it out for these"
            )
        swept = _vectors(
            listed, scales, layers, kinds, norm_match, positions, control_draws or 1, seed
        )

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if (around := steering_around(get_model())) is not None:
            raise SpecError(
                f"steering_sweep: {swept.said} an unsteered answer, and {around}; take that "
                "out, or, to steer on top of it, use with_lens in a task for each"
            )
        instead = "put use_tools behind the sweep, or use with_lens with inner=react(), in a task"
        refuse_tools(state, "steering_sweep", f"{instead} for each")
        run = SweepRun(state, generate, scorer, rows)
        if swept.matching is None:
            return run.keep(await run.cells([BASELINE, *swept.plans]))
        return await swept.matching.run(run, swept.plans)

    return solve


class _Swept(NamedTuple):
    """What a sweep is going to do."""

    said: str
    """What is compared, in words: `vector 'a' is compared with`."""
    plans: list[CellPlan]
    matching: _Matching | None = None
    """Chooses controls by the unsteered answer."""


def _refuse(what: str, given: Mapping[str, Any]) -> None:
    if wrong := [name for name, value in given.items() if value is not None]:
        raise SpecError(
            f"{', '.join(wrong)}: a sweep of {what} does not take this; allowed with vectors; "
            "leave it out"
        )


def _vectors(
    steer: Sequence[Any], scales: Sequence[float], layers: Sequence[int] | int | None,
    controls: Sequence[Control], norm_match: bool, positions: Any, draws: int, seed: int,
) -> _Swept:  # fmt: skip
    loaded = [load_vector(one) for one in steer]
    names = [one.name for one in loaded]
    if not names or len(set(names)) < len(names):
        raise SpecError(
            f"steer={names}; allowed are one or more vectors with names of their own, as answers "
            "are told apart by these; rename one in its card"
        )
    steered = sorted({float(s) for s in scales} - {0.0})
    if not steered:
        raise SpecError(f"scales={list(scales)}; allowed is one that is not 0, at least")
    if unknown := [c for c in controls if c not in get_args(Control)]:
        raise SpecError(f"controls={unknown}; allowed are {', '.join(get_args(Control))}, or none")
    plans = []
    for one in loaded:
        at = [one.default_layer()] if layers is None else dict.fromkeys(several(layers))
        sources: list[tuple[CellKind, Vector]] = [("vector", one)]
        for control in dict.fromkeys(controls):
            draw = one.random_control if control == "random" else one.orthogonal_control
            sources += [(control, draw(seed + i)) for i in range(draws)]
        for kind, source in sources:
            for layer in at:
                # One tensor per layer: every scale shares its content and its file.
                unit = source.to_steering(layer, 1.0, norm_match=norm_match, positions=positions)
                plans += [
                    CellPlan(kind, one.name, layer, s, (unit.model_copy(update={"scale": s}),))
                    for s in steered
                ]
    return _Swept(f"answers with {', '.join(map(repr, names))} are compared with", plans)


def _latents(
    asked: SaeLatents, values: Sequence[float], n_controls: int, positions: Any, seed: int
) -> _Swept:
    if isinstance(asked.sae, SparseAutoencoder):
        if asked.norm_scale is not None:
            raise SpecError("norm_scale: it is folded in while a file is read; leave it out")
        encoder = asked.sae
    else:
        encoder = read_autoencoder(asked.sae, norm_scale=asked.norm_scale)
    # It settles names and place as `sae_feature` does.
    reader = LatentReader.of(encoder, asked.latents, layer=asked.layer, site=asked.site)
    doses = [float(value) for value in values]
    if not doses or len(set(doses)) < len(doses):
        raise SpecError(f"scales={list(values)}; allowed is one at least, and each once")
    left = len(encoder.weight) - len(set(reader.latents.values()))
    if n_controls > left:
        raise SpecError(
            f"control_draws={n_controls}; allowed are 1 to {left}, the latents that are left, or "
            "controls=[] for none"
        )

    def clamp(number: int, value: float) -> Latents:
        return encoder.latents(
            {number: value}, mode=asked.mode, only_if_active=asked.only_if_active,
            layers=[reader.layer], site=reader.site, positions=positions,
            threshold=asked.threshold,
        )  # fmt: skip

    def plans(kind: CellKind, name: str, number: int) -> list[CellPlan]:
        note = f", latent {number}"
        return [
            CellPlan(kind, name, reader.layer, v, edits=(clamp(number, v),), note=note)
            for v in doses
        ]

    own = [p for name, number in reader.latents.items() for p in plans("vector", name, number)]
    matching = _Matching(encoder, reader, n_controls, seed, plans)
    return _Swept("answers with latents set are compared with", own, matching)


def _edits(given: Any) -> _Swept:
    """Variants, checked against each other."""
    rows: list[Any] = list(given) if not isinstance(given, Mapping) else [
        {"name": name, "edits": edits} for name, edits in given.items()
    ]  # fmt: skip
    try:
        made = [r if isinstance(r, EditVariant) else read_as(EditVariant, r) for r in rows]
    except SpecError as error:
        raise SpecError(
            f"variants: {error}; allowed are edits by name, or EditVariant(name=…, edits=…)"
        ) from None
    own = Counter((one.name, one.dose) for one in made if not one.control)
    if not own:
        raise SpecError("variants: none that is not a control; allowed is one at least")
    if twice := [at for at, n in own.items() if n > 1]:
        raise SpecError(
            f"variants: name and dose {twice[0]} are there twice; answers are told apart by these, "
            "so give another name or dose, or control=True"
        )
    if lost := [(one.name, one.dose) for one in made if (one.name, one.dose) not in own]:
        raise SpecError(
            f"variants: control {lost[0]} has no variant to stand beside; allowed are name and "
            f"dose of one: {sorted(own)}"
        )
    # Controls behind all others, so that the log reads in this order.
    plans = [
        CellPlan("random" if one.control else "vector", one.name, None, one.dose, edits=one.edits)
        for one in sorted(made, key=lambda one: one.control)
    ]
    return _Swept("answers with edits are compared with", plans)


class _Matching(NamedTuple):
    """How the controls of a sample are chosen."""

    encoder: SparseAutoencoder
    reader: LatentReader
    n: int
    seed: int
    plans: Callable[[CellKind, str, int], list[CellPlan]]
    """Of one latent."""

    async def run(self, run: SweepRun, own: Sequence[CellPlan]) -> TaskState:
        """The unsteered answer first, which tells the controls of the others."""
        place = {"layers": [self.reader.layer], "site": self.reader.site}
        first = await run._replace(capture=place).cell(BASELINE)
        found = await self.of(first.state.output)
        others = [
            plan
            for name, match in found.items()
            for number in match.latents
            for plan in self.plans("random", name, number)
        ]
        rest = run._replace(capture=place | {"positions": "completion"})
        return run.keep([first, *await rest.cells([*own, *others])])

    async def of(self, output: ModelOutput) -> dict[str, MatchedLatents]:
        """Controls by the name of their latent, told in the transcript."""
        if not self.n:
            return {}
        # A completion of one token has no row of its own.
        for positions in ("completion", "prompt"):
            rows = await read_rows(
                output, layers=(self.reader.layer,), positions=positions, source="captured",
                site=self.reader.site,
            )  # fmt: skip
            if rows is not None:
                break
        else:
            raise ArtifactError(
                "steering_sweep: the unsteered answer has no token to read, by which controls are "
                "chosen; pass controls=[]"
            )
        acts = rows.acts[0]
        swept = tuple(self.reader.latents.values())
        found = await in_thread(
            lambda: {
                name: matched_latents(
                    self.encoder, acts, number, n=self.n, seed=self.seed, exclude=swept
                )
                for name, number in self.reader.latents.items()
            }
        )
        told: dict[str, Any] = {
            name: {"latents": [*match.latents], "means": [*match.means], "mean": match.mean}
            for name, match in found.items()
        }
        transcript().info({"controls": told}, source="inspect_lens/steering_sweep")
        return found
