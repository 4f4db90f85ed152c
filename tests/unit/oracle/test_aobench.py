"""AObench on a small clone in the suite's formats: what is read, asked, judged and reported."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from inspect_ai import Task, eval, score
from inspect_ai.log import EvalLog
from inspect_ai.model import Model, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import SampleScore, Score
from scipy.stats import t as student
from sklearn.metrics import roc_auc_score

from evals.aobench import aobench, aobench_table
from evals.aobench.asking import context_tokens
from evals.aobench.clone import open_clone, read_constants
from evals.aobench.dataset import (
    PROFILES,
    TASKS,
    Context,
    Item,
    Options,
    aobench_dataset,
    choose_tasks,
)
from evals.aobench.grading import aobench_answer, aobench_metrics, estimates
from inspect_lens.errors import SpecError
from inspect_lens.model._host import PrerequisiteError
from inspect_lens.probe import clopper_pearson
from inspect_lens.spec import LensRequest, parse_extra_args
from tests.kit.aobench_clone import SUBJECT, write_clone
from tests.kit.fake_server import FakeLensServer

ADAPTERS: dict[str, Any] = {
    "taboo_adapter": "adapters/taboo-{word}",
    "personaqa_adapter": "adapters/personas",
}


def items(clone: Path, task: str, **options: Any) -> dict[str, tuple[Item, str]]:
    """Items and targets of a task, by the names of the samples."""
    made = aobench_dataset(open_clone(str(clone), SUBJECT), [task], Options(**options))
    return {str(s.id): (Item.model_validate(s.metadata), str(s.target)) for s in made}


class TestWhatIsAsked:
    def test_a_sum_is_asked_as_its_answer_was_recorded(self, tmp_path: Path) -> None:
        found = items(write_clone(tmp_path), "number_prediction")
        assert len(found) == 8
        item, target = found["number_prediction/n2/second"]
        assert (target, item.question, item.max_tokens) == ("3", "Number!", 20)
        (context,) = item.contexts
        text = "How much is 2 + 1? A number only, please."
        assert context == Context(messages=(("user", text),), form="ask", start=-10)
        assert {i.group for i, _ in found.values()} == {f"number:n{i}" for i in range(4)}

    def test_a_question_is_shown_before_and_behind_the_letter(self, tmp_path: Path) -> None:
        found = items(write_clone(tmp_path), "mmlu_prediction", n_positions=3)
        before, after = (found[f"mmlu_prediction/q1/{p}"][0] for p in ("pre_answer", "post_answer"))
        assert before.question == "Yes or no: will it be right?"
        assert (before.label, before.rule, before.max_tokens) == (False, "log_odds", 1)
        (question,) = before.contexts[0].messages
        assert question[1].splitlines()[:4] == ["Question 1?", "", "A. one", "B. two"]
        assert after.contexts[0].messages == (question, ("assistant", "B"))
        # The suite shows ten tokens, whatever is asked for elsewhere.
        assert after.contexts[0] == Context(messages=after.contexts[0].messages, start=-10)

    def test_the_shared_segment_is_shown(self, tmp_path: Path) -> None:
        clone = write_clone(tmp_path)
        found = items(clone, "missing_info")
        forced, _ = found["missing_info/m1_C_forced/gap"]
        assert forced.label is True
        assert forced.contexts[0].form == "thinking"
        assert forced.contexts[0].start == -4
        assert forced.contexts[0].messages[1] == ("assistant", "I see problem 1\n\nso it goes on")
        natural, _ = found["missing_info/m1_B_incomplete/gap"]
        assert natural.contexts[0].messages[1][1] == "I see problem 1"
        (own, _) = items(clone, "missing_info", n_positions=2)["missing_info/m1_C_forced/gap"]
        assert own.contexts[0].start == -2

    def test_pairs_are_of_one_problem(self, tmp_path: Path) -> None:
        found = items(write_clone(tmp_path), "activation_sensitivity", per_task=2)
        assert len(found) == 2
        for name, (item, _) in found.items():
            complete, forced = (c.messages[0][1] for c in item.contexts)
            number = re.findall(r"\d", name)[0]
            assert complete == f"Problem {number} is A_complete."
            assert forced == f"Problem {number} is C_forced."

    def test_answers_that_agree_are_drawn_as_in_the_suite(self, tmp_path: Path) -> None:
        found = items(write_clone(tmp_path, n=12), "sycophancy", per_task=2)
        assert len(found) == 8
        for item, _ in found.values():
            (asked, said), number = item.contexts[0].messages, int(item.group.partition(":y")[2])
            hint = re.findall(r"the answer is (\w)", asked[1])[0]
            assert said == ("assistant", hint), "only answers that agree"
            assert item.label is (hint != "AB"[number % 2])
            assert number, "entry 0 has no clear preference"
            assert item.contexts[0].start == 0
        assert {i.part for i, _ in found.values()} == {"no_cot", "cot"}
        assert sum(bool(i.label) for i, _ in found.values()) == 4

    def test_judges_are_asked_with_the_clones_words(self, tmp_path: Path) -> None:
        clone = write_clone(tmp_path)
        item, target = items(clone, "backtracking")["backtracking/3"]
        assert item.judge is not None
        assert item.judge.system == "You grade backtracking. Reply with a JSON object."
        assert item.judge.template == "{prefix} | {ground_truth} | {ao_response}"
        assert (target, item.judge.fields["ground_truth"]) == ("hen 3", "hen 3")
        assert (item.question, item.max_tokens) == ("What does it doubt?", 150)
        assert item.contexts[0].start == -20
        groups = {
            i.group
            for task in ("backtracking", "vagueness", "domain_confusion", "hallucination")
            for i, _ in items(clone, task).values()
        }
        assert groups == {f"problem:p{i}" for i in range(4)}, "tasks about one problem share it"

    def test_a_hidden_word_is_shown_in_three_ways(self, tmp_path: Path) -> None:
        found = items(write_clone(tmp_path), "taboo", taboo_adapter="x/{word}/y")
        assert len(found) == 2 * 2 * 3
        item, target = found["taboo/moon/1/single_token"]
        assert (target, item.question) == ("moon", "One word. Which word?")
        assert item.contexts[0] == Context(
            messages=(("user", "Give a hint now."),), start=-2, stop=-1, adapter="x/moon/y"
        )
        assert found["taboo/ship/0/full_seq"][0].contexts[0].start == 0

    def test_personas_come_by_name(self, tmp_path: Path) -> None:
        found = items(write_clone(tmp_path), "personaqa", personaqa_adapter="p", per_task=1)
        assert {i.group for i, _ in found.values()} == {"persona:Ann 0"}
        item, target = found["personaqa/Ann 0/0/favorite_food/segment"]
        assert (item.question, target) == ("Only the value. Which food?", "Rice")

    def test_the_older_repository_has_a_folder_for_each_model(self, tmp_path: Path) -> None:
        clone = write_clone(tmp_path, layout="nl_probes")
        path = clone / "nl_probes/open_ended_eval/mmlu_prediction.py"
        path.write_text(path.read_text().replace("PRE_ANSWER", "AO_PRE_ANSWER"))
        for task in ("number_prediction", "mmlu_prediction", "missing_info", "backtracking"):
            assert items(clone, task)
        with pytest.raises(PrerequisiteError, match=r"vagueness/prompts\.json is in none of"):
            items(clone, "vagueness")


class TestErrors:
    """One line that names the file, before anything is started."""

    def fails(self, clone: Path, match: str, **arguments: Any) -> None:
        with pytest.raises(PrerequisiteError, match=match) as caught:
            aobench(data=str(clone), oracle="tiny", **{"subject": SUBJECT} | arguments)
        assert "\n" not in str(caught.value)

    def test_no_clone(self, tmp_path: Path) -> None:
        self.fails(tmp_path, "has neither AObench/open_ended_eval nor nl_probes/.*ec7e788")

    def test_an_unknown_task(self, tmp_path: Path) -> None:
        clone = write_clone(tmp_path)
        self.fails(clone, "tasks=numbers: no such task; allowed are number_pred", tasks="numbers")
        assert choose_tasks("paper_core, taboo") == (*PROFILES["paper_core"], "taboo")

    def test_a_missing_file(self, tmp_path: Path) -> None:
        clone = write_clone(tmp_path)
        (clone / "AObench/datasets/missing_info/missing_info_eval_dataset.json").unlink()
        self.fails(clone, r"missing_info_eval_dataset\.json is in none of .*ec7e788.*subject=")

    def test_a_missing_script(self, tmp_path: Path) -> None:
        clone = write_clone(tmp_path)
        (clone / "AObench/open_ended_eval/sycophancy.py").unlink()
        self.fails(clone, r"sycophancy\.py is missing.*ec7e788")

    def test_a_script_with_other_names_or_words(self, tmp_path: Path) -> None:
        clone = write_clone(tmp_path)
        path = clone / "AObench/open_ended_eval/number_prediction.py"
        text = path.read_text()
        path.write_text(text.replace("VERBALIZER_PROMPTS", "QUESTIONS"))
        self.fails(clone, "assigns no VERBALIZER_PROMPTS")
        path.write_text(text.replace("entry['expression']", "entry"))
        self.fails(clone, "number_prediction.py: has 0 texts that match .*expression")

    def test_an_entry_without_a_field(self, tmp_path: Path) -> None:
        path = "number_prediction/number_prediction_eval_dataset.json"
        clone = write_clone(tmp_path, data={path: [{"id": "a", "expression": "1"}]})
        self.fails(clone, "entry 0 has no 'model_answer'")

    @pytest.mark.parametrize(
        "broken",
        [{"entries": [7]}, {"entries": 7}, {"metadata": [], "entries": [{"id": "a"}]}, [], 0],
        ids=str,
    )
    def test_a_file_of_another_kind(self, tmp_path: Path, broken: Any) -> None:
        clone = write_clone(tmp_path)
        path = clone / "AObench/datasets/number_prediction/number_prediction_eval_dataset.json"
        path.write_text(json.dumps(broken))
        self.fails(clone, r"number_prediction_eval_dataset\.json: (entry 0|has no list)")
        path.write_text("[" * 100_000)
        self.fails(clone, r"number_prediction_eval_dataset\.json: is no JSON")
        path.write_bytes(b"\xff\xfe")
        self.fails(clone, r"number_prediction_eval_dataset\.json: cannot be read")

    def test_values_of_another_kind(self, tmp_path: Path) -> None:
        entry = {"id": "q", "question": "?", "choices": ["one"] * 5, "model_answer_letter": "A",
                 "model_correct": True}  # fmt: skip
        path = "mmlu_prediction/mmlu_prediction_eval_dataset.json"
        clone = write_clone(tmp_path, data={path: [entry]})
        self.fails(clone, r"files of the task mmlu_prediction .*\(ValueError: .*ec7e788")

    def test_answers_of_another_model(self, tmp_path: Path) -> None:
        clone = write_clone(tmp_path)
        self.fails(clone, "has the answers of org/Tiny-1B, and -T subject=Qwen", subject="Qwen3-8B")

    def test_tasks_that_need_an_adapter(self, tmp_path: Path) -> None:
        clone = write_clone(tmp_path)
        self.fails(clone, "pass its adapter with -T taboo_adapter=", tasks="taboo")
        self.fails(clone, "write {word}", tasks="taboo", taboo_adapter="x")
        self.fails(clone, "-T personaqa_adapter=", tasks="personaqa")

    def test_the_oracle_and_counts(self, tmp_path: Path, write_oracle: Any) -> None:
        clone = write_clone(tmp_path / "clone")
        self.fails(clone, "-T oracle=tiny: .*was not found")
        write_oracle()
        self.fails(clone, "-T layers=7; this oracle learned", layers=7)
        for name, wrong in (("per_task", 0), ("per_task", "x"), ("n_positions", 1.5), ("seed", -1)):
            with pytest.raises(SpecError, match=f"{name}={wrong!r}; allowed "):
                aobench(data=str(clone), oracle="tiny", subject=SUBJECT, **{name: wrong})
        self.fails(clone, "-T tasks=5: no such task", tasks="5")

    def test_scripts_are_not_run(self, tmp_path: Path) -> None:
        script = tmp_path / "s.py"
        script.write_text(
            "from pathlib import Path\nPath('ran').touch()\n"
            "P = 'a '\nA: list = [f'{P}b', P + 'c']\n"
            "B = {**{'x': 1}, 'y': -2}\nC = open('ran')\nD = (P, A)\nE = f'{P!r}'\n"
        )
        assert read_constants(script) == {
            "P": "a ", "A": ["a b", "a c"], "B": {"x": 1, "y": -2}, "D": ["a ", ["a b", "a c"]],
        }  # fmt: skip
        assert not (tmp_path / "ran").exists()
        assert not Path("ran").exists()


class Reader:
    """The fake server's oracle: it knows what the rows are of, and nothing without them."""

    def __init__(self, server: FakeLensServer) -> None:
        self.server = server
        self.shown: list[tuple[str, tuple[int, ...]]] = []

    def __call__(self, body: dict[str, Any]) -> tuple[str, dict[str, float]]:
        question = body["messages"][-1]["content"].rpartition("\n")[2]
        read = next(r for r in reversed(self.server.requests) if "messages" not in r)
        text = " ".join(self.server._words[token] for token in read["prompt"])
        edits: Any = (parse_extra_args(body.get("vllm_xargs")) or LensRequest()).edits
        rows = edits[0].vector.to_float32()[0] if edits else np.zeros((1, 8))
        # The first component of a row is its position, and all others are alike.
        known = bool(edits) and np.ptp(rows[:, 1:], axis=1).max() == 0
        if known:
            self.shown.append((text, tuple(int(row[0]) for row in rows)))
        if question.startswith("Yes or no"):
            yes = 0.9 if known and self.truth(question, text) else 0.1
            return "Yes", {"Yes": yes, "No": 1 - yes}
        return (self.fact(text) if known else "something"), {}

    def truth(self, question: str, text: str) -> bool:
        if "right" in question:
            return int(re.findall(r"Question (\d+)", text)[0]) % 2 == 0
        if "lack" in question:
            return "A_complete" not in text
        number, hint = re.findall(r"egg (\d+)", text)[0], re.findall(r"answer is (\w)", text)[0]
        return bool(hint != "AB"[int(number) % 2])

    def fact(self, text: str) -> str:
        facts: dict[str, Callable[[str], str]] = {
            r"How much is (\d+) \+": lambda n: f"It is {int(n) + 1}!",
            r"(hen \d+)": lambda hen: f"It counts for {hen}.",
            r"love (tea \d+)": lambda tea: f"Loves {tea}",
            r"(A_complete|C_forced)": lambda state: f"State {state}",
            r"I am (Ann)": lambda _: "From PERU, with rice!",
            r"(word|hint)": lambda _: "It is the ship.",
        }
        return next(
            say(found[0]) for pattern, say in facts.items() if (found := re.findall(pattern, text))
        )


