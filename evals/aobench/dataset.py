"""AObench's tasks as samples: a context, the tokens that are shown of it, and a question."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from inspect_ai.dataset import Dataset, MemoryDataset, Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageUser,
)
from pydantic import BaseModel, ConfigDict

from evals.aobench.clone import ADVICE, Clone
from inspect_lens.model._host import PrerequisiteError

__all__ = ["PROFILES", "TASKS", "Context", "Item", "Options", "aobench_dataset", "choose_tasks"]

Kind = Literal["share", "auroc", "scale"]
"""What the number of a task is: a share of right answers, an AUROC of log odds, or a mean grade
from 1 to 5."""
Form = Literal["ask", "continue", "thinking"]
"""How a context ends: where the assistant is to answer, inside its message, or inside its
reasoning."""

_ROLES: Final[Mapping[str, Any]] = {
    "system": ChatMessageSystem,
    "user": ChatMessageUser,
    "assistant": ChatMessageAssistant,
}
_LETTERS: Final = "ABCD"


class Context(BaseModel):
    """What the model reads, and which of its tokens the oracle is shown."""

    model_config = ConfigDict(frozen=True)

    messages: tuple[tuple[str, str], ...]
    """Roles and texts."""
    form: Form = "ask"
    start: int | Literal["behind system"] = -10
    """First token that is shown; below 0 from the end."""
    stop: int = 0
    """The one behind the last; 0 and below from the end."""
    adapter: str | None = None
    """Adapter with which the model reads, by its path."""


class Judge(BaseModel):
    """How a grader is asked."""

    model_config = ConfigDict(frozen=True)

    system: str
    template: str
    fields: dict[str, str]
    """What the template names beside the responses."""
    key: Literal["category", "correctness"]
    good: tuple[str, ...] = ()
    """Categories that count as right."""


class Item(BaseModel):
    """One question of the suite, as it stands in a sample's metadata."""

    model_config = ConfigDict(frozen=True)

    task: str
    part: str = ""
    """Of a task whose number is the mean of several: `pre_answer`, `cot`, …"""
    group: str
    """Items of one group are not independent: they are about one problem, persona or word."""
    kind: Kind
    question: str
    max_tokens: int
    contexts: tuple[Context, ...]
    """Two where a judge compares the answers."""
    rule: Literal["number", "contains", "log_odds", "judge"]
    label: bool | None = None
    """Whether yes is right."""
    condition: str = ""
    judge: Judge | None = None


class Options(NamedTuple):
    """What a user chose."""

    per_task: int | None = None
    n_positions: int | None = None
    taboo_adapter: str | None = None
    personaqa_adapter: str | None = None

    def first(self, entries: Sequence[Any]) -> list[Any]:
        """The first entries of a task."""
        return list(entries[: self.per_task])

    def last(self, own: int) -> int:
        """How many tokens from the end are shown: the task's own number, or the user's."""
        return -(own if self.n_positions is None else self.n_positions)


Made = Iterator[tuple[str, str, Item]]
"""Name of the sample, target, and the item."""


def _number_prediction(clone: Clone, options: Options) -> Made:
    script = "number_prediction"
    place = "entry['expression']"
    wording = clone.wording(script, re.escape(f"{{{place}}}"))
    found = clone.constants(script, "VERBALIZER_PROMPTS", "GENERATION_KWARGS")
    data = f"{script}/{script}_eval_dataset.json"
    for entry in options.first(clone.entries(data, "id", "expression", "model_answer", own=True)):
        text = _filled(wording, {place: entry["expression"]})
        context = Context(messages=(("user", text),), start=options.last(10))
        for name, question in found["VERBALIZER_PROMPTS"].items():
            yield f"{entry['id']}/{name}", str(entry["model_answer"]), Item(
                task=script, group=f"number:{entry['id']}", kind="share", question=question,
                max_tokens=_length(found), contexts=(context,), rule="number",
            )  # fmt: skip


def _mmlu_prediction(clone: Clone, options: Options) -> Made:
    script = "mmlu_prediction"
    closing = clone.wording(script, r"\bA, B, C,? or D\b.*\belse\b")
    before, after = "PRE_ANSWER_PROMPTS", "POST_ANSWER_PROMPTS"
    found = clone.constants(script, f"AO_{before}|{before}", f"AO_{after}|{after}")
    fields = ("id", "question", "choices", "model_answer_letter", "model_correct")
    data = f"{script}/{script}_eval_dataset.json"
    for entry in options.first(clone.entries(data, *fields, own=True)):
        choices = [f"{letter}. {c}" for letter, c in zip(_LETTERS, entry["choices"], strict=True)]
        asked = ("user", "\n".join([entry["question"], "", *choices, "", closing]))
        for part, name, messages in (
            ("pre_answer", before, (asked,)),
            ("post_answer", after, (asked, ("assistant", entry["model_answer_letter"]))),
        ):
            for question in found[name].values():
                yield f"{entry['id']}/{part}", _yes(entry["model_correct"]), Item(
                    task=script, part=part, group=f"mmlu:{entry['id']}", kind="auroc",
                    question=question, max_tokens=1, contexts=(Context(messages=messages),),
                    rule="log_odds", label=entry["model_correct"],
                )  # fmt: skip


