"""What the commands of probes do, between stores on disk and probes on disk."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import matplotlib  # noqa: F401 - reports need it: missed here, before anything is fitted
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inspect_lens._base.artifact import with_interval
from inspect_lens._base.shipped import model_path
from inspect_lens._base.untrusted import parse_yaml
from inspect_lens.collect import collect_async, feed_again
from inspect_lens.collect._collect import opened
from inspect_lens.data import ActivationStore, ProbeDataset, load_dataset
from inspect_lens.errors import ArtifactError, LensError, SpecError
from inspect_lens.probe import (
    FOLLOWED_FLOOR,
    MIN_GROUPS,
    SENTENCE_POOL,
    AnyProbe,
    Evaluation,
    ModelRef,
    ProbeCard,
    fingerprint_model,
)
from inspect_lens.spec import Positions, explain, parse_positions
from inspect_lens.train import (
    ActivationSet,
    RateShift,
    ScoreShift,
    calibrate,
    evaluate_probe,
    make_estimator,
    score_shift,
    split_by_group,
    train_probe,
)
from inspect_lens.train.judging._shift import refuse_another_model
from inspect_lens.view import ReportSet, write_report

from ._output import Made, parse_layers, typed_command
from ._stores import (
    COPIES,
    MEMORY,
    is_file,
    manifest_of,
    pieces,
    read_set,
    refuse_other_source,
    refuse_other_tokens,
    refuse_shared_stores,
    refuse_shared_texts,
    unverified,
)


def check_job(
    probe: AnyProbe,
    model: str,
    control: str,
    *,
    limit: int,
    concurrency: int,
    model_args: dict[str, Any],
    any_model: bool,
    tokenizer: str,
    n_resamples: int,
) -> ScoreShift:
    """Feed a control set again, and compare."""
    if not probe.card.thresholds:
        raise SpecError(
            f"probe {probe.name!r} has no threshold, so there is no rate to check; set one with "
            "inspect-lens probe calibrate"
        )
    if is_file(control):
        raise SpecError(
            f"--control: {control} is a file of rows, without the tokens to feed; allowed is the "
            "folder of a store"
        )
    refuse_other_source(probe, control, any_model=any_model)
    store = ActivationStore.open(control)
    harmless = [r for r in store.records() if r.n_rows and r.label is not None and not r.label]
    chosen = harmless[: limit or None]
    if not chosen:
        raise SpecError(f"--control: {control} has no harmless sample; give a control set")
    size = 4e-9 * len(probe.layers) * store.hidden * sum(r.n_rows for r in chosen)
    if COPIES * size > MEMORY:
        raise SpecError(
            f"--control: {len(chosen)} samples of {control} have {size:.2g} GB of rows, which are "
            f"held several times; allowed are {MEMORY / COPIES:g} GB; pass --limit"
        )
    ids = {r.id for r in chosen}
    texts = pieces(store, tokenizer) if SENTENCE_POOL in probe.pool else None
    before = ActivationSet.from_store(store, layers=probe.layers, pieces=texts, ids=ids)
    refuse_other_tokens(probe, control, before)
    # Their tokens alone: the rows are of every layer of the store.
    samples = [
        replace(s, acts=None) for s in store.samples() if s.record.id in ids and s.acts is not None
    ]
    fed = model.partition("/")[2]
    _refuse_another_model(before, fed, model_args)

    async def run() -> ActivationSet:
        again = await feed_again(
            model, samples, layers=probe.layers, concurrency=concurrency, model_args=model_args
        )
        return replace(
            before, model=fed, model_sha256=fingerprint_model(fed), acts=again.acts,
            capture=again.capture,
        )  # fmt: skip

    return score_shift(probe, before, anyio.run(run), n_resamples=n_resamples)


def _refuse_another_model(before: ActivationSet, fed: str, model_args: dict[str, Any]) -> None:
    """Refuse other weights than those of the store, before anything is fed to them."""
    # Quantised weights always differ from those of the store, so they are judged after they ran.
    config = Path(model_path(fed)) / "config.json"
    if "quantization" in model_args or not config.is_file():
        return
    if b"quantization_config" in config.read_bytes():
        return
    facts = before.capture
    expected = None if facts is None else facts.model_copy(update={"quantization": None})
    refuse_another_model(
        before, replace(before, model=fed, model_sha256=fingerprint_model(fed), capture=expected)
    )


def check_lines(shift: ScoreShift) -> Iterator[str]:
    """The same for people."""
    own = "which of them set its thresholds is not known"
    if shift.n_calibrated is not None:
        own = f"{shift.n_calibrated} of them set its thresholds"
    yield f"{shift.probe} on {shift.control}: {shift.n} answers of {shift.n_groups} groups, {own}"
    yield f"  fed to {shift.model}; the store is of {shift.stored_model}"
    what = " and ".join(shift.differences)
    yield (
        f"  computed with {what}"
        if what
        else "  engine, dtype and quantisation are those of the store, as far as both sides tell"
    )
    span = "" if shift.interval is None else f" {shift.interval:.4g}"
    if shift.n_groups < MIN_GROUPS:
        span = f" (no interval: {shift.n_groups} groups are too few)"
    yield (
        f"  scores moved by {shift.mean:+.4g} on average{span}, and by "
        f"{shift.largest:.4g} at most; they spread by {shift.spread:.4g}"
    )
    for one in shift.thresholds:
        head = f"  fpr={one.fpr:g} ({one.value:.4g}, for {one.statistic}): "
        outside = ""
        if one.n_outside:
            outside = f"{one.n_outside} answers are of a length that it was not set on; "
        if not one.n:
            yield f"{head}{outside}none is left to compare"
            continue
        yield (
            f"{head}{outside}{with_interval(one.n_here / one.n, one.here, '.2%')} above it here, "
            f"{with_interval(one.n_before / one.n, one.before, '.2%')} in the store; "
            f"{one.n_changed} of {one.n} changed sides {one.changed:.2%}: {_verdict(one)}"
        )
    yield (
        "  The same tokens were fed again. What the model would answer here may be other text: "
        "collect a control set here to measure that."
    )


def _verdict(one: RateShift) -> str:
    if one.holds:
        assert one.here is not None
        assert one.before is not None
        if one.here.high < one.fpr <= one.before.high:
            return (
                "the rate holds, but fewer are flagged here than in the store, and positives may "
                "be missed as well: calibrate on rows of this engine"
            )
        return "the rate holds"
    if one.holds is None:
        return f"{one.n} are too few to tell whether the rate holds"
    if one.held is False:
        return (
            "the rate does not hold, and not in the store either: these are other texts than it "
            "was set on"
        )
    return "THE RATE DOES NOT HOLD HERE: calibrate on rows of this engine"


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
        refuse_shared_stores(train, uri, disjoint)
    judged = [read(uri, "held-out") for uri in held_out]
    manifest = manifest_of(train)
    facts = manifest["model"]
    positions = manifest["request"]["positions"]
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
            numerics=chosen.capture and chosen.capture.numerics,
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
    shown: tuple[str, ...] = ()
    try:
        with warnings.catch_warnings(record=True) as told:
            probe = train_probe(*args, **options)
        shown = probe.card.warnings  # with the result
        return probe
    except (TypeError, ValueError) as error:
        if not settings or isinstance(error, LensError | ValidationError):
            raise
        given = ", ".join(f"{key!r} of {value!r}" for key, value in settings.items())
        raise SpecError(f"--setting: {given}: {error}; correct it, or leave it out") from error
    finally:
        for one in told:
            if str(one.message) not in shown:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


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

    @property
    def title(self) -> str:
        return self.name or self.dataset

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
    behaviour_floor: float = Field(default=FOLLOWED_FLOOR, ge=0, le=1)
    """Least share of answers that do what an instruction to be honest or to lie asks."""
    settings: dict[str, Any] = Field(default_factory=dict)
    rows: Literal["", "tokens", "mean", "last"] = ""
    """`tokens`, `mean` or `last`; what the family's source takes by default."""
    pool: str = "mean"
    fpr: float = Field(default=0.01, gt=0, lt=1)
    max_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    seed: int = Field(default=0, ge=0)
    train: SetRecipe
    control: SetRecipe
    held_out: tuple[SetRecipe, ...] = ()
    notes: tuple[str, ...] = ()
    """Where the recipe departs from the source, and what it needs."""