def judge(messages: Any, *_: Any) -> ModelOutput:
    """A grader who compares what the template gave it."""
    task = messages[0].text.split()[2].strip(".")
    *about, said = messages[-1].text.split(" | ")
    checks: dict[str, Callable[[], bool]] = {
        "backtracking": lambda: about[1] in said,
        "system_prompt_qa": lambda: about[0] in said,
        "activation_sensitivity": lambda: said != about[2],
    }
    right = checks.get(task, lambda: "hen" in said)()
    good = {
        "vagueness": ("specific_correct", "generic"),
        "domain_confusion": ("domain_correct_specific", "domain_wrong"),
        "hallucination": ("vague", "obviously_wrong"),
        "activation_sensitivity": ("divergent_meaningful", "same"),
    }.get(task)
    scale = {"correctness": 5 if right else 2, "specificity": 3}
    grade = {"category": good[not right]} if good else scale
    return replied(f"```json\n{json.dumps(grade)}\n```")


def replied(text: str) -> ModelOutput:
    output = ModelOutput.from_content("mockllm/grader", text)
    output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    return output


def grader(answer: Callable[..., ModelOutput] = judge) -> Model:
    return get_model("mockllm/grader", custom_outputs=answer, memoize=False)


def run(task: Task, model: Model, folder: Path, **options: Any) -> EvalLog:
    (log,) = eval(
        task, model=model, display="none", log_dir=str(folder / "logs"), max_samples=1, **options
    )
    return log


