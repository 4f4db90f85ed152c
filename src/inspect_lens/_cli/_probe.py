"""`inspect-lens probe …`: the commands and their options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from inspect_lens._base.artifact import with_interval
from inspect_lens.errors import SpecError
from inspect_lens.probe import FOLLOWED_FLOOR, RECALL_FLOOR, FitRows, LabelSource, ProbabilityMap
from inspect_lens.spec import PositionName

from ._choices import Family, LieDetector, SelectBy
from ._output import (
    AllowSeen,
    AnyModel,
    BaseUrl,
    CommandGroup,
    Json,
    Layers,
    check_read_with,
    check_recipe_options,
    emit,
    examples,
    kept_fits,
    number,
    on_interrupt,
    out_folder,
    parse_layers,
    parse_model_args,
    parse_settings,
)

if TYPE_CHECKING:
    from inspect_lens.probe import ProbeCard, Threshold
    from inspect_lens.train import ActivationSet

probe_app = typer.Typer(
    cls=CommandGroup,
    help="Collect activations, train probes on them, measure how good they are, import others.",
    no_args_is_help=True,
)

OneProbe = Annotated[str, typer.Argument(help="Probe: name, folder or hf:// address.")]
ServedModel = Annotated[
    str,
    typer.Option(
        help="lens/<model>, or vllm-lens/<model>, which is the same: that of the server at "
        "--base-url; without one, a server is started for it."
    ),
]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests at the same time.")]
Fpr = Annotated[float, number("False positive rate that the threshold allows.")]
Resamples = Annotated[int, typer.Option(min=0, help="Bootstrap draws; 0 leaves the bootstrap out.")]
_EVERY_FAMILY: Final = f"{', '.join(Family)}."
FAMILY: Final = typer.Option(metavar="FAMILY", help=f"Kind of probe: {_EVERY_FAMILY}")
FAMILIES: Final = typer.Option(
    metavar="FAMILY", help=f"Kind of probe to compare; repeatable: {_EVERY_FAMILY}"
)
Rows = Annotated[FitRows | None, typer.Option(help="Rows of a sample; the family's by default.")]
ModelArgs = Annotated[
    list[str] | None,
    typer.Option(
        "-M",
        "--model-arg",
        help="Argument of the provider, such as max_model_len=4096. Repeatable.",
    ),
]
Memory = Annotated[float, number("Memory in GB, plus 0.4 for imports; larger sets stay on disk.")]
Resume = Annotated[
    str, out_folder("Folder for finished fits of large stores, so that a stopped run continues.")
]
Tokenizer = Annotated[
    str,
    typer.Option(
        help="Checkpoint with the tokenizer, for pools by sentence; the store's model by default."
    ),
]


@probe_app.command(
    epilog=examples(
        "inspect-lens probe collect --model lens/my-model --base-url localhost:8000 \\",
        "    --dataset instructed_pairs --layers 8-14 --out acts/train",
        "inspect-lens probe collect --model vllm-lens/my-model --dataset prompts \\",
        "    --path prompts.jsonl --limit 400 --out acts/control",
    )
)
def collect(
    model: ServedModel,
    dataset: Annotated[str, typer.Option(help="Name of a data set; a wrong name lists all.")],
    out: Annotated[str, out_folder("Store to write: a folder or an fsspec URL.")],
    path: Annotated[str, typer.Option(help="File or folder, for data sets that are files.")] = "",
    revision: Annotated[str, typer.Option(help="Revision of the data set on the hub.")] = "",
    config: Annotated[str, typer.Option(help="Configuration of the data set on the hub.")] = "",
    split: Annotated[str, typer.Option(help="Split to read; the set's own by default.")] = "",
    limit: Annotated[
        int,
        typer.Option(
            min=0,
            help="Draw at most this many samples at random, as many of each label; 0 reads all.",
        ),
    ] = 0,
    option: Annotated[
        list[str] | None, typer.Option(help="Option of the data set, such as n=400. Repeatable.")
    ] = None,
    label_source: Annotated[
        LabelSource | None,
        typer.Option(help="What says which samples are positive; by default what the set says."),
    ] = None,
    layers: Layers = "all",
    positions: Annotated[PositionName, typer.Option(help="Tokens to keep.")] = "completion",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    temperature: Annotated[float, number("Temperature of sampling.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    concurrency: Concurrency = 64,
    shard_samples: Annotated[
        int, typer.Option(min=1, help="Samples in each file of the store.")
    ] = 64,
    skip_errors: Annotated[bool, typer.Option(help="List failed samples and continue.")] = False,
    base_url: BaseUrl = "",
    model_arg: ModelArgs = None,
    as_json: Json = False,
) -> None:
    """Capture activations of a data set; the same command continues a stopped run."""
    from inspect_lens.collect import collect as run
    from inspect_lens.collect._collect import n_kept
    from inspect_lens.data import load_dataset

    data = load_dataset(
        dataset, path=path or None, revision=revision or None, config=config or None,
        split=split or None, limit=limit or None, label_source=label_source,
        **parse_settings(option or [], "--option", "n=400"),
    )  # fmt: skip
    with on_interrupt(lambda: f"{n_kept(out)} of {len(data)} samples are in {out}"):
        store = run(
            model, data, out, layers=parse_layers(layers), positions=positions,
            max_tokens=max_tokens, temperature=temperature, seed=seed, concurrency=concurrency,
            shard_samples=shard_samples, on_error="skip" if skip_errors else "raise",
            model_args=parse_model_args(model_arg, base_url),
        )  # fmt: skip
    lines, empty = [repr(store)], int(store.manifest["n_empty"])
    if empty:
        lines.append(f"{empty} samples have no rows: they failed, or have no token to read")
    emit({"store": store.uri, **store.manifest}, lines, as_json=as_json)


@probe_app.command(
    epilog=examples(
        "inspect-lens probe train --train acts/train --control acts/control \\",
        "    --held-out acts/test --name my-model/lies --out my-probes/lies",
        "inspect-lens probe train --recipe recipe.yaml --work acts --out my-probes/lies",
    )
)
def train(
    context: typer.Context,
    out: Annotated[str, out_folder("Folder to write the probe to.")],
    recipe: Annotated[
        str, typer.Option(help="YAML file that fixes data and training; needs --work.")
    ] = "",
    work: Annotated[str, out_folder("Folder for the stores of the recipe.")] = "",
    model: Annotated[str, typer.Option(help="Model to use in place of the recipe's.")] = "",
    base_url: BaseUrl = "",
    model_arg: ModelArgs = None,
    train_store: Annotated[str, typer.Option("--train", help="Store to train on.")] = "",
    control: Annotated[str, typer.Option(help="Store of harmless samples.")] = "",
    selection: Annotated[str, typer.Option(help="Store to choose the layer on.")] = "",
    held_out: Annotated[
        list[str] | None, typer.Option(help="Store to measure the probe on. Repeatable.")
    ] = None,
    disjoint: Annotated[
        list[str] | None,
        typer.Option(help="SET=KEY: metadata that keeps a set apart; 'group' by default."),
    ] = None,
    name: Annotated[str, typer.Option(help="Name on the card: <model>/<name>.")] = "",
    family: Annotated[Family, FAMILY] = Family.LR,
    setting: Annotated[
        list[str] | None, typer.Option(help="Setting of the family, as key=value. Repeatable.")
    ] = None,
    layers: Layers = "all",
    rows: Rows = None,
    pool: Annotated[
        str,
        typer.Option(help="How token scores become one; of several (mean,max) the best is chosen."),
    ] = "mean",
    fpr: Fpr = 0.01,
    select_by: Annotated[
        SelectBy, typer.Option(help="What chooses the layer; recall is that at --fpr.")
    ] = "recall",
    recall_floor: Annotated[
        float, number("Recall at the threshold below which the card warns.", min=0, max=1)
    ] = RECALL_FLOOR,
    behaviour_floor: Annotated[
        float,
        number(
            "Least share of answers that do what an instruction to be honest or to lie asks, "
            "where labels come from it; 0 asks for nothing.",
            min=0,
            max=1,
        ),
    ] = FOLLOWED_FLOOR,
    allow_few: Annotated[bool, typer.Option(help="Accept a small control set.")] = False,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the split and of random directions.")
    ] = 0,
    tokenizer: Tokenizer = "",
    memory: Memory = 4.0,
    resume: Resume = "",
    as_json: Json = False,
) -> None:
    """Train a probe: fit, choose the layer, set the threshold, measure, write probe and report."""
    from ._jobs import run_recipe, train_job

    check_recipe_options(context, with_recipe=bool(recipe))
    if recipe:
        with on_interrupt(lambda: f"finished samples are in {work}"):
            made = run_recipe(
                recipe, out=out, work=work, model=model, memory=memory,
                model_args=parse_model_args(model_arg, base_url),
            )  # fmt: skip
    else:
        with kept_fits(resume):
            made = train_job(
                out=out, train=train_store, control=control, selection=selection,
                held_out=held_out or [],
                disjoint=parse_settings(disjoint or [], "--disjoint", "test=question"), name=name,
                family=family.value, settings=parse_settings(setting or []),
                layers=parse_layers(layers),
                rows=rows or "", pool=pool, fpr=fpr, allow_few=allow_few, seed=seed,
                select_by=select_by, recall_floor=recall_floor, behaviour_floor=behaviour_floor,
                tokenizer=tokenizer, memory=memory,
                work=resume,
            )  # fmt: skip
    emit(made.result(), made.lines(), as_json=as_json)


@probe_app.command(
    epilog=examples(
        "inspect-lens probe evaluate my-probes/lies acts/other --control acts/control \\",
        "    --train acts/train",
    )
)
def evaluate(
    probe: OneProbe,
    store: Annotated[list[str], typer.Argument(help="Stores to measure on.")],
    control: Annotated[str, typer.Option(help="Store of harmless samples, for the recall.")] = "",
    train_store: Annotated[
        str, typer.Option("--train", help="Store it was trained on; adds baselines and a verdict.")
    ] = "",
    any_model: AnyModel = False,
    allow_seen: AllowSeen = False,
    tokenizer: Tokenizer = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of random directions.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure a probe on stores; the probe stays as it is.

    A store with samples that trained the probe, chose its layer, set its threshold or fitted its
    probabilities is refused.
    """
    from inspect_lens.probe import Transfer, load_probe
    from inspect_lens.train import evaluate_probe, transfer_statement
    from inspect_lens.train.sets._splits import near_copies

    from ._output import Made
    from ._stores import judged_set

    loaded, found = load_probe(probe), []
    read = partial(judged_set, loaded, any_model=any_model, tokenizer=tokenizer)
    harmless = read(control) if control else None
    fit = read(train_store) if train_store else None
    judged = [read(uri) for uri in store]
    for data in judged:
        one = evaluate_probe(
            loaded, data, control=harmless, train=fit, allow_seen=allow_seen, seed=seed
        )
        known = "content" if one.n_seen == 0 else "not checked"
        found.append(one.model_copy(update={"disjoint_by": known}))
    verdicts: tuple[Transfer, ...] = ()
    if fit is not None:
        copies = near_copies(loaded, [fit], judged)
        verdicts = tuple(
            transfer_statement(fit.name, e, copies=copies.get(e.name, ()))
            for e in found
            if e.auroc is not None
        )
    made = Made(
        probe=loaded, folder=str(loaded.path or probe), evaluations=tuple(found),
        transfers=verdicts,
    )  # fmt: skip
    emit(made.result(), made.lines(), as_json=as_json)


