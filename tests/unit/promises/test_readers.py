"""Every format of a data set that its page names is read, and a limit draws labels alike."""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inspect_lens.data import DATASETS, load_dataset
from tests.kit.promises import Promise
from tests.kit.published_rows import rollout, transcript

_FORMATS = {"csv": ".csv", "json": ".json", "json lines": ".jsonl", "parquet": ".parquet"}
Row = dict[str, Any]


def _surfaces() -> Iterator[str]:
    """Each set with each format that the text says it is read from."""
    for name, info in DATASETS.items():
        if info.builtin is not None:
            yield name
        for found in dict.fromkeys(re.findall(r"\b(csv|json lines|json|parquet)\b", info.files)):
            if found != "json" or "json lines" not in info.files:
                yield f"{name}: {found}"
    yield "apollo_insider_trading: json of transcripts"


PROMISE = Promise("a named format is read, and a limit draws labels alike", surfaces=_surfaces())


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "No."}]


ROWS: dict[str, Callable[[int, bool], Row]] = {
    "repe_honesty": lambda i, y: {"statement": f"Thing {i} is blue.", "label": int(y)},
    "azaria_mitchell": lambda i, y: {"statement": f"Thing {i} is blue.", "label": int(y)},
    "geometry_of_truth": lambda i, y: {"statement": f"{i} is in B.", "label": int(y), "city": i},
    "ai_liar": lambda i, y: {
        "deceive_instruction": "Lie.", "normal_instruction": "Be honest.",
        "question": f"Is {i} even?", "question_prefix": "Q:", "answer_prefix": "A:",
    },
    "apollo_roleplaying": lambda i, y: rollout(f"{i}?", ["Yes."], [7 if y else 1]),
    "apollo_sandbagging": lambda i, y: rollout(
        f"{i}?", ["<step3> Hm. <step4> B"], ["deceptive" if y else "honest"]
    ),
    "apollo_insider_trading": lambda i, y: rollout(f"{i}?", ["Hm. Action: x"], [7 if y else 1]),
    "liars_bench": lambda i, y: {"messages": chat(f"{i}?"), "deceptive": y},
    "models_under_pressure": lambda i, y: {
        "inputs": json.dumps(chat(f"{i}?")[:1]), "labels": "high-stakes" if y else "low-stakes",
        "ids": i,
    },
    "prompts": lambda i, y: {"prompt": f"Explain {i}.", "label": int(y), "group": f"g{i // 2}"},
    "alpaca": lambda i, y: {"instruction": f"Add {i}.", "input": "", "output": "3"},
    "pairs": lambda i, y: {"positive": f"Glad of {i}.", "negative": f"Sad of {i}."},
    "persona_traits": lambda i, y: {},
    "lines": lambda i, y: {"text": f"Hint {i}?"},
    "cast_conditions": lambda i, y: {"harmful": f"Insult {i}.", "harmless": f"Greet {i}."},
    "axbench_concepts": lambda i, y: {
        "input": f"Tell me {i}.", "output": "It is so.", "concept_id": 0,
        "category": "positive" if y else "hard negative",
    },
    "llm_liedetector": lambda i, y: {
        "question": f"Where is {i}?", "answer": "Norway", "false_answer": "Peru"
    },
    "known_1000": lambda i, y: {"known_id": i, "prompt": f"{i} is in", "attribute": "Norway"},
    "organism": lambda i, y: {
        "id": str(i), "messages": chat(f"{i}?")[:1], "deceptive": y, "group": f"g{i // 2}"
    },
}  # fmt: skip
"""A row of each set in the schema of its public files, by its number and its label."""


def write(rows: list[Row], path: Path) -> None:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        table = importlib.import_module("pyarrow").Table.from_pylist(rows)
        importlib.import_module("pyarrow.parquet").write_table(table, path)
    else:
        path.write_text(json.dumps({"rollouts": rows} if "output_strs" in rows[0] else rows))


def judge(name: str, **options: Any) -> None:
    """Limits of a set with labels one after the other, a third of them true."""
    whole = load_dataset(name, **options)
    some, again, other = (
        load_dataset(name, limit=12, limit_seed=seed, **options) for seed in (0, 0, 1)
    )
    labels = {s.label for s in whole}
    assert Counter(s.label for s in some) == dict.fromkeys(labels, 12 // len(labels))
    assert some.samples == again.samples
    assert some.samples != other.samples
    place = {s.id: i for i, s in enumerate(whole)}
    assert [place[s.id] for s in some] == sorted(place[s.id] for s in some)


@PROMISE.on(*(surface for surface in PROMISE.surfaces if ": " in surface))
def _(surface: str, request: pytest.FixtureRequest) -> None:
    name, _, kind = surface.partition(": ")
    make, suffix = ROWS[name], _FORMATS.get(kind, ".json")
    if kind == "json of transcripts":
        make = lambda i, y: transcript(  # noqa: E731
            "concealed" if y else "explicit", f"{i}. Action: send_message Fine."
        )
    path = request.getfixturevalue("tmp_path") / f"rows{suffix}"
    write([make(i, i < 12) for i in range(36)], path)
    if name == "persona_traits":
        pairs = [{"pos": "Be cruel.", "neg": "Be kind."}]
        path.write_text(
            json.dumps({"instruction": pairs, "questions": [f"{i}?" for i in range(36)]})
        )
    judge(name, path=str(path))


@PROMISE.on(*(surface for surface in PROMISE.surfaces if ": " not in surface))
def _(surface: str, request: pytest.FixtureRequest) -> None:
    judge(surface)


test_promise = PROMISE.test()