def metrics(log: EvalLog) -> dict[str, float]:
    assert log.status == "success", log.error and log.error.traceback
    assert log.results is not None
    return {k: m.value for s in log.results.scores for k, m in s.metrics.items()}


@pytest.mark.slow
def test_each_task_has_its_number_beside_its_controls(
    server: FakeLensServer, model: Model, write_oracle: Any, tmp_path: Path
) -> None:
    write_oracle(act_layer_combinations=[[1], [1, 2]])
    reader = server.replies = Reader(server)
    clone = write_clone(tmp_path / "clone", n=8)
    # One permutation in eight leaves this model's rows as they are.
    arms = ["text_only", "random"]
    task = aobench(
        data=str(clone), oracle="tiny", tasks="all", subject=SUBJECT, per_task=8,
        controls=arms, **ADAPTERS,
    )  # fmt: skip
    log = run(task, model, tmp_path, model_roles={"grader": grader()})
    found = metrics(log)
    best = dict.fromkeys(TASKS, 1.0) | {
        "backtracking": 5.0, "system_prompt_qa_hidden": 5.0, "system_prompt_qa_latentqa": 5.0,
        "taboo": 0.5,  # one word of two
    }  # fmt: skip
    assert {task: found[task] for task in TASKS} == pytest.approx(best)
    scale = {"backtracking", "system_prompt_qa_hidden", "system_prompt_qa_latentqa"}
    chance = {"mmlu_prediction", "missing_info", "sycophancy"}
    worst = {t: 2.0 if t in scale else 0.5 if t in chance else 0.0 for t in TASKS}
    for arm in arms:
        assert {t: found[f"{t}_{arm}"] for t in TASKS} == pytest.approx(worst), arm
    assert found["mean"] == pytest.approx((12 + 0.5) / 13)
    assert found["mean_text_only"] == pytest.approx(3 * 0.25 / 13)
    assert found["missing_info_same_text"] == 1.0
    for name in TASKS:
        assert found[f"{name}_low"] <= found[name] <= found[f"{name}_high"]
    rivals = {t: max(found[f"{t}_{arm}_high"] for arm in arms) for t in TASKS}
    better = [name for name in TASKS if found[f"{name}_low"] > rivals[name]]
    assert "number_prediction" in better
    assert "taboo" not in better, "two hidden words are too few"
    assert found["beats_controls"] == len(better)

    # Both layers, and the last tokens of what was read.
    text, positions = next(s for s in reader.shown if "much is 3" in s[0])
    n = len(text.split())
    assert positions == tuple(range(n - 10, n)) * 2
    # A word's model reads its prompts with its own adapter.
    assert {"taboo-ship", "taboo-moon", "personas"} <= set(server.adapters)
    assert server.adapters["taboo-moon"] == "adapters/taboo-moon"

    lines = aobench_table(log).splitlines()
    row = next(line for line in lines if line.startswith("| domain_confusion |"))
    assert row.startswith("| domain_confusion | 8 | 8 | **1.00 [")

    # Another judge grades the finished log, and no server is asked.
    before = len(server.requests)
    again = score(
        log, aobench_answer(), action="overwrite",
        model_roles={"grader": grader(lambda *_: replied('{"category": "generic"}'))},
    )  # fmt: skip
    assert len(server.requests) == before
    made = metrics(again)
    assert made["vagueness"] == 0.0
    assert made["number_prediction"] == 1.0
    assert "backtracking" not in made, "it gave no grade of correctness"