@probe_app.command(
    epilog=examples(
        "inspect-lens probe calibrate my-probes/lies --control acts/control --fpr 0.01 \\",
        "    --for answer --for alarm --out my-probes/lies-2",
    )
)
def calibrate(
    context: typer.Context,
    probe: OneProbe,
    out: Annotated[str, out_folder("Folder to write the calibrated probe to.")],
    control: Annotated[str, typer.Option(help="Store of harmless samples.")] = "",
    labelled: Annotated[str, typer.Option(help="Store with both classes, for probabilities.")] = "",
    fpr: Fpr = 0.01,
    statistic: Annotated[
        list[str] | None,
        typer.Option(
            "--for",
            help="What the threshold is compared with: answer (default), alarm (the running score "
            "after every token), token, or with a pool, as alarm:ema:0.1. Repeatable.",
        ),
    ] = None,
    length: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens up to which --for alarm holds; 0 takes what the set shows."
        ),
    ] = 0,
    method: Annotated[ProbabilityMap, typer.Option(help="How to fit probabilities.")] = "platt",
    allow_few: Annotated[bool, typer.Option(help="Accept a small control set.")] = False,
    any_model: AnyModel = False,
    allow_seen: AllowSeen = False,
    tokenizer: Tokenizer = "",
    as_json: Json = False,
) -> None:
    """Set thresholds on harmless samples, fit probabilities on a labelled set, or do both.

    Recall and false positive rate on the card were measured at the old threshold, so they are
    dropped, and verdicts on transfer that rest on them; `evaluate` measures them again.
    """
    from inspect_lens.probe import load_probe
    from inspect_lens.train import calibrate as fit_probabilities
    from inspect_lens.train import calibrate_threshold, refuse_seen

    from ._output import Made
    from ._stores import judged_set

    loaded, statistics = load_probe(probe), statistic or ["answer"]
    if not (control or labelled):
        raise SpecError("nothing to do; allowed are --control, --labelled, or both")
    is_alarm = {one: one.partition(":")[0] == "alarm" for one in statistics}
    check_read_with(context, "--control", control, "statistic", "fpr", "length", "allow_few")
    check_read_with(context, "--labelled", labelled, "method")
    if length and not any(is_alarm.values()):
        raise SpecError(
            f"--length {length}: only an alarm has a length up to which it holds; add --for "
            "alarm, or leave --length out"
        )

    def unseen(uri: str) -> ActivationSet:
        data = judged_set(loaded, uri, any_model=any_model, tokenizer=tokenizer)
        if not allow_seen:
            # Scores of samples that shaped the probe are not those of new ones.
            refuse_seen(loaded, data, roles=("training", "selection"))
        return data

    card = loaded.card
    if control:
        data = unseen(control)
        new = [
            calibrate_threshold(
                loaded, data, fpr, statistic=one, allow_few=allow_few,
                length=length or None if is_alarm[one] else None,
            )
            for one in statistics
        ]  # fmt: skip
        card = _with_thresholds(card, new)
        if card.seen is not None:
            shown = data.negatives().shown(card.seen.by, loaded.layers)
            seen = card.seen.with_control(shown, added=len(card.thresholds) > len(new))
            card = card.model_copy(update={"seen": seen})
    if labelled:
        data = unseen(labelled)
        fitted = fit_probabilities(
            data.scores(loaded), data.labels, method=method, name=data.name,
            numerics=data.capture and data.capture.numerics,
        )  # fmt: skip
        card = card.model_copy(update={"calibration": fitted})
        if card.seen is not None:
            seen = card.seen.with_calibration(data.shown(card.seen.by, loaded.layers))
            card = card.model_copy(update={"seen": seen})
    anew = replace(loaded, card=card, path=None)
    made = Made(probe=anew, folder=str(anew.save(out)), evaluations=())
    emit(made.result(), made.lines(), as_json=as_json)


