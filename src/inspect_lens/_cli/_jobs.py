"""What the commands of probes do, between stores on disk and probes on disk."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib  # noqa: F401 - reports need it: missed here, before anything is fitted

from inspect_lens.data import ActivationStore
from inspect_lens.errors import SpecError
from inspect_lens.probe import (
    FOLLOWED_FLOOR,
    RECALL_FLOOR,
    SENTENCE_POOL,
    AnyProbe,
    Evaluation,
    ModelRef,
    ProbeCard,
    Transfer,
    auroc,
    load_probe,
)
from inspect_lens.spec import parse_positions
from inspect_lens.train import (
    ActivationSet,
    calibrate,
    calibrate_threshold,
    evaluate_probe,
    make_estimator,
    refuse_seen,
    select_layer,
    split_by_group,
    train_probe,
    transfer_statement,
)
from inspect_lens.train.sets._splits import near_copies
from inspect_lens.view import ReportSet, write_report

from ._made import CHOSEN_HERE, Made
from ._stores import (
    MEMORY,
    judged_set,
    manifest_of,
    pieces,
    read_set,
    refuse_shared_texts,
    unverified,
)

__all__ = [
    "calibrate_job",
    "evaluate_job",
    "report_job",
    "sweep_job",
    "train_job",
]


def train_job(
    *,
    out: str,
    train: str,
    control: str,
    selection: str,
    heldout: Sequence[str],
    disjoint: Mapping[str, Any],
    name: str,
    family: str,
    settings: Mapping[str, Any],
    layers: Any,
    rows: Any,
    pool: str,
    fpr: float,
    allow_few: bool,
    n_resamples: int,
    seed: int,
    select_by: Any = "recall",
    recall_floor: float = RECALL_FLOOR,
    behaviour_floor: float = FOLLOWED_FLOOR,
    tokenizer: str = "",
    memory: float = MEMORY,
    work: str = "",
    card: Mapping[str, Any] | None = None,
) -> Made:
    """Train, save, report."""
    estimator = make_estimator(family, **settings)
    pools = tuple(part.strip() for part in pool.split(","))
    pool = SENTENCE_POOL if SENTENCE_POOL in pools else pools[0]
    picked = None if layers in (None, "all") else layers
    every = [uri for uri in (train, control, selection, *heldout) if uri]
    read = partial(
        read_set, layers=picked, pool=pool, tokenizer=tokenizer, memory=memory, work=work,
        beside=every,
    )  # fmt: skip
    fit, harmless = read(train, "train"), read(control, "control")
    n_read = len(fit)
    chosen = read(selection, "selection") if selection else None
    if chosen is None:
        fit, chosen = split_by_group(fit, seed=seed)
    for uri in (control, *heldout):
        refuse_shared_texts(train, uri, disjoint)
    judged = [read(uri, "heldout") for uri in heldout]
    manifest = manifest_of(train)
    facts = manifest["model"]
    positions = manifest["request"]["positions"]
    with warnings.catch_warnings():
        # What it warns of is shown with the result.
        warnings.filterwarnings("ignore", category=UserWarning, module=__name__.replace(".", r"\."))
        probe = train_probe(
            estimator,
            fit,
            selection=chosen,
            name=name or f"{Path(fit.model).name}/{family}",
            control=harmless,
            heldout=judged,
            disjoint={k: str(v) for k, v in disjoint.items()},
            layers=picked,
            rows=rows or None,
            pool=pools[0],
            pools=pools,
            positions=parse_positions(positions, field="positions"),
            fpr=fpr,
            select_by=select_by,
            recall_floor=recall_floor,
            behaviour_floor=behaviour_floor,
            allow_few=allow_few,
            n_resamples=n_resamples,
            seed=seed,
            model=ModelRef(name=facts["name"], sha256=facts["sha256"]),
            on_policy=bool(manifest["dataset"]["on_policy"]),
            dropped=int(manifest["n_samples"]) - n_read,
            description=str(manifest["dataset"]["label_meaning"]),
            command=shlex.join(["inspect-lens", *sys.argv[1:]]),
        )
    check = next((d for d in judged if d.n_positive and d.n_negative), None)
    update: dict[str, Any] = {
        "calibration": calibrate(
            chosen.scores(probe), chosen.labels, name="selection",
            check=None if check is None else (check.scores(probe), check.labels),
        ),
    }  # fmt: skip
    update |= card or {}
    update["notes"] = (*update.get("notes", ()), *unverified((train, control, *heldout)))
    probe = replace(probe, card=probe.card.model_copy(update=update))
    folder = probe.save(out)
    known = [e.n_seen for e in probe.card.evaluations]
    sets = [report_set(probe, d, n_seen=n) for d, n in zip(judged, known, strict=True)]
    path = write_report(probe, folder, sets, n_resamples=min(n_resamples, 500))
    return Made(
        probe=probe, folder=str(folder), evaluations=probe.card.evaluations,
        transfers=probe.card.transfers, report=str(path),
    )  # fmt: skip


def evaluate_job(
    probe: str,
    stores: Sequence[str],
    *,
    any_model: bool,
    allow_seen: bool,
    tokenizer: str,
    n_resamples: int,
    seed: int,
    control: str = "",
    train: str = "",
) -> Made:
    """Measure a probe on stores, beside baselines; with the training store there is a verdict."""
    loaded, made = load_probe(probe), []
    read = partial(judged_set, loaded, any_model=any_model, tokenizer=tokenizer)
    harmless = read(control) if control else None
    fit = read(train) if train else None
    judged = [read(uri) for uri in stores]
    for data in judged:
        found = evaluate_probe(
            loaded, data, control=harmless, train=fit, allow_seen=allow_seen,
            n_resamples=n_resamples, seed=seed,
        )  # fmt: skip
        known = "content" if found.n_seen == 0 else "not checked"
        made.append(found.model_copy(update={"disjoint_by": known}))
    verdicts: tuple[Transfer, ...] = ()
    if fit is not None:
        copies = near_copies(loaded, [fit], judged)
        verdicts = tuple(
            transfer_statement(fit.name, e, copies=copies.get(e.name, ()))
            for e in made
            if e.auroc is not None
        )
    return Made(
        probe=loaded, folder=str(loaded.path or probe), evaluations=tuple(made),
        transfers=verdicts,
    )  # fmt: skip


def calibrate_job(
    probe: str,
    *,
    out: str,
    control: str,
    labelled: str,
    fpr: float,
    statistics: Sequence[str] = ("answer",),
    length: int = 0,
    method: str,
    allow_few: bool,
    any_model: bool,
    allow_seen: bool,
    tokenizer: str,
) -> Made:
    """Set threshold and probabilities anew, and save."""
    loaded = load_probe(probe)
    update: dict[str, Any] = {}

    def unseen(uri: str) -> ActivationSet:
        data = judged_set(loaded, uri, any_model=any_model, tokenizer=tokenizer)
        if not allow_seen:
            # Scores of samples that shaped the probe are not those of new ones.
            refuse_seen(loaded, data, roles=("training", "selection"))
        return data

    if control:
        if length and not any(one.partition(":")[0] == "alarm" for one in statistics):
            raise SpecError(
                f"--length {length}: only an alarm has a length up to which it holds; add --for "
                "alarm, or leave --length out"
            )
        whole = unseen(control)
        data = whole.negatives()
        new = tuple(
            calibrate_threshold(
                loaded, whole, fpr, statistic=statistic, allow_few=allow_few,
                length=length or None if statistic.partition(":")[0] == "alarm" else None,
            )
            for statistic in statistics
        )  # fmt: skip
        # The card keeps its thresholds for other statistics.
        anew = {t.statistic for t in new}
        kept = tuple(
            t for t in loaded.card.thresholds if (t.statistic or loaded.card.answer) not in anew
        )
        update["thresholds"] = (*new, *kept)
        if loaded.card.seen is not None:
            shown = data.shown(loaded.card.seen.by, loaded.layers)
            update["seen"] = loaded.card.seen.with_control(shown, added=bool(kept))
        # They were measured at the threshold that is gone.
        gone: dict[str, Any] = {}
        if loaded.card.answer in anew:
            gone = dict.fromkeys(
                ("recall", "recall_interval", "fpr", "fpr_interval", "balanced_accuracy")
            )
        stay = {str(t.statistic or loaded.card.answer) for t in kept}
        update["evaluations"] = tuple(
            e.model_copy(update=gone | {"rates": tuple(r for r in e.rates if r.statistic in stay)})
            for e in loaded.card.evaluations
        )
    if labelled:
        data = unseen(labelled)
        update["calibration"] = calibrate(
            data.scores(loaded), data.labels, method=method, name=data.name
        )
        seen = update.get("seen", loaded.card.seen)
        if seen is not None:
            update["seen"] = seen.with_calibration(data.shown(seen.by, loaded.layers))
    if not update:
        raise SpecError("nothing to do; allowed are --control, --labelled, or both")
    made = replace(loaded, card=loaded.card.model_copy(update=update), path=None)
    return Made(probe=made, folder=str(made.save(out)), evaluations=())


def sweep_job(
    train: str,
    selection: str,
    families: Sequence[str],
    *,
    layers: Any,
    rows: Any,
    pool: str,
    seed: int,
    tokenizer: str,
    control: str = "",
    fpr: float = 0.01,
    memory: float = MEMORY,
    work: str = "",
) -> tuple[dict[str, Any], list[str]]:
    """Every family at every layer, on the selection set; with a control set also the recall."""
    every = [uri for uri in (train, control, selection) if uri]
    read = partial(read_set, pool=pool, tokenizer=tokenizer, memory=memory, work=work, beside=every)
    fit = read(train, "train")
    if selection:
        chosen = read(selection, "selection")
    else:
        fit, chosen = split_by_group(fit, seed=seed)
    harmless = read(control, "control") if control else None
    card = ProbeCard(name="sweep/any", layers=fit.layers[:1], hidden=fit.hidden, pool=pool)
    table: list[dict[str, Any]] = []
    lines = [f"{'family':18s} {'layer':>5s} {'AUROC':>7s} {'separation':>11s}"]
    if control:
        lines[0] += f" {f'recall at {fpr:g}':>22s}"
    for family in families:
        choice = select_layer(
            make_estimator(family), fit, chosen, card=card, rows=rows or None,
            layers=None if layers == "all" else layers, control=harmless, fpr=fpr, seed=seed,
        )  # fmt: skip
        together = len(choice.probe.layers) > 1
        if together:
            area = auroc(chosen.labels, chosen.scores(choice.probe))
            joint = list(choice.probe.layers)
            table.append({"family": family, "chosen": True, "layers": joint, "auroc": area})
            lines.append(f"{family:18s} {','.join(map(str, joint)):>5s} {area:7.4f} *")
        for score in choice.sweep:
            best = score.layer in choice.probe.layers and not together
            table.append({"family": family, "chosen": best, **score.model_dump()})
            mark = " *" if best else ""
            recall = ""
            if score.recall is not None and score.recall_interval is not None:
                low, high = score.recall_interval.low, score.recall_interval.high
                recall = f" {f'{score.recall:.3f} [{low:.3f}, {high:.3f}]':>22s}"
            lines.append(
                f"{family:18s} {score.layer:5d} {score.auroc:7.4f} {score.separation:11.2f}"
                f"{recall}{mark}"
            )
    lines.append(CHOSEN_HERE)
    return {"selection": chosen.name, "n": len(chosen), "sweep": table}, lines


def report_job(
    probe: str,
    stores: Sequence[str],
    *,
    out: str,
    tokenizer: str,
    any_model: bool,
    allow_seen: bool,
    n_resamples: int,
) -> Made:
    """Measure a saved probe on stores, and write a report of both."""
    loaded = load_probe(probe)
    sets, rows, asked = [], list(loaded.card.evaluations), []
    for uri in stores:
        data = judged_set(loaded, uri, any_model=any_model, tokenizer=tokenizer)
        if not allow_seen:
            refuse_seen(loaded, data)
        found = _row(loaded, data, rows, n_resamples=n_resamples)
        asked.append(found)
        sets.append(report_set(loaded, data, store=uri, tokenizer=tokenizer, n_seen=found.n_seen))
    shown = replace(loaded, card=loaded.card.model_copy(update={"evaluations": tuple(rows)}))
    path = write_report(shown, out, sets, n_resamples=n_resamples)
    folder = str(loaded.path or probe)
    return Made(probe=loaded, folder=folder, evaluations=tuple(asked), report=str(path))


def _row(
    probe: AnyProbe, data: ActivationSet, rows: list[Evaluation], *, n_resamples: int
) -> Evaluation:
    """The evaluation of a set, put among the rows of a table; that of the card where it holds."""

    def same(e: Evaluation) -> tuple[object, ...]:
        # No hash: that of a set with other layers beside the probe's is another.
        return e.name, e.n_positive, e.n_negative, e.auroc

    found = evaluate_probe(probe, data, allow_seen=True, n_resamples=n_resamples)
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