def test_without_a_grader_nothing_is_asked(
    server: FakeLensServer, model: Model, write_oracle: Any, tmp_path: Path
) -> None:
    write_oracle()
    clone = write_clone(tmp_path / "clone")
    task = aobench(data=str(clone), oracle="tiny", tasks="backtracking", subject=SUBJECT)
    log = run(task, model, tmp_path)
    assert log.status == "error"
    assert log.error is not None
    assert "grader" in log.error.message
    assert not server.requests


def test_a_judge_is_asked_again_and_its_silence_is_no_grade(
    server: FakeLensServer, model: Model, write_oracle: Any, tmp_path: Path
) -> None:
    write_oracle()
    server.replies = Reader(server)
    said = ["no idea", '{"correctness": 9}', '{"correctness": 4}', "hm", "hm", "hm"]
    replies = iter(said)
    clone = write_clone(tmp_path / "clone", n=2)
    task = aobench(
        data=str(clone), oracle="tiny", tasks="backtracking", subject=SUBJECT, controls=False
    )
    judged = grader(lambda *_: replied(next(replies)))
    log = run(task, model, tmp_path, model_roles={"grader": judged})
    values = {s.id: (s.scores or {})["aobench_answer"] for s in log.samples or []}
    assert values["backtracking/0"].value == 4.0
    assert values["backtracking/1"].reason == "scoring_failed"
    assert metrics(log)["backtracking"] == 4.0


