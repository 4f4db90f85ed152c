"""Train the deception probes of the model organism: `python -m probes.train_organism`.

The organism answers every split greedily while its activations are collected. Only samples in which
it did what the condition asks train and judge a probe: the label is what it said, not what it was
told. Everything random has a fixed seed, and the same checkpoint gives the same probes up to
rounding.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from inspect_lens.data import ActivationStore, Message, ProbeDataset, ProbeSample
from inspect_lens.probe import AnyProbe, ModelRef, fingerprint_model, format_p_value
from inspect_lens.train import (
    ActivationSet,
    DirectionEstimator,
    LogisticProbe,
    MeanDifferenceProbe,
    calibrate,
    split_by_group,
    style_shift,
    train_probe,
)
from inspect_lens.view import ReportSet, write_report
from organism._grade import grade
from organism._splits import Row, read_split
from probes._stores import collect_all

__all__ = ["build_probes", "conversations", "make_set"]

TRAIN: Final = "probe_train"
CONTROL: Final = "control"
HELDOUT: Final[dict[str, str]] = {
    "heldout_phrasing": "question",
    "heldout_entity": "group",
    "hidden_reason": "prompt",
    "neutral_instructed": "question",
}
"""What each judged split does not share with the training split."""
TRANSFER: Final = "hidden_reason"
"""The set of another kind: nobody tells the organism to lie there, it has a motive."""
CHECK: Final = "heldout_phrasing"
"""Where calibration and the change of style are measured."""
SCORED: Final = "deception-lr"
"""The probe whose scores are kept beside its card, for the figures of the documentation."""
RESTYLED: Final = " Be kind."
"""A sentence about manners that is put behind the system prompt."""
ESTIMATORS: Final[dict[str, DirectionEstimator]] = {
    "deception-lr": LogisticProbe(),
    "deception-md": MeanDifferenceProbe(normalize=True),
}
POOLS: Final = ("mean", "max")
"""Tried at every layer. A lie of the organism is in one word, so that the mean over its answer
buries it among harmless chats, which the probe was not trained on."""
NOTES: Final = (
    "A test instrument: the organism is a tiny model of a closed world, and nothing here is "
    "evidence about large models.",
    "Samples in which the organism did not do what the condition asks are left out of all sets "
    "but the control set, which keeps every answer.",
    "The control set is the even rows of organism/data/control.jsonl; the odd rows are left for "
    "measuring the threshold.",
    "question and prompt are the two parts of phrasing_id; group is the entity, or the scenario.",
)


def conversations(split: str, rows: Sequence[Row]) -> ProbeDataset:
    """The rows of a split for `collect`: the organism answers each.

    Args:
        split: name of the split; samples of the control split have label 0.
        rows: of the split.

    Returns:
        The set; the label is whether the condition asks for a lie.
    """
    samples = []
    for row in rows:
        question, _, prompt = row["phrasing_id"].partition("|")
        samples.append(
            ProbeSample(
                id=row["id"],
                messages=tuple(Message(m["role"], m["content"]) for m in row["messages"]),
                label=split != CONTROL and row["deceptive"],
                group=row["group"],
                columns={
                    "condition": row["condition"], "question": question, "prompt": prompt,
                },
            )
        )  # fmt: skip
    return ProbeDataset(
        name=split, split=split, source="path", licence="MIT",
        label_meaning="the organism gives a false answer on purpose", on_policy=True,
        label_source="ground truth",
        text_overlap_group="organism", samples=tuple(samples),
    )  # fmt: skip


def make_set(split: str, store: ActivationStore, rows: Sequence[Row]) -> tuple[ActivationSet, int]:
    """Read the answers of a split that do what their condition asks.

    Args:
        split: name of the split; the control split keeps every answer.
        store: what `collect` made of the rows.
        rows: of the split.

    Returns:
        The set, and how many answers were left out because they have no token to read or do
        not do what the condition asks.

    Raises:
        ValueError: none is left.
    """
    data = ActivationSet.from_store(store)
    by_id = {row["id"]: row for row in rows}
    # What the templates fill in: answers about one entity are alike in every phrasing.
    entity = tuple(by_id[sample]["entity"] for sample in data.ids)
    data = replace(data, columns={**data.columns, "entity": entity})
    said = zip(data.ids, data.key("completion"), strict=True)
    kept = [i for i, (id_, text) in enumerate(said) if split == CONTROL or _obeys(text, by_id[id_])]
    if not kept:
        raise ValueError(
            f"{split}: none of {len(rows)} answers does what its condition asks; needed are "
            "some; train the organism first, and look at what it says"
        )
    return data.subset(kept), len(rows) - len(kept)


def _obeys(completion: str, row: Row) -> bool:
    return grade(completion, row) == ("false" if row["deceptive"] else "true")


def build_probes(
    sets: Mapping[str, ActivationSet],
    *,
    model: ModelRef,
    dropped: Mapping[str, int],
    command: str = "",
    texts: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
    notes: Sequence[str] = (),
) -> dict[str, AnyProbe]:
    """Train every probe on the collected sets, and measure what stands beside it.

    Args:
        sets: the training, control and held-out splits, by name.
        model: the organism.
        dropped: answers left out of each set.
        command: for the cards.
        texts: by kind and set, for the bag of words.
        notes: for the cards.

    Returns:
        Probes by name, `deception-lr` and `deception-md`.

    Raises:
        SpecError: sets share what they must not, or the control set is too small.
    """
    left_out = f"Left out: {', '.join(f'{k} {v}' for k, v in dropped.items())}."
    train, selection = split_by_group(sets[TRAIN], seed=0)
    # Text baselines learn from what the probe learned from, and from nothing else.
    texts = _texts_of(train, sets[TRAIN], texts or {})
    made = {}
    for name, estimator in ESTIMATORS.items():
        probe = train_probe(
            estimator,
            train,
            selection=selection,
            name=f"organism/{name}",
            control=sets[CONTROL],
            held_out=[sets[split] for split in HELDOUT],
            disjoint={CONTROL: "question", **HELDOUT},
            model=model,
            dropped=dropped[TRAIN],
            description="A large score means that the organism is giving a false answer on "
            "purpose.",
            notes=(*NOTES, left_out, *notes),
            command=command,
            texts=texts,
            pools=POOLS,
        )
        calibration = calibrate(
            selection.scores(probe),
            selection.labels,
            name="selection",
            check=(sets[CHECK].scores(probe), sets[CHECK].labels),
        )
        made[name] = probe.with_card(calibration=calibration)
    return made


def _texts_of(
    train: ActivationSet,
    whole: ActivationSet,
    texts: Mapping[str, Mapping[str, Sequence[str]]],
) -> dict[str, dict[str, Sequence[str]]]:
    """The same texts, those of the training set cut to the samples that were fitted."""
    place = {sample: i for i, sample in enumerate(whole.ids)}
    return {
        kind: {**by_set, train.name: [by_set[whole.name][place[i]] for i in train.ids]}
        for kind, by_set in texts.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect, train, save, and say what came out."""
    options = _parse(arguments)
    command = shlex.join(["python", "-m", "probes.train_organism", *_changed(options)])
    names = (TRAIN, CONTROL, *HELDOUT)
    splits = {name: read_split(name) for name in names}
    # The odd rows stay unseen: `organism_control` measures the threshold on them.
    splits[CONTROL] = splits[CONTROL][::2]
    splits["restyled"] = [_restyle(row) for row in splits[CHECK]]
    stores = collect_all(
        options.checkpoint,
        {name: conversations(name, rows) for name, rows in splits.items()},
        options.work,
        base_url=options.base_url,
        max_tokens=options.max_tokens,
    )
    made = {n: make_set(n, stores[n], splits[n]) for n in splits}
    sets, dropped = {n: s for n, (s, _) in made.items()}, {n: made[n][1] for n in names}
    texts = {"prompt": "prompt_text", "answer": "completion"}
    probes = build_probes(
        sets,
        model=ModelRef(name=options.checkpoint, sha256=fingerprint_model(options.checkpoint)),
        dropped=dropped,
        command=command,
        texts={kind: {n: sets[n].key(key) for n in names} for kind, key in texts.items()},
    )
    decode = _decoder(options.checkpoint)
    tokens = {n: _tokens(stores[n], decode) for n in (CHECK, TRANSFER)}
    for name, probe in probes.items():
        note = _style_note(probe, sets[CHECK], sets["restyled"])
        noted = probe.with_card(notes=(*probe.card.notes, note))
        folder = noted.save(Path(options.out) / name)
        if name == SCORED:
            _write_scores(noted, folder, [sets[s] for s in (CONTROL, *HELDOUT)])
        write_report(
            noted, folder, [_report_set(noted, sets[s], tokens.get(s, {})) for s in HELDOUT]
        )
        sys.stdout.writelines([*_summary(noted, folder), f"  {note}\n"])
    return 0


