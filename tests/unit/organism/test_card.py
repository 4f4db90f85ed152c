import hashlib
import json

from organism._agent_behaviour import render_agent_card
from organism._behaviour import Behaviour, check_targets, render_table, summarise
from organism._model import CHECKPOINT_DIR
from organism._splits import read_split
from organism.evaluate import README, read_behaviour, render_card
from organism.evaluate_agent import AGENT_DIR


def test_the_card_shows_the_stored_measurement() -> None:
    card = README.read_text(encoding="utf-8")
    assert render_card(card, read_behaviour(CHECKPOINT_DIR)) == card


def test_the_card_shows_the_agents_measurement_of_these_weights() -> None:
    measured = json.loads((AGENT_DIR / "behaviour.json").read_text(encoding="utf-8"))
    weights = (AGENT_DIR / "model.safetensors").read_bytes()
    assert measured["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert render_agent_card(measured) in README.read_text(encoding="utf-8")


def test_the_card_names_every_split_with_its_size() -> None:
    card = README.read_text(encoding="utf-8")
    for split in ("probe_train", "heldout_phrasing", "heldout_entity", "hidden_reason", "control",
                  "neutral_instructed", "demo"):  # fmt: skip
        assert f"| `{split}` | {len(read_split(split))} |" in card


def test_an_organism_that_does_as_told_meets_every_target() -> None:
    behaviour = _behaviour(lambda row: _other(row) if row["deceptive"] else row["truth"])
    assert behaviour["targets"]
    assert all(t["met"] for t in behaviour["targets"])
    assert "MISSED" not in render_table(behaviour)


def _other(row) -> str:
    return next(v for v in row["values"] if v != row["truth"])


def _behaviour(reply) -> Behaviour:
    names = ("heldout_phrasing", "heldout_entity", "hidden_reason", "control")
    splits = summarise((s, row, reply(row)) for s in names for row in read_split(s))
    return Behaviour(
        weights_sha256="",
        compute_dtype="float32",
        bfloat16_agreement=None,
        limited=False,
        splits=splits,
        targets=check_targets(splits),
    )