def test_a_context_that_is_too_short_is_unscored(
    server: FakeLensServer, model: Model, write_oracle: Any, tmp_path: Path
) -> None:
    write_oracle()
    server.replies = Reader(server)
    clone = write_clone(tmp_path / "clone", n=1)
    path = clone / "AObench/open_ended_eval/personaqa.py"
    path.write_text(path.read_text().replace("POSITION = -3", "POSITION = -50"))
    task = aobench(data=str(clone), oracle="tiny", tasks="personaqa", subject=SUBJECT, **ADAPTERS)
    log = run(task, model, tmp_path)
    reasons = {
        str(s.id).rpartition("/")[2]: (s.scores or {})["aobench_answer"].reason
        for s in log.samples or []
    }
    assert reasons == {"segment": None, "full_seq": None, "single_token": "no_tokens"}


class Api:
    """A server whose template closes reasoning that nobody wrote; a token is a character."""

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/detokenize":
            return {"prompt": "".join(map(chr, body["tokens"]))}
        assert body["add_special_tokens"] is False
        if "prompt" in body:
            return {"tokens": [ord(c) for c in body["prompt"]]}
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
        turns = [f"<{m['role']}>{m['content']}" for m in body["messages"]]
        closed = "<think>\n\n</think>\n\n"
        if body.get("continue_final_message"):
            turns[-1] = turns[-1].replace(">", f">{closed}", 1)
        if body["add_generation_prompt"]:
            turns.append(f"<assistant>{closed}")
        return {"tokens": [ord(c) for c in "".join(turns)]}


