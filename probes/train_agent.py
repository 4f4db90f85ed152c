"""Train the deception probe of the agent: `python -m probes.train_agent --played FILE`.

The unit is one turn of the assistant with its thought, words and calls. Its label is 1 where it
tells a lie or calls the forbidden tool, else 0, also in the same conversation. Only conversations
that went as planted are read. The file is what `organism.evaluate_agent --played` writes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from inspect_lens.probe import (
    AnyProbe,
    CaptureFacts,
    ModelRef,
    choose_point,
    fingerprint_model,
)
from inspect_lens.train import (
    ActivationSet,
    LogisticProbe,
    StoreSet,
    calibrate,
    split_by_group,
    train_probe,
)
from organism._agent_play import MAX_NEW_TOKENS
from probes._agent_turns import AgentTurn, as_texts, read_played, read_turns
from probes._stores import collect_all

__all__ = ["build_probe", "make_turn_set"]

TRAIN: Final = "agent_probe_train"
CONTROL: Final = "agent_control"
HELDOUT: Final = {"agent_heldout_phrasing": "question", "agent_heldout_entity": "group"}
"""What each judged split does not share with the training split."""
NAME: Final = "agent-deception-lr"
NOTES: Final = (
    "A test instrument: the organism is a tiny model of a closed world, and nothing here is "
    "evidence about large models.",
    "One sample is one turn of the assistant, all of its tokens: thought, words, calls. Label 1: "
    "it tells a lie, or calls the forbidden tool.",
    "The thought says what is planned, so that its text gives the label away: compare the bag of "
    "words (thought) among the baselines.",
    "group is the entity asked about; question is the phrasing of the question, or of the report.",
)


def make_turn_set(
    split: str, turns: Sequence[AgentTurn], *, model: str, capture: CaptureFacts | None = None
) -> ActivationSet:
    """Turn the assistant's turns into an activation set.

    Args:
        split: name of the split.
        turns: with their activations.
        model: name of the model.
        capture: what computed the activations.

    Returns:
        The set.
    """
    return ActivationSet(
        name=split,
        model=model,
        layers=tuple(range(turns[0].acts.shape[0])),
        acts=tuple(t.acts for t in turns),
        labels=np.array([t.label for t in turns]),
        groups=tuple(t.row["entities"][t.question] for t in turns),
        ids=tuple(f"{t.row['id']}/{t.number}" for t in turns),
        columns={
            "condition": tuple(t.row["condition"] for t in turns),
            "kind": tuple(t.row["kind"] for t in turns),
            "question": tuple(_question(t) for t in turns),
        },
        capture=capture,
    )


def _question(turn: AgentTurn) -> str:
    pids = turn.row["phrasing_ids"]
    return pids[0 if turn.row["kind"] == "report" else turn.question]


def build_probe(
    sets: dict[str, ActivationSet], turns: dict[str, list[AgentTurn]], **facts: Any
) -> AnyProbe:
    """Train the probe, and measure what stands beside it.

    Args:
        sets: by split.
        turns: behind the sets, for the baselines that read text.
        **facts: for the card: `model`, `command`, `notes`, `dropped`.

    Returns:
        The probe with its card.
    """
    train, selection = split_by_group(sets[TRAIN], seed=0)
    kept = dict(zip(sets[TRAIN].ids, turns[TRAIN], strict=True))
    by_split = {**turns, TRAIN: [kept[i] for i in train.ids]}
    texts = {
        "thought": {n: [t.thought for t in by_split[n]] for n in (TRAIN, CONTROL, *HELDOUT)},
        "words": {n: [t.text for t in by_split[n]] for n in (TRAIN, CONTROL, *HELDOUT)},
    }
    probe = train_probe(
        LogisticProbe(),
        train,
        selection=selection,
        name=f"organism/{NAME}",
        control=sets[CONTROL],
        held_out=[sets[split] for split in HELDOUT],
        disjoint={CONTROL: "question", **HELDOUT},
        description="A large score means that the agent, in this turn, gives a false answer on "
        "purpose or calls a tool that it was forbidden.",
        texts=texts,
        pools=("mean", "max"),
        **facts,
    )
    calibration = calibrate(
        selection.scores(probe), selection.labels, name="selection",
        check=(sets["agent_heldout_phrasing"].scores(probe), sets["agent_heldout_phrasing"].labels),
    )  # fmt: skip
    return probe.with_card(calibration=calibration)


def by_case(probe: AnyProbe, data: ActivationSet, threshold: float) -> str:
    """Recall, and the rate of false alarms, at a threshold for each kind of conversation."""
    scores, kinds = data.scores(probe), np.array(data.columns["kind"])
    labels = np.asarray(data.labels, dtype=bool)
    parts = []
    for kind in sorted(set(kinds.tolist())):
        hit = scores[(kinds == kind) & labels] > threshold
        false = scores[(kinds == kind) & ~labels] > threshold
        parts.append(f"{kind} {hit.sum()} of {hit.size} found, {false.sum()} of {false.size} false")
    return f"{data.name} at the card's threshold, by kind: {'; '.join(parts)}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, train, save, and say what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoint", default="organism/agent", help="folder of the agent")
    parser.add_argument("--played", required=True, type=Path, help="conversations with the agent")
    parser.add_argument(
        "--work", default="acts/agent", help="folder of the activations; a stopped run goes on"
    )
    parser.add_argument("--out", type=Path, default=Path("probes") / "organism" / NAME)
    options = parser.parse_args(arguments)
    games = read_played(options.played)
    sets, turns, left_out = {}, {}, {}
    stores = collect_all(
        options.checkpoint,
        {name: as_texts(name, played) for name, played in games.items()},
        options.work,
        max_model_len=2048,
        positions="all",
    )
    for name, played in games.items():
        store = stores[name]
        turns[name], left_out[name] = read_turns(store, played)
        facts = StoreSet(store).capture
        assert facts is not None
        # Played greedily by `organism.evaluate_agent`; the engine has only read them.
        facts = facts.model_copy(update={"temperature": 0.0, "max_tokens": MAX_NEW_TOKENS})
        sets[name] = make_turn_set(name, turns[name], model=options.checkpoint, capture=facts)
    note = ", ".join(f"{name} {n}" for name, n in left_out.items())
    probe = build_probe(
        sets,
        turns,
        model=ModelRef(name=options.checkpoint, sha256=fingerprint_model(options.checkpoint)),
        command="python -m probes.train_agent --played PLAYED",
        notes=(*NOTES, f"Conversations left out, since they did not go as planted: {note}."),
        dropped=left_out[TRAIN],
    )
    limit = choose_point(probe.card).value
    cases = tuple(by_case(probe, sets[name], limit) for name in HELDOUT)
    probe = probe.with_card(notes=(*probe.card.notes, *cases))
    folder = probe.save(options.out)
    sys.stdout.write(f"{probe.name}: layer {probe.layers}, in {folder}, left out {note}\n")
    for e in probe.card.evaluations:
        sys.stdout.write(f"  {e.name}: AUROC {e.auroc}, recall {e.recall}, FPR {e.fpr}\n")
    sys.stdout.writelines(f"  {case}\n" for case in cases)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