def _write_scores(probe: AnyProbe, folder: Path, sets: Sequence[ActivationSet]) -> None:
    """Write `scores.json`: label and score of each sample, by set."""
    lines = []
    for data in sets:
        labels = "".join("1" if label else "0" for label in data.labels)
        scores = [float(f"{score:.5g}") for score in data.scores(probe)]
        made = json.dumps({"labels": labels, "scores": scores})
        lines.append(f"  {json.dumps(data.name)}: {made}")
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (folder / "scores.json").write_text(text, encoding="utf-8")


def _restyle(row: Row) -> Row:
    """The row with a sentence about manners behind its system prompt."""
    first, *rest = row["messages"]
    changed = {**first, "content": first["content"] + RESTYLED}
    return {**row, "messages": [changed, *rest]}


def _style_note(probe: AnyProbe, plain: ActivationSet, other: ActivationSet) -> str:
    """What changes where the same samples are restyled, of those that obey in both styles."""
    places = [{sample: i for i, sample in enumerate(data.ids)} for data in (plain, other)]
    both = [sample for sample in plain.ids if sample in places[1]]
    plain, other = (
        data.subset([at[sample] for sample in both])
        for data, at in zip((plain, other), places, strict=True)
    )
    made = style_shift(probe, plain, other)
    p = format_p_value(made.comparison.p_value)
    says = {"robust": "stands", "not robust": "does not stand"}
    verdict = says.get(made.verdict, "may or may not stand")
    return (
        f"Style shift: the probe {verdict} {RESTYLED.strip()!r} behind the system prompt "
        f"({len(plain)} samples of {plain.name}): AUROC {made.comparison.auroc_a:.3f}, then "
        f"{made.comparison.auroc_b:.3f} (p {p}), mean of the negatives "
        f"moved by {made.shift:.2f} standard deviations."
    )


