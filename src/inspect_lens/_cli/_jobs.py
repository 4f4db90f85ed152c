"""What the commands of probes do, between stores on disk and probes on disk."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import matplotlib  # noqa: F401 - reports need it: missed here, before anything is fitted
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inspect_lens.data import ActivationStore
from inspect_lens.errors import ArtifactError, LensError, SpecError
from inspect_lens.probe import (
    FOLLOWED_FLOOR,
    SENTENCE_POOL,
    AnyProbe,
    Evaluation,
    ModelRef,
)
from inspect_lens.spec import Positions, explain, parse_positions
from inspect_lens.train import (
    ActivationSet,
    calibrate,
    evaluate_probe,
    make_estimator,
    split_by_group,
    train_probe,
)
from inspect_lens.view import ReportSet, write_report

from ._output import Made, parse_layers, typed_command
from ._stores import (
    MEMORY,
    manifest_of,
    pieces,
    read_set,
    refuse_shared_texts,
    unverified,
)


def train_job(
    *,
    out: str,
    train: str,
    control: str,
    selection: str,
    held_out: Sequence[str],
    disjoint: Mapping[str, Any],
    name: str,
    family: str,
    settings: Mapping[str, Any],
    layers: Any,
    rows: Any,
    pool: str,
    seed: int,
    tokenizer: str = "",
    memory: float = MEMORY,
    work: str = "",
    card: Mapping[str, Any] | None = None,
    **how: Any,
) -> Made:
    """Train as `how` tells `train_probe`, save, report."""
    estimator = make_estimator(family, **settings)
    pools = tuple(part.strip() for part in pool.split(","))
    pool = SENTENCE_POOL if SENTENCE_POOL in pools else pools[0]
    picked = None if layers in (None, "all") else layers
    every = [uri for uri in (train, control, selection, *held_out) if uri]
    read = partial(
        read_set, layers=picked, pool=pool, tokenizer=tokenizer, memory=memory, work=work,
        beside=every,
    )  # fmt: skip
    fit, harmless = read(train, "train"), read(control, "control")
    n_read = len(fit)
    chosen = read(selection, "selection") if selection else None
    if chosen is None:
        fit, chosen = split_by_group(fit, seed=seed)
    for uri in (control, *held_out):
        refuse_shared_texts(train, uri, disjoint)
    judged = [read(uri, "held-out") for uri in held_out]
    manifest = manifest_of(train)
    facts = manifest["model"]
    positions = manifest["request"]["positions"]
    with warnings.catch_warnings():
        # What it warns of is shown with the result.
        warnings.filterwarnings("ignore", category=UserWarning, module=__name__.replace(".", r"\."))
        probe = _trained(
            settings,
            estimator,
            fit,
            selection=chosen,
            name=name or f"{Path(fit.model).name}/{family}",
            control=harmless,
            held_out=judged,
            disjoint={k: str(v) for k, v in disjoint.items()},
            layers=picked,
            rows=rows or None,
            pool=pools[0],
            pools=pools,
            positions=parse_positions(positions, field="positions"),
            seed=seed,
            model=ModelRef(name=facts["name"], sha256=facts["sha256"]),
            on_policy=bool(manifest["dataset"]["on_policy"]),
            dropped=int(manifest["n_samples"]) - n_read,
            description=str(manifest["dataset"]["label_meaning"]),
            command=typed_command(),
            **how,
        )
    check = next((d for d in judged if d.n_positive and d.n_negative), None)
    update: dict[str, Any] = {
        "calibration": calibrate(
            chosen.scores(probe), chosen.labels, name="selection",
            check=None if check is None else (check.scores(probe), check.labels),
        ),
    }  # fmt: skip
    update |= card or {}
    update["notes"] = (*update.get("notes", ()), *unverified((train, control, *held_out)))
    probe = probe.with_card(**update)
    folder = probe.save(out)
    known = [e.n_seen for e in probe.card.evaluations]
    sets = [report_set(probe, d, n_seen=n) for d, n in zip(judged, known, strict=True)]
    path = write_report(probe, folder, sets)
    return Made(
        probe=probe, folder=str(folder), evaluations=probe.card.evaluations,
        transfers=probe.card.transfers, report=str(path),
    )  # fmt: skip


def _trained(settings: Mapping[str, Any], *args: Any, **options: Any) -> AnyProbe:
    """What `train_probe` returns; what torch or scikit-learn say of a setting names the flag."""
    try:
        return train_probe(*args, **options)
    except (TypeError, ValueError) as error:
        if not settings or isinstance(error, LensError | ValidationError):
            raise
        given = ", ".join(f"{key!r} of {value!r}" for key, value in settings.items())
        raise SpecError(f"--setting: {given}: {error}; correct it, or leave it out") from error


def report_row(probe: AnyProbe, data: ActivationSet, rows: list[Evaluation]) -> Evaluation:
    """The evaluation of a set, put among the rows of a table; that of the card where it holds."""

    def same(e: Evaluation) -> tuple[object, ...]:
        # No hash: that of a set with other layers beside the probe's is another.
        return e.name, e.n_positive, e.n_negative, e.auroc

    found = evaluate_probe(probe, data, allow_seen=True)
    place = next((i for i, e in enumerate(rows) if same(e) == same(found)), len(rows))
    known = "content" if found.n_seen == 0 else "not checked"
    if place < len(rows):
        old = rows[place]
        known = old.disjoint_by
        if (old.recall, old.fpr, old.n_groups) == (found.recall, found.fpr, found.n_groups):
            # Its intervals are of more draws.
            found = old.model_copy(update={"n_seen": found.n_seen})
        else:
            found = found.model_copy(update={"baselines": old.baselines})
    rows[place : place + 1] = [found.model_copy(update={"disjoint_by": known})]
    return rows[place]


def report_set(
    probe: AnyProbe,
    data: ActivationSet,
    *,
    n_seen: int | None,
    store: str = "",
    tokenizer: str = "",
) -> ReportSet:
    """A set as reports show it; with a tokenizer, with a heat map."""
    tokens: list[list[str]] = []
    scores: list[Any] = []
    if tokenizer:
        opened = ActivationStore.open(store)
        texts = pieces(opened, tokenizer)
        ids = {s.record.id: s.read_ids for s in opened.samples()}
        tokens = [texts(ids[i]) for i in data.ids]
        scores = [probe.score_tokens(a, data.layers) for a in data.acts]
    return ReportSet(
        name=data.name, labels=data.labels, scores=data.scores(probe), groups=data.groups,
        ids=data.ids, tokens=tokens, token_scores=scores, n_seen=n_seen,
    )  # fmt: skip


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SetRecipe(_Part):
    """One data set of a recipe."""

    dataset: str
    name: str = ""
    """Folder of its store; the data set's name by default."""
    path: str | None = None
    """Files, where the set is files; relative to the working directory."""
    revision: str | None = None
    config: str | None = None
    """Configuration of a hub repository that has several."""
    split: str | None = None
    limit: int | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    disjoint: str = ""
    """Column that keeps it apart from the training set, where both are of one text-overlap group;
    `group` keeps all others apart."""