def load_recipe(path: str | Path) -> Recipe:
    try:
        recipe = Recipe.model_validate(parse_yaml(Path(path).read_text(encoding="utf-8")))
        make_estimator(recipe.family, **recipe.settings)
        for pool in recipe.pool.split(","):  # which its card judges, and the name
            ProbeCard(name=recipe.name, layers=(0,), hidden=1, pool=pool.strip())
    except SpecError as error:
        raise ArtifactError(f"{path}: recipe.{error}") from None
    except ValidationError as error:
        raise ArtifactError(
            f"{path}: not a recipe ({explain(error, at='recipe')}); see probes/recipes"
        ) from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: cannot be read ({error}); see probes/recipes") from None
    return recipe


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
    disjoint = {p.title: p.disjoint for p in (recipe.control, *recipe.held_out) if p.disjoint}
    sets = _load_sets(recipe, disjoint)
    stores = anyio.run(_collect, recipe, sets, model or recipe.model, work, given)
    return train_job(
        out=out, train=stores[recipe.train.title], control=stores[recipe.control.title],
        selection="", held_out=[stores[part.title] for part in recipe.held_out], disjoint=disjoint,
        name=recipe.name, family=recipe.family, settings=recipe.settings, layers="all",
        rows=recipe.rows, pool=recipe.pool, fpr=recipe.fpr,
        behaviour_floor=recipe.behaviour_floor, allow_few=False,
        seed=recipe.seed, memory=memory, work=f"{work.rstrip('/')}/fits",
        card={"description": recipe.description, "source": recipe.source, "notes": recipe.notes},
    )  # fmt: skip