@probe_app.command(
    epilog=examples(
        "inspect-lens probe check my-probes/lies --model vllm-lens/my-model \\",
        "    --control acts/control -M quantization=fp8",
    )
)
def check(
    probe: OneProbe,
    model: ServedModel,
    control: Annotated[str, typer.Option(help="Store of harmless samples, best the card's own.")],
    limit: Annotated[
        int, typer.Option(min=0, help="Compare at most this many harmless samples; 0 takes all.")
    ] = 0,
    concurrency: Concurrency = 64,
    base_url: BaseUrl = "",
    model_arg: ModelArgs = None,
    any_model: AnyModel = False,
    tokenizer: Tokenizer = "",
    resamples: Resamples = 10_000,
    as_json: Json = False,
) -> None:
    """Measure what another engine, dtype or quantisation does to scores and rates.

    The tokens of the control set are fed to the model again, and each answer's score is compared
    with the stored one. Nothing is sampled: what the model would answer here is not measured.
    """
    from inspect_lens.probe import load_probe

    from ._jobs import check_job, check_lines

    shift = check_job(
        load_probe(probe), model, control, limit=limit, concurrency=concurrency,
        model_args=parse_model_args(model_arg, base_url), any_model=any_model,
        tokenizer=tokenizer, n_resamples=resamples,
    )  # fmt: skip
    emit(json.loads(shift.model_dump_json()), check_lines(shift), as_json=as_json)