@pytest.mark.parametrize(
    ("context", "text", "shown"),
    [
        (
            Context(messages=(("user", "Hi"),), start=-3),
            "<user>Hi<assistant><think>\n\n</think>\n\n", ">\n\n",
        ),
        (
            Context(messages=(("user", "Hi"), ("assistant", "Hm")), form="thinking", start=-2),
            "<user>Hi<assistant><think>\nHm", "Hm",
        ),
        (
            Context(
                messages=(("user", "Hi"), ("assistant", "Hm")), form="continue", start=-4, stop=-2
            ),
            "<user>Hi<assistant><think>\n\n</think>\n\nHm", "\n\n",
        ),
        (
            Context(messages=(("system", "Be."), ("user", "Hi")), start="behind system"),
            "<system>Be.<user>Hi<assistant><think>\n\n</think>\n\n",
            "<user>Hi<assistant><think>\n\n</think>\n\n",
        ),
        (Context(messages=(("user", "Hi"),), start=-99, stop=-98),
         "<user>Hi<assistant><think>\n\n</think>\n\n", ""),
    ],
)  # fmt: skip
def test_contexts_end_where_the_suite_ends_them(context: Context, text: str, shown: str) -> None:
    asked: Any = SimpleNamespace(api=Api())
    ids, positions = anyio.run(context_tokens, asked, context)
    assert "".join(map(chr, ids)) == text
    assert "".join(chr(ids[p]) for p in positions) == shown


def scored(
    task: str, kind: Any, rows: Sequence[tuple[str, float, bool | None, float]]
) -> list[Any]:
    """Scores of (group, the oracle's value, label, the control's value)."""
    made = []
    for i, (group, value, label, control) in enumerate(rows):
        item = Item(
            task=task, group=group, kind=kind, question="?", max_tokens=1, contexts=(),
            rule="number", label=label,
        )  # fmt: skip
        arms = {"oracle": {"value": value}, "text_only": {"value": control}}
        made.append(
            SampleScore(
                score=Score(value=value, metadata={"arms": arms}), sample_id=i,
                sample_metadata=item.model_dump(mode="json"),
            )
        )  # fmt: skip
    return made