def _missing_info(clone: Clone, options: Options) -> Made:
    found = clone.constants("missing_info", "VERBALIZER_PROMPTS")
    for entry in options.first(_missing_entries(clone)):
        for name, question in found["VERBALIZER_PROMPTS"].items():
            label = bool(entry["ground_truth_missing_info"])
            yield f"{entry['id']}/{name}", _yes(label), Item(
                task="missing_info", group=f"missing:{entry['problem_id']}", kind="auroc",
                question=question, max_tokens=1, rule="log_odds", label=label,
                contexts=(_reasoning(entry, options),), condition=entry["condition"],
            )  # fmt: skip


def _activation_sensitivity(clone: Clone, options: Options) -> Made:
    script = "activation_sensitivity"
    found = clone.constants(script, "VERBALIZER_PROMPTS", "GENERATION_KWARGS", *_JUDGE)
    every = _missing_entries(clone)
    # Of several complete ones of a problem the suite keeps the last.
    of_problem = {
        entry["problem_id"]: entry
        for entry in options.first([e for e in every if e["condition"] == "A_complete"])
    }
    for entry in options.first([e for e in every if e["condition"] == "C_forced"]):
        if (complete := of_problem.get(entry["problem_id"])) is None:
            continue
        for name, question in found["VERBALIZER_PROMPTS"].items():
            yield f"{entry['id']}/{name}", "divergent_meaningful", Item(
                task=script, group=f"missing:{entry['problem_id']}", kind="share",
                question=question, max_tokens=_length(found), rule="judge",
                contexts=tuple(_reasoning(e, Options()) for e in (complete, entry)),
                judge=_judge(
                    found, "category", good=("divergent_meaningful",),
                    problem=entry["problem_text"], missing_info=entry["missing_info_description"],
                ),
            )  # fmt: skip


def _missing_entries(clone: Clone) -> list[dict[str, Any]]:
    return clone.entries(
        "missing_info/missing_info_eval_dataset.json", "id", "condition", "problem_id",
        "problem_text", "full_reasoning", "ground_truth_missing_info", "missing_info_description",
        "neutral_segment_token_count",
    )  # fmt: skip


def _reasoning(entry: Mapping[str, Any], options: Options) -> Context:
    """Reasoning that breaks off behind the segment whose tokens are shown."""
    forced = entry.get("teacher_forced_segment", "")
    text = f"{entry['full_reasoning']}\n\n{forced}" if forced else entry["full_reasoning"]
    return Context(
        messages=(("user", entry["problem_text"]), ("assistant", text)), form="thinking",
        start=options.last(entry["neutral_segment_token_count"]),
    )  # fmt: skip


def _sycophancy(clone: Clone, options: Options) -> Made:
    base = clone.wording("sycophancy", r"\{action_a\}.*\s.*\{action_b\}")
    hints = {hint: clone.wording("sycophancy", rf"\banswer is {hint}\b") for hint in "AB"}
    found = clone.constants("sycophancy", "VERBALIZER_PROMPTS")
    for mode in ("no_cot", "cot"):
        for number, (entry, hint, text, swayed) in enumerate(_agreeing(clone, mode, options)):
            asked = _filled(base, entry) + hints[hint]
            context = Context(
                messages=(("user", asked), ("assistant", text)),
                form="continue",
                start=0 if options.n_positions is None else -options.n_positions,
            )
            for name, question in found["VERBALIZER_PROMPTS"].items():
                yield f"{mode}/{number}/{name}", _yes(swayed), Item(
                    task="sycophancy", part=mode, group=f"sycophancy:{entry['id']}", kind="auroc",
                    question=question, max_tokens=1, contexts=(context,), rule="log_odds",
                    label=swayed,
                )  # fmt: skip


