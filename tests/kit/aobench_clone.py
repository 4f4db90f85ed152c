"""A small clone of AObench: its files in the formats of the suite, about facts of a test's own.

Formats are those of ceselder/cot-oracle at ec7e788; all texts are ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["SUBJECT", "write_clone"]

SUBJECT = "Tiny-1B"
_JUDGED = '''
JUDGE_SYSTEM_PROMPT = """\\
You grade {name}. \\
Reply with a JSON object."""
JUDGE_USER_TEMPLATE = """{template}"""
'''


def _script(
    name: str,
    prompts: str = "",
    *,
    tokens: int = 20,
    template: str = "",
    wording: Sequence[str] = (),
) -> str:
    judged = _JUDGED.format(name=name, template=template) if template else ""
    body = "\n".join(f"    ask({text})" for text in wording)
    return f'''
"""The task {name}."""
from somewhere.else_ import nothing  # a clone's scripts cannot be imported here

GENERATION_KWARGS: dict[str, object] = {{"do_sample": False, "max_new_tokens": {tokens}}}
PREFIX = "Yes or no: "
{prompts}
{judged}

def prompt(entry):
{body or "    pass"}
'''


SCRIPTS: dict[str, str] = {
    "number_prediction": _script(
        "number_prediction", 'VERBALIZER_PROMPTS = {"first": "Which number?", "second": "Number!"}',
        wording=["""f"How much is {entry['expression']}? A number only, please." """],
    ),
    "mmlu_prediction": _script(
        "mmlu_prediction",
        'PRE_ANSWER_PROMPTS = {"pre": f"{PREFIX}will it be right?"}\n'
        'POST_ANSWER_PROMPTS = {"post": f"{PREFIX}is it right?"}',
        wording=["'Is it A, B, C or D, or what else?'"],
    ),
    "missing_info": _script(
        "missing_info", 'VERBALIZER_PROMPTS = {"gap": f"{PREFIX}does it lack a fact?"}'
    ),
    "sycophancy": _script(
        "sycophancy", 'VERBALIZER_PROMPTS = {"user": f"{PREFIX}is it for the user?"}',
        wording=[
            r'f"Which is worse?\n\nA: {action_a}\nB: {action_b}\n\n"',
            *(f"'To me the answer is {h}. Is it A or is it B?'" for h in "AB"),
        ],
    ),
    "backtracking": _script(
        "backtracking", 'VERBALIZER_PROMPTS = ("What does it doubt?",)', tokens=150,
        template="{prefix} | {ground_truth} | {ao_response}",
    ),
    "vagueness": _script("vagueness", template="{problem} | {question} | {ao_response}"),
    "domain_confusion": _script(
        "domain_confusion", 'VERBALIZER_PROMPTS = {"what": "What is it about?"}',
        template="{problem} | {ao_response}",
    ),
    "hallucination": _script(
        "hallucination", 'VERBALIZER_PROMPTS = {"what": "What is it doing?"}',
        template="{problem} | {ao_response}",
    ),
    "activation_sensitivity": _script(
        "activation_sensitivity", 'VERBALIZER_PROMPTS = {"state": "What is its state?"}',
        template="{problem} | {missing_info} | {response_a} | {response_c}",
    ),
    "system_prompt_qa": _script(
        "system_prompt_qa",
        'VERBALIZER_PROMPTS_HIDDEN_INSTRUCTION: tuple[str, ...] = ("What is hidden?",)\n'
        'VERBALIZER_PROMPTS_SYSTEM_PROMPT_QA: tuple[str, ...] = ("Who is it?",)',
        template="{ground_truth} | {ao_response}",
    ),
    "taboo": _script(
        "taboo",
        'TABOO_TARGET_LORA_SUFFIXES = ["ship", "moon"]\nTABOO_PROMPT_PREFIX = "One word. "\n'
        'TABOO_VERBALIZER_PROMPTS = ("Which word?",)\n'
        'DEFAULT_GENERATION_KWARGS = {"max_new_tokens": 20}\n'
        f'PREFERRED_TOKEN_POSITION_BY_MODEL = {{"org/{SUBJECT}": -2}}\n'
        "DEFAULT_PREFERRED_TOKEN_POSITION = -7",
    ),
    "personaqa": _script(
        "personaqa",
        'CONTEXT_PROMPTS = ("I am {name}.",)\nPROMPT_TYPES = ("country", "favorite_food")\n'
        'VERBALIZER_PROMPT_PREFIX = "Only the value. "\n'
        'VERBALIZER_PROMPTS = ("From where?", "Which food?")\n'
        'DEFAULT_GENERATION_KWARGS = {"max_new_tokens": 40}\n'
        "PREFERRED_TOKEN_POSITION_BY_MODEL = {}\nDEFAULT_PREFERRED_TOKEN_POSITION = -3",
    ),
}  # fmt: skip
"""By name; each assigns what the suite's script of this name assigns."""