class Recipe(_Part):
    """How a probe is made."""

    name: str
    """`<model>/<name>`."""
    description: str
    source: str
    """Paper or code."""
    model: str
    """Model as the provider takes it."""
    model_args: dict[str, Any] = Field(default_factory=dict)
    """For the provider, such as `max_model_len` of the server that it starts."""
    layers: str | int
    """`all` to choose on the selection set, or what the source uses."""
    positions: Positions = "completion"
    family: str = "lr"
    behaviour_floor: float = FOLLOWED_FLOOR
    """Least share of answers that do what an instruction to be honest or to lie asks."""
    settings: dict[str, Any] = Field(default_factory=dict)
    rows: str = ""
    """`tokens`, `mean` or `last`; what the family's source takes by default."""
    pool: str = "mean"
    fpr: float = 0.01
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    train: SetRecipe
    control: SetRecipe
    held_out: tuple[SetRecipe, ...] = ()
    notes: tuple[str, ...] = ()
    """Where the recipe departs from the source, and what it needs."""


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe."""
    try:
        return Recipe.model_validate(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ArtifactError(f"{path}: cannot be read ({error}); see probes/recipes") from None
    except ValidationError as error:
        raise ArtifactError(
            f"{path}: not a recipe ({explain(error, at='recipe')}); see probes/recipes"
        ) from None


def run_recipe(
    path: str,
    *,
    out: str,
    work: str,
    model: str,
    model_args: dict[str, Any],
    memory: float = MEMORY,
) -> Made:
    """Collect every set of a recipe in `work`, where what is there already is used; then train."""
    recipe = load_recipe(path)
    if not work:
        raise SpecError("--work: is missing; a recipe needs a folder for its activations")
    # A server that runs already takes none of the arguments that the recipe starts one with.
    given = model_args if "base_url" in model_args else recipe.model_args | model_args
    stores = anyio.run(_collect, recipe, model or recipe.model, work, given)
    held = [part.name or part.dataset for part in recipe.held_out]
    control = recipe.control.name or recipe.control.dataset
    judged = dict(zip([control, *held], (recipe.control, *recipe.held_out), strict=True))
    return train_job(
        out=out, train=stores[recipe.train.name or recipe.train.dataset], control=stores[control],
        selection="", held_out=[stores[n] for n in held],
        disjoint={n: part.disjoint for n, part in judged.items() if part.disjoint},
        name=recipe.name, family=recipe.family, settings=recipe.settings, layers="all",
        rows=recipe.rows, pool=recipe.pool, fpr=recipe.fpr,
        behaviour_floor=recipe.behaviour_floor, allow_few=False,
        seed=recipe.seed, memory=memory, work=f"{work.rstrip('/')}/fits",
        card={"description": recipe.description, "source": recipe.source, "notes": recipe.notes},
    )  # fmt: skip


async def _collect(
    recipe: Recipe, model: str, work: str, model_args: dict[str, Any]
) -> dict[str, str]:
    """Collect every set through one model, whose server so starts once; none if all are there."""
    from inspect_ai.model import get_model

    from inspect_lens.collect import collect_async
    from inspect_lens.data import load_dataset

    stores: dict[str, str] = {}
    try:
        made = get_model(model, memoize=False, **model_args)
    except ValueError as error:
        raise SpecError(f"model={model}: {error}") from None
    async with made as live:
        for part in (recipe.train, recipe.control, *recipe.held_out):
            title = part.name or part.dataset
            data = load_dataset(
                part.dataset, path=part.path, revision=part.revision, config=part.config,
                split=part.split, limit=part.limit, **part.options,
            )  # fmt: skip
            store = await collect_async(
                live, data, f"{work.rstrip('/')}/{title}",
                layers=parse_layers(str(recipe.layers)), positions=recipe.positions,
                max_tokens=recipe.max_tokens, temperature=recipe.temperature, seed=recipe.seed,
            )  # fmt: skip
            stores[title] = store.uri
    return stores