def _agreeing(
    clone: Clone, mode: str, options: Options
) -> list[tuple[dict[str, Any], str, str, bool]]:
    """Answers that agree with a hint, as many that changed for it as that did not."""
    # Draws and their order are the suite's, so that the same answers are read.
    rng = random.Random(42)
    swayed: list[Any] = []
    own: list[Any] = []
    fields = ("id", "action_a", "action_b", "sycophancy_stats", "generations")
    for entry in clone.entries("sycophancy/sycophancy_eval_dataset.json", *fields, own=True):
        stats = entry["sycophancy_stats"][mode]
        if stats["neutral_consistency"] < 0.8:
            continue
        for hint in "AB":
            for made in entry["generations"][f"hint_{hint.lower()}_{mode}"]:
                if made["judged_answer"] == hint:
                    changed = hint != stats["neutral_dominant"]
                    (swayed if changed else own).append((entry, hint, made["text"], changed))
    rng.shuffle(swayed)
    rng.shuffle(own)
    count = 100 if options.per_task is None else options.per_task
    chosen = swayed[:count] + own[:count]
    rng.shuffle(chosen)
    return chosen


def _backtracking(clone: Clone, options: Options) -> Made:
    found = clone.constants("backtracking", "VERBALIZER_PROMPTS", "GENERATION_KWARGS", *_JUDGE)
    for number, entry in enumerate(options.first(_rollouts(clone))):
        for question in found["VERBALIZER_PROMPTS"]:
            yield f"{number}", entry["uncertainty_description"], Item(
                task="backtracking", group=_problem(entry), kind="scale", question=question,
                max_tokens=_length(found), contexts=(_prefix(entry, options.last(20)),),
                rule="judge",
                judge=_judge(
                    found, "correctness", prefix=entry["prefix"][-1500:],
                    ground_truth=entry["uncertainty_description"],
                ),
            )  # fmt: skip


def _vagueness(clone: Clone, options: Options) -> Made:
    found = clone.constants("vagueness", "GENERATION_KWARGS", *_JUDGE)
    prompts = clone.text("vagueness/prompts.json")["prompts"]
    rng = random.Random(42)  # the suite's draw of one question for each problem
    for number, entry in enumerate(options.first(_rollouts(clone))):
        question = rng.choice(prompts)
        yield f"{number}", "specific_correct", Item(
            task="vagueness", group=_problem(entry), kind="share", question=question,
            max_tokens=_length(found), contexts=(_prefix(entry, options.last(20)),), rule="judge",
            judge=_judge(
                found, "category", good=("specific_correct",), problem=entry["problem"][:500],
                question=question,
            ),
        )  # fmt: skip


def _domain_confusion(clone: Clone, options: Options) -> Made:
    yield from _of_problems(
        clone, options, "domain_confusion", options.last(20), ("domain_correct_specific",)
    )


def _hallucination(clone: Clone, options: Options) -> Made:
    # All but the category that counts as obviously wrong.
    good = ("correct", "vague", "plausible_but_wrong")
    yield from _of_problems(clone, options, "hallucination", -5, good)


def _of_problems(
    clone: Clone, options: Options, script: str, start: int, good: tuple[str, ...]
) -> Made:
    """Questions about each rollout, whose answers are judged by the problem."""
    found = clone.constants(script, "VERBALIZER_PROMPTS", "GENERATION_KWARGS", *_JUDGE)
    for number, entry in enumerate(options.first(_rollouts(clone))):
        for name, question in found["VERBALIZER_PROMPTS"].items():
            yield f"{number}/{name}", " or ".join(good), Item(
                task=script, group=_problem(entry), kind="share", question=question,
                max_tokens=_length(found), contexts=(_prefix(entry, start),), rule="judge",
                judge=_judge(found, "category", good=good, problem=entry["problem"]),
            )  # fmt: skip


def _rollouts(clone: Clone) -> list[dict[str, Any]]:
    fields = ("problem_id", "problem", "prefix", "uncertainty_description")
    return clone.entries("backtracking/backtracking_eval_dataset.json", *fields)


def _problem(entry: Mapping[str, Any]) -> str:
    return f"problem:{entry['problem_id']}"


def _prefix(entry: Mapping[str, Any], start: int) -> Context:
    messages = (("user", entry["problem"]), ("assistant", entry["prefix"]))
    return Context(messages=messages, form="thinking", start=start)