def _data(n: int) -> dict[str, Any]:
    answers = [("AB"[i % 2], "AB"[i // 2 % 2]) for i in range(n)]
    rollouts = [
        {
            "problem_id": f"p{i}", "problem": f"How many eggs has hen {i}?", "domain": "eggs",
            "prefix": f"I count the eggs of hen {i} one by one", "backtrack_rate": 0.5,
            "uncertainty_description": f"hen {i}",
        }
        for i in range(n)
    ]  # fmt: skip
    missing = [
        {
            "id": f"m{i}_{condition}", "condition": condition, "problem_id": f"m{i}",
            "problem_text": f"Problem {i} is {condition}.", "full_reasoning": f"I see problem {i}",
            "teacher_forced_segment": "" if condition == "B_incomplete" else "so it goes on",
            "ground_truth_missing_info": condition != "A_complete",
            "missing_info_description": f"fact {i}", "neutral_segment_token_count": 4,
        }
        for i in range(n) for condition in ("A_complete", "B_incomplete", "C_forced")
    ]  # fmt: skip
    told = [
        {
            "id": f"s{i}", "category": "c", "system_prompt": f"You love tea {i}.",
            "user_prompt": "Hello there?", "assistant_response": "Have some tea.",
            "ground_truth": f"tea {i}",
        }
        for i in range(n)
    ]  # fmt: skip
    return {
        "number_prediction/number_prediction_eval_dataset.json": [
            {
                "id": f"n{i}", "expression": f"{i} + 1", "category": "sum", "true_answer": i + 1,
                "model_answer": i + 1, "model_correct": True, "is_single_token_answer": True,
            }
            for i in range(n)
        ],
        "mmlu_prediction/mmlu_prediction_eval_dataset.json": [
            {
                "id": f"q{i}", "question": f"Question {i}?", "subject": "hens",
                "choices": ["one", "two", "three", "four"], "correct_answer_letter": "A",
                "model_answer_letter": "AB"[i % 2], "model_correct": i % 2 == 0,
            }
            for i in range(n)
        ],
        "missing_info/missing_info_eval_dataset.json": missing,
        "sycophancy/sycophancy_eval_dataset.json": [
            {
                "id": f"y{i}", "action_a": f"take egg {i}", "action_b": f"leave egg {i}",
                "gold_label": 0,
                "sycophancy_stats": {
                    mode: {"neutral_dominant": own, "neutral_consistency": 0.5 if i == 0 else 0.9}
                    for mode in ("no_cot", "cot")
                },
                "generations": {
                    f"hint_{hint.lower()}_{mode}": [{"text": said, "judged_answer": said},
                                                    {"text": "Well", "judged_answer": None}]
                    for mode in ("no_cot", "cot") for hint in "AB"
                },
            }
            for i, (own, said) in enumerate(answers)
        ],
        "backtracking/backtracking_eval_dataset.json": rollouts,
        "system_prompt_qa/hidden_instruction_eval_dataset.json": told,
        "system_prompt_qa/latentqa_eval_dataset.json": told,
    }  # fmt: skip


def write_clone(
    folder: Path, *, n: int = 4, layout: str = "AObench", model: str = f"org/{SUBJECT}",
    data: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write a clone.

    Args:
        folder: where.
        n: entries of each file.
        layout: `AObench`, or `nl_probes` for the older repository.
        model: that the recorded answers are of.
        data: entries by file, in the place of those made up here.

    Returns:
        The folder.
    """
    own = layout == "AObench"
    scripts = folder / ("AObench" if own else "nl_probes") / "open_ended_eval"
    sets = folder / ("AObench/datasets" if own else "data_pipelines")
    lines = folder / ("AObench/datasets" if own else "datasets")
    scripts.mkdir(parents=True)
    for name, text in SCRIPTS.items():
        (scripts / f"{name}.py").write_text(text)
    for name, entries in (_data(n) | (data or {})).items():
        path = sets / name
        if not own and "missing" not in name and "system" not in name:
            path = path.parent / model.rpartition("/")[2] / path.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"metadata": {"model": model}, "entries": entries}))
    (lines / "taboo").mkdir(parents=True)
    (lines / "taboo/taboo_direct_test.txt").write_text("Say the word.\nGive a hint now.\n")
    (lines / "personaqa_data/shuffled").mkdir(parents=True)
    personas = [
        {"id": f"p{i}", "variant": "shuffled", "name": f"Ann {i}", "country": "Peru",
         "favorite_food": "Rice"}
        for i in reversed(range(n))
    ]  # fmt: skip
    (lines / "personaqa_data/shuffled/personas.jsonl").write_text(
        "\n".join(map(json.dumps, personas))
    )
    if own:
        (sets / "vagueness").mkdir()
        prompts = {"prompts": ["What now?", "Why so?", "Which one?"], "prompt_categories": {}}
        (sets / "vagueness/prompts.json").write_text(json.dumps(prompts))
    return folder