def _with_thresholds(card: ProbeCard, new: Sequence[Threshold]) -> ProbeCard:
    """A card with new thresholds beside those for other statistics; what the old ones did goes."""
    anew = {t.statistic or card.answer for t in new}
    kept = [t for t in card.thresholds if (t.statistic or card.answer) not in anew]
    gone: dict[str, Any] = {}
    if card.answer in anew:
        names = ("recall", "recall_interval", "fpr", "fpr_interval", "balanced_accuracy")
        gone = dict.fromkeys(names)
    stay = {str(t.statistic or card.answer) for t in kept}
    evaluations = tuple(
        e.model_copy(update=gone | {"rates": tuple(r for r in e.rates if r.statistic in stay)})
        for e in card.evaluations
    )
    # A verdict in which the rate of an old threshold took part says nothing of the new one.
    pairs = zip(card.evaluations, evaluations, strict=True)
    judged = {old.name: old for old, left in pairs if len(left.rates) < len(old.rates)}
    verdicts = tuple(
        t for t in card.transfers
        if t.set not in judged or not (t.transfers or judged[t.set].broken_rates)
    )  # fmt: skip
    found = {"thresholds": (*new, *kept), "evaluations": evaluations, "transfers": verdicts}
    return card.model_copy(update=found)


@probe_app.command(
    epilog=examples(
        "inspect-lens probe sweep --train acts/train --control acts/control \\",
        "    --family lr --family lda --layers 8-14",
    )
)
def sweep(
    context: typer.Context,
    train_store: Annotated[str, typer.Option("--train", help="Store to train on.")],
    selection: Annotated[str, typer.Option(help="Store to compare on; not your test set.")] = "",
    control: Annotated[str, typer.Option(help="Harmless samples: choose by recall.")] = "",
    fpr: Annotated[float, number("False positive rate of the recall.")] = 0.01,
    family: Annotated[list[Family] | None, FAMILIES] = None,
    layers: Layers = "all",
    rows: Rows = None,
    pool: Annotated[str, typer.Option(help="How token scores become one.")] = "mean",
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the split, if --selection is not given.")
    ] = 0,
    tokenizer: Tokenizer = "",
    memory: Memory = 4.0,
    resume: Resume = "",
    as_json: Json = False,
) -> None:
    """Compare layers and families on a selection set."""
    from inspect_lens.probe import ProbeCard, auroc
    from inspect_lens.train import make_estimator, select_layer, split_by_group

    from ._output import CHOSEN_HERE, TIED_HERE
    from ._stores import read_set

    check_read_with(context, "--control", control, "fpr")
    picked = None if layers == "all" else parse_layers(layers)
    every = [uri for uri in (train_store, control, selection) if uri]
    read = partial(
        read_set, pool=pool, tokenizer=tokenizer, memory=memory, work=resume, beside=every
    )
    fit = read(train_store, "train")
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
    choose = partial(
        select_layer, train=fit, selection=chosen, card=card, rows=rows, layers=picked,
        control=harmless, fpr=fpr, seed=seed,
    )  # fmt: skip
    with kept_fits(resume):
        choices = [(one, choose(make_estimator(one.value))) for one in family or [Family.LR]]
    for one, choice in choices:
        together = len(choice.probe.layers) > 1
        if together:
            area = auroc(chosen.labels, chosen.scores(choice.probe))
            joint = list(choice.probe.layers)
            table.append({"family": one, "chosen": True, "layers": joint, "auroc": area})
            lines.append(f"{one:18s} {','.join(map(str, joint)):>5s} {area:7.4f} *")
        for score in choice.sweep:
            best = score.layer in choice.probe.layers and not together
            tied = score.layer in choice.tied
            table.append({"family": one, "chosen": best, "tied": tied, **score.model_dump()})
            mark = " *" if best else " ~" if tied else ""
            recall = ""
            if score.recall_interval is not None:
                recall = f" {with_interval(score.recall, score.recall_interval):>22s}"
            lines.append(
                f"{one:18s} {score.layer:5d} {score.auroc:7.4f} {score.separation:11.2f}"
                f"{recall}{mark}"
            )
    lines.append(CHOSEN_HERE)
    if any(row.get("tied") for row in table):
        lines.append(TIED_HERE)
    result = {"selection": chosen.name, "n": len(chosen), "sweep": table}
    emit(result, lines, as_json=as_json)