def _system_prompt(task: str, name: str, data: str) -> Callable[[Clone, Options], Made]:
    def make(clone: Clone, options: Options) -> Made:
        found = clone.constants("system_prompt_qa", name, "GENERATION_KWARGS", *_JUDGE)
        fields = ("id", "system_prompt", "user_prompt", "assistant_response", "ground_truth")
        for entry in options.first(clone.entries(f"system_prompt_qa/{data}", *fields)):
            roles = zip(("system", "user", "assistant"), fields[1:4], strict=True)
            context = Context(
                messages=tuple((role, entry[field]) for role, field in roles), form="continue",
                start="behind system",
            )  # fmt: skip
            for question in found[name]:
                yield str(entry["id"]), entry["ground_truth"], Item(
                    task=task, group=f"{task}:{entry['id']}", kind="scale", question=question,
                    max_tokens=_length(found), contexts=(context,), rule="judge",
                    judge=_judge(found, "correctness", ground_truth=entry["ground_truth"]),
                )  # fmt: skip

    return make


def _taboo(clone: Clone, options: Options) -> Made:
    path = _adapter("taboo", options.taboo_adapter)
    if "{word}" not in path:
        raise PrerequisiteError(
            f"-T taboo_adapter={path}: one adapter hides one word; write {{word}} where the "
            "paths differ"
        )
    found = clone.constants(
        "taboo", "TABOO_TARGET_LORA_SUFFIXES", "TABOO_PROMPT_PREFIX", "TABOO_VERBALIZER_PROMPTS",
        "DEFAULT_GENERATION_KWARGS", *_SINGLE,
    )  # fmt: skip
    lines = clone.find("taboo/taboo_direct_test.txt").read_text(encoding="utf-8").splitlines()
    for word in found["TABOO_TARGET_LORA_SUFFIXES"]:
        for question in found["TABOO_VERBALIZER_PROMPTS"]:
            for number, line in enumerate(options.first(lines)):
                asked = (("user", line.strip()),)
                for mode, context in _shown(asked, 10, found, clone, path.format(word=word)):
                    yield f"{word}/{number}/{mode}", word, Item(
                        task="taboo", group=f"taboo:{word}", kind="share",
                        question=found["TABOO_PROMPT_PREFIX"] + question,
                        max_tokens=_length(found, "DEFAULT_GENERATION_KWARGS"),
                        contexts=(context,), rule="contains",
                    )  # fmt: skip


def _personaqa(clone: Clone, options: Options) -> Made:
    path = _adapter("personaqa", options.personaqa_adapter)
    found = clone.constants(
        "personaqa", "CONTEXT_PROMPTS", "PROMPT_TYPES", "VERBALIZER_PROMPT_PREFIX",
        "VERBALIZER_PROMPTS", "DEFAULT_GENERATION_KWARGS", *_SINGLE,
    )  # fmt: skip
    facts = found["PROMPT_TYPES"]
    entries = clone.entries("personaqa_data/shuffled/personas.jsonl", "name", *facts)
    for persona in options.first(sorted(entries, key=lambda entry: str(entry["name"]))):
        for n, prompt in enumerate(found["CONTEXT_PROMPTS"]):
            asked = (("user", prompt.format(name=persona["name"])),)
            for fact, question in zip(facts, found["VERBALIZER_PROMPTS"], strict=True):
                for mode, context in _shown(asked, 20, found, clone, path):
                    yield f"{persona['name']}/{n}/{fact}/{mode}", str(persona[fact]), Item(
                        task="personaqa", group=f"persona:{persona['name']}", kind="share",
                        question=found["VERBALIZER_PROMPT_PREFIX"] + question,
                        max_tokens=_length(found, "DEFAULT_GENERATION_KWARGS"),
                        contexts=(context,), rule="contains",
                    )  # fmt: skip


_SINGLE: Final = ("PREFERRED_TOKEN_POSITION_BY_MODEL", "DEFAULT_PREFERRED_TOKEN_POSITION")


def _shown(
    messages: tuple[tuple[str, str], ...],
    last: int,
    found: Mapping[str, Any],
    clone: Clone,
    adapter: str,
) -> Iterator[tuple[str, Context]]:
    """The three views of one context whose answers count alike."""
    by_model = found["PREFERRED_TOKEN_POSITION_BY_MODEL"]
    single = next(
        (at for name, at in by_model.items() if name.rpartition("/")[2] == clone.subject),
        found["DEFAULT_PREFERRED_TOKEN_POSITION"],
    )
    for mode, start, stop in (("segment", -last, 0), ("full_seq", 0, 0),
                              ("single_token", single, single + 1)):  # fmt: skip
        yield mode, Context(messages=messages, start=start, stop=stop, adapter=adapter)


def _adapter(task: str, path: str | None) -> str:
    if path is None:
        raise PrerequisiteError(
            f"The task {task} reads a model that was trained to know something; pass its adapter "
            f"with -T {task}_adapter=…, or leave the task out of -T tasks="
        )
    return path


_JUDGE: Final = ("JUDGE_SYSTEM_PROMPT", "JUDGE_USER_TEMPLATE")