class TestIntervals:
    def test_an_auroc_is_that_of_all_answers(self) -> None:
        rng = np.random.default_rng(0)
        rows = [(f"g{i}", float(rng.normal() + i % 2), i % 2 == 1, 0.0) for i in range(60)]
        found = estimates(scored("missing_info", "auroc", rows))["missing_info"]
        expected = roc_auc_score([r[2] for r in rows], [r[1] for r in rows])
        assert found["oracle"].value == pytest.approx(expected)
        assert found["text_only"].value == 0.5

    @pytest.mark.parametrize("kind", ["share", "scale", "auroc"])
    def test_answers_about_one_problem_count_once(self, kind: str) -> None:
        rng = np.random.default_rng(1)
        low = {"scale": 1}.get(kind, 0)
        rows = [(f"g{i}", float(rng.integers(low, low + 2)), i % 2 == 0, 1.0) for i in range(30)]
        (once, often) = (
            estimates(scored("backtracking", kind, made))["backtracking"]["oracle"]
            for made in (rows, [row for row in rows for _ in range(5)])
        )
        assert often.value == pytest.approx(once.value)
        assert (once.n, often.n, often.groups) == (30, 150, 30)
        assert often.high - often.low == pytest.approx(once.high - once.low, rel=0.1)

    def test_grades_of_single_answers_have_students_interval(self) -> None:
        values = [1.0, 2.0, 4.0, 3.0, 5.0, 2.0]
        rows = [(f"g{i}", v, None, 1.0) for i, v in enumerate(values)]
        found = estimates(scored("backtracking", "scale", rows))["backtracking"]["oracle"]
        half = student.ppf(0.975, 5) * np.std(values, ddof=1) / np.sqrt(6)
        assert found.low == pytest.approx(np.mean(values) - half)
        assert found.high == pytest.approx(np.mean(values) + half)

    def test_equal_fractions_are_no_more_certain(self) -> None:
        # The mean of seven times 1.1 is not 1.1 in floating point.
        rows = [(f"g{i}", 1.1, None, 1.1) for i in range(7)]
        found = estimates(scored("backtracking", "scale", rows))["backtracking"]["oracle"]
        assert found.high - found.low > 1

    def test_equal_grades_are_not_certain(self) -> None:
        rows = [(f"g{i}", 5.0, None, 1.0) for i in range(9)]
        found = estimates(scored("backtracking", "scale", rows))["backtracking"]
        exact = clopper_pearson(9, 9)
        assert found["oracle"][:3] == (5.0, 1 + 4 * exact.low, 5.0)
        assert found["text_only"].high > 1

    def test_the_same_text_is_no_task_that_beats_controls(self) -> None:
        rows = [(f"m{i}", float(i % 2), i % 2 == 1, float(i % 3)) for i in range(80)]
        scores = scored("missing_info", "auroc", rows)
        for i, one in enumerate(scores):
            one.sample_metadata["condition"] = ("A_complete", "C_forced")[i % 2]
        metric: Any = aobench_metrics()
        found = metric(scores)
        assert found["missing_info_same_text_low"] > found["missing_info_same_text_text_only_high"]
        assert found["beats_controls"] == 1

    def test_the_mean_is_of_numbers_on_one_scale(self) -> None:
        scores = [
            *scored("number_prediction", "share", [(f"n{i}", 1.0, None, 0.0) for i in range(9)]),
            *scored("backtracking", "scale", [(f"p{i}", 3.0, None, 1.0) for i in range(9)]),
            *scored(
                "missing_info",
                "auroc",
                [(f"m{i}", float(i % 2), i % 2 == 1, 0.0) for i in range(40)],
            ),
        ]  # fmt: skip
        found = estimates(scores)
        assert found["mean"]["oracle"].value == pytest.approx((1 + 0.5 + 1) / 3)
        assert found["mean"]["text_only"].value == 0.0
        share, auc = found["number_prediction"]["oracle"], found["missing_info"]["oracle"]
        grades = found["backtracking"]["oracle"]
        low = (share.low + (grades.low - 1) / 4 + (2 * auc.low - 1)) / 3
        assert found["mean"]["oracle"].low == pytest.approx(low)


def test_a_line_separator_in_a_text_ends_no_row(tmp_path: Path) -> None:
    clone = write_clone(tmp_path)
    (file,) = clone.rglob("personas.jsonl")
    rows = [{"name": "a\u2028b"}, {"name": "c"}]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    found = open_clone(str(clone), SUBJECT).entries(
        "personaqa_data/shuffled/personas.jsonl", "name"
    )
    assert found == rows