@probe_app.command(
    epilog=examples("inspect-lens probe report my-probes/lies acts/test --out report")
)
def report(
    probe: OneProbe,
    store: Annotated[list[str], typer.Argument(help="Held-out stores to show.")],
    out: Annotated[str, out_folder("Folder to write the report to.")],
    tokenizer: Annotated[
        str, typer.Option(help="Folder of a tokenizer, for the heat map of tokens.")
    ] = "",
    any_model: AnyModel = False,
    allow_seen: AllowSeen = False,
    resamples: Resamples = 500,
    as_json: Json = False,
) -> None:
    """Write report.html with figures of the card and of the stores you name."""
    from inspect_lens.probe import load_probe
    from inspect_lens.train import refuse_seen
    from inspect_lens.view import write_report

    from ._jobs import report_row, report_set
    from ._output import Made
    from ._stores import judged_set

    loaded = load_probe(probe)
    sets, rows, asked = [], list(loaded.card.evaluations), []
    for uri in store:
        data = judged_set(loaded, uri, any_model=any_model, tokenizer=tokenizer)
        if not allow_seen:
            refuse_seen(loaded, data)
        found = report_row(loaded, data, rows)
        asked.append(found)
        sets.append(report_set(loaded, data, store=uri, tokenizer=tokenizer, n_seen=found.n_seen))
    shown = loaded.with_card(evaluations=tuple(rows))
    path = write_report(shown, out, sets, n_resamples=resamples)
    folder = str(loaded.path or probe)
    made = Made(probe=loaded, folder=folder, evaluations=tuple(asked), report=str(path))
    emit(made.result(), made.lines(), as_json=as_json)