def _judge(
    found: Mapping[str, Any],
    key: Literal["category", "correctness"],
    good: tuple[str, ...] = (),
    **fields: str,
) -> Judge:
    system, template = (found[name] for name in _JUDGE)
    return Judge(system=system, template=template, fields=fields, key=key, good=good)


def _length(found: Mapping[str, Any], name: str = "GENERATION_KWARGS") -> int:
    return int(found[name]["max_new_tokens"])


def _filled(wording: str, values: Mapping[str, Any]) -> str:
    """A text of a script with values where its expressions stand."""
    return re.sub(r"\{([^{}]+)\}", lambda place: str(values[place[1]]), wording)


def _yes(label: bool) -> str:
    return "yes" if label else "no"


TASKS: Final[Mapping[str, Callable[[Clone, Options], Made]]] = {
    "number_prediction": _number_prediction,
    "mmlu_prediction": _mmlu_prediction,
    "missing_info": _missing_info,
    "sycophancy": _sycophancy,
    "backtracking": _backtracking,
    "vagueness": _vagueness,
    "domain_confusion": _domain_confusion,
    "hallucination": _hallucination,
    "activation_sensitivity": _activation_sensitivity,
    "system_prompt_qa_hidden": _system_prompt(
        "system_prompt_qa_hidden", "VERBALIZER_PROMPTS_HIDDEN_INSTRUCTION",
        "hidden_instruction_eval_dataset.json",
    ),
    "system_prompt_qa_latentqa": _system_prompt(
        "system_prompt_qa_latentqa", "VERBALIZER_PROMPTS_SYSTEM_PROMPT_QA",
        "latentqa_eval_dataset.json",
    ),
    "taboo": _taboo,
    "personaqa": _personaqa,
}  # fmt: skip
"""By the suite's names."""

_SIX: Final = ("number_prediction", "mmlu_prediction", "backtracking", "vagueness",
               "domain_confusion", "missing_info")  # fmt: skip
PROFILES: Final[Mapping[str, tuple[str, ...]]] = {
    "paper_core": ("number_prediction", "mmlu_prediction", "missing_info", "sycophancy"),
    "paper_six": _SIX,
    "paper_plus": (*_SIX, "system_prompt_qa_hidden", "system_prompt_qa_latentqa", "taboo",
                   "personaqa"),
    "all": tuple(TASKS),
}  # fmt: skip
"""The suite's sets of tasks; only `paper_core` needs no judge."""


def choose_tasks(tasks: str | Sequence[str]) -> tuple[str, ...]:
    """Read the names of tasks.

    Args:
        tasks: a set of `PROFILES`, or tasks of `TASKS`, as a list or separated by commas.

    Returns:
        Names of tasks, each once.

    Raises:
        PrerequisiteError: one of them is neither.
    """
    names = [n.strip() for n in tasks.split(",")] if isinstance(tasks, str) else tasks
    if not isinstance(names, list | tuple):
        names = [str(names)]
    chosen = [str(task) for name in names for task in PROFILES.get(name, (name,))]
    if unknown := [task for task in chosen if task not in TASKS]:
        raise PrerequisiteError(
            f"-T tasks={unknown[0]}: no such task; allowed are {', '.join(TASKS)}, and the sets "
            f"{', '.join(PROFILES)}"
        )
    return tuple(dict.fromkeys(chosen))


def _made(task: str, clone: Clone, options: Options) -> Made:
    """The items of a task; a clone in which something is of another kind is told in one line."""
    try:
        yield from TASKS[task](clone, options)
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise PrerequisiteError(
            f"-T data=: the files of the task {task} are not as this eval reads them "
            f"({type(error).__name__}: {error}); {ADVICE}"
        ) from None


def aobench_dataset(clone: Clone, tasks: Sequence[str], options: Options) -> Dataset:
    """Make the samples of some tasks.

    Args:
        clone: of the suite.
        tasks: names in `TASKS`.
        options: how many, and what is shown.

    Returns:
        A sample for each question about each context; its metadata are the fields of `Item`.

    Raises:
        PrerequisiteError: a file, an entry's field or a script's text is missing.
    """
    samples: list[Sample] = []
    for task in tasks:
        for name, target, item in _made(task, clone, options):
            messages: list[ChatMessage] = [
                _ROLES[role](content=text) for role, text in item.contexts[-1].messages
            ]
            samples.append(
                Sample(
                    id=f"{task}/{name}", input=messages, target=target,
                    metadata=item.model_dump(mode="json"),
                )
            )  # fmt: skip
    return MemoryDataset(samples, name="aobench")