def _load_sets(recipe: Recipe, disjoint: Mapping[str, str]) -> dict[str, ProbeDataset]:
    """Every set by its name; judged before the first of them is collected."""
    parts = (recipe.train, recipe.control, *recipe.held_out)
    titles = [part.title for part in parts]
    if twice := next((title for title in titles if titles.count(title) > 1), None):
        raise SpecError(
            f"{twice}: the name of {titles.count(twice)} sets of the recipe; allowed are unique "
            "names; give each its own, as name:"
        )
    sets = {
        part.title: load_dataset(
            part.dataset, path=part.path, revision=part.revision, config=part.config,
            split=part.split, limit=part.limit, **part.options,
        )
        for part in parts
    }  # fmt: skip
    first = sets[recipe.train.title]
    for title in titles[1:]:
        both = (first, sets[title])
        refuse_shared_texts(
            title, [one.text_overlap_group for one in both],
            ((sample.columns for sample in one.samples) for one in both), disjoint,
        )  # fmt: skip
    return sets


async def _collect(
    recipe: Recipe,
    sets: Mapping[str, ProbeDataset],
    model: str,
    work: str,
    model_args: dict[str, Any],
) -> dict[str, str]:
    """Collect every set through one model, whose server so starts once; none if all are there."""
    stores: dict[str, str] = {}
    async with opened(model, 64, model_args) as live:
        for title, data in sets.items():
            store = await collect_async(
                live, data, f"{work.rstrip('/')}/{title}",
                layers=parse_layers(str(recipe.layers)), positions=recipe.positions,
                max_tokens=recipe.max_tokens, temperature=recipe.temperature, seed=recipe.seed,
            )  # fmt: skip
            stores[title] = store.uri
    return stores