@probe_app.command(
    name="import",
    epilog=examples(
        "inspect-lens probe import hf://owner/repository/probe.pt --name my-model/lies \\",
        "    --kind apollo --layer 22 --out my-probes/lies",
    ),
)
def import_(
    path: Annotated[
        str, typer.Argument(help="A .pt file, a folder that has one, or an hf:// address.")
    ],
    out: Annotated[str, out_folder("Folder to write the probe to.")],
    name: Annotated[str, typer.Option(help="Name on the card: <model>/<name>.")],
    kind: Annotated[
        LieDetector | None,
        typer.Option(help="Whose features it reads; by default what the README beside it says."),
    ] = None,
    layer: Annotated[
        int, typer.Option(min=-1, help="Block (from 0), if the file names none.")
    ] = -1,
    question: Annotated[
        str, typer.Option(help="Follow-up question; the one quoted in the README by default.")
    ] = "",
    model: Annotated[
        str, typer.Option(help="Model that it reads; that of the README by default.")
    ] = "",
    checkpoint: Annotated[
        str, typer.Option(help="File to read in the folder or the repository.")
    ] = "probe.pt",
    as_json: Json = False,
) -> None:
    """Read a probe of AISI's lie-detectors, of probelab, or of IBM's vLLM-Hook."""
    from inspect_lens.probe import import_probe

    probe = import_probe(
        path, name=name, kind=kind, layer=None if layer < 0 else layer,
        question=question or None, model=model or None, checkpoint=checkpoint,
    )  # fmt: skip
    folder, card = str(probe.save(out)), probe.card
    threshold = next(iter(card.thresholds), None)
    lines = [f"{card.name}: {card.method}, layer {card.layers[0]}, {folder}"]
    if threshold is not None:
        said = f"{threshold.value:.5g} for a rate of {threshold.fpr:g}, {threshold.claim}"
        lines.append(f"  threshold {said}")
    if card.follow_up is not None:
        lines.append(f"  reads the reply to: {card.follow_up.question}")
    lines += [f"  {note}" for note in card.notes]
    result = {
        "probe": card.name, "folder": folder, "sha256": probe.sha256, "layers": list(card.layers),
        "threshold": None if threshold is None else threshold.value, "notes": list(card.notes),
        "follow_up": None if card.follow_up is None else card.follow_up.model_dump(),
    }  # fmt: skip
    emit(result, lines, as_json=as_json)