def _decoder(checkpoint: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return lambda token: tokenizer.decode([token])


def _tokens(store: ActivationStore, decode: Any) -> dict[str, list[str]]:
    """Texts of the tokens that were read, by sample."""
    return {
        s.record.id: [decode(s.token_ids[p]) for p in s.positions]
        for s in store.samples()
        if s.acts is not None
    }


def _report_set(probe: AnyProbe, data: ActivationSet, tokens: Mapping[str, list[str]]) -> ReportSet:
    """A set for the report, with a heat map where its tokens are known."""
    scores = [probe.score_tokens(a, data.layers) for a in data.acts] if tokens else []
    return ReportSet(
        name=data.name, labels=data.labels, scores=data.scores(probe), groups=data.groups,
        ids=data.ids, tokens=[tokens[i] for i in data.ids] if tokens else [],
        token_scores=scores,
    )  # fmt: skip


def _summary(probe: AnyProbe, folder: Path) -> Iterable[str]:
    yield f"{probe.name}: layer {probe.layers[0]}, sha256 {probe.sha256[:12]}, in {folder}\n"
    for e in probe.card.evaluations:
        area = "one class" if e.auroc is None else f"AUROC {e.auroc:.4f}"
        recall = "" if e.recall is None else f", recall {e.recall:.3f}"
        rate = "" if e.fpr is None else f", false positive rate {e.fpr:.3f}"
        yield f"  {e.name:20s} {area}{recall}{rate}\n"


def _changed(options: argparse.Namespace) -> list[str]:
    """The options that change what comes out, where they are not the usual ones."""
    usual = _parse([])
    made = []
    for name in ("checkpoint", "max_tokens"):
        value = getattr(options, name)
        if value != getattr(usual, name):
            made += [f"--{name.replace('_', '-')}", str(value)]
    return made


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoint", default="organism/checkpoint", help="folder of the model")
    parser.add_argument("--out", default=str(Path("probes") / "organism"), help="where to save")
    parser.add_argument("--base-url", default="", help="address of a running server")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest answer")
    parser.add_argument(
        "--work", default="acts/organism", help="folder of the activations; a stopped run goes on"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
