"""Documents ranked by planted attention, through Inspect: the second call, and the formula."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import (
    ChatMessage,
    ChatMessageUser,
    ContentText,
    GenerateConfig,
    ModelOutput,
    get_model,
)
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver

from inspect_lens import LensRequest
from inspect_lens.attention import AttentionHeads
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import lens_config
from inspect_lens.model._places import place_for
from inspect_lens.model._request import read_body, respelled, save_vectors
from inspect_lens.reading._attention import DocumentReader
from inspect_lens.scorer import document_rank
from inspect_lens.spec import Add
from tests.kit.planted_attention import SIZE, Looks, attending
from tests.kit.planted_log import TOKENIZER, encode

CORE = [(1, 1), (4, 0)]
"""The heads of the list; the others look at the first document, whatever is asked."""
HEADS = AttentionHeads(method="core", model="model", heads=tuple(CORE))
DOCUMENTS = [
    "The river Talmo is in Verun.",
    "The town Velosh was founded by Ruvan.",
    "The town Verun has a river.",
]
QUERY = "Who is the founder of the town Velosh?"
PROMPT = " ".join([*DOCUMENTS, QUERY])
METADATA = {"documents": DOCUMENTS, "query": QUERY, "relevant": 1}


def starts(ids: list[int], texts: list[str]) -> list[tuple[int, int]]:
    """Token ranges, by the tokens of the prompt up to each text: an independent count."""
    found, before = [], ""
    for text in texts:
        first = len(encode([ChatMessageUser(content=before)])[0]) - 2
        before = f"{before} {text}".strip()
        found.append((first, len(encode([ChatMessageUser(content=before)])[0]) - 2))
    return found


class Model:
    """Looks at documents by the habit of its heads, and where it is asked, at one of them."""

    def __init__(self, folder: Path, *, drawn: int = 1) -> None:
        self.folder = folder
        self.drawn = drawn
        self.calls: list[tuple[str, GenerateConfig]] = []
        self.rows: dict[str, dict[tuple[int, int], np.ndarray[Any, Any]]] = {}
        self.spans: list[tuple[int, int]] = []

    def __call__(
        self, messages: list[ChatMessage], tools: Any, choice: Any, config: GenerateConfig
    ) -> ModelOutput:
        text = messages[-1].text
        self.calls.append((text, config))
        if (request := read_body(config.extra_body).request) is not None:
            save_vectors(request, place_for(None))  # as the provider does
        asked = QUERY if QUERY in text else "N/A"

        def look(ids: list[int]) -> Looks:
            rng = np.random.default_rng(3)
            *documents, query = starts(ids, [*DOCUMENTS, asked])
            self.spans = documents
            rows = {}
            for head in [(1, 0), (1, 1), (4, 0), (4, 1)]:
                row = np.full(SIZE, 1e-3)
                row[: query[0]] = rng.uniform(0.01, 0.02, query[0])
                first = documents[0]
                # The habit is larger than what the query adds.
                row[slice(*first)] += 0.05
                if head in CORE and asked == QUERY:
                    row[slice(*documents[self.drawn])] += 0.03
                rows[head] = row
            self.rows[asked] = {
                h: np.stack([r[:SIZE] / r[: p + 1].sum() for p in range(*query)])
                for h, r in rows.items()
            }
            return {position: rows for position in range(*query)}

        return attending(messages, look, self.folder)


def run(
    folder: Path,
    planted: Model,
    scorer: Any = None,
    *,
    metadata: Mapping[str, Any] = METADATA,
    prompt: Any = PROMPT,
    solver: Any = None,
    named: Mapping[str, Any] | None = None,
) -> EvalLog:
    config = lens_config(
        qk=[1, 4],
        capture=[2],
        edits=Add(vector=np.ones(4, np.float32), layers=[2], scale=0.5),
        max_tokens=9,
        temperature=0.5,
    )
    body, request = read_body(config.extra_body)
    asked = LensRequest(**{**dict(request or LensRequest()), **(named or {})})
    config.extra_body = respelled(body, asked)
    (log,) = eval(
        Task(
            dataset=[Sample(input=prompt, metadata=dict(metadata))],
            solver=solver or generate(),
            scorer=scorer or document_rank(HEADS, tokenizer=str(TOKENIZER)),
            config=config,
        ),
        model=get_model("mockllm/model", custom_outputs=planted, memoize=False),
        log_dir=str(folder), display="none",
    )  # fmt: skip
    return log


def found(log: EvalLog) -> Any:
    assert log.status == "success", log.error
    (sample,) = log.samples or []
    return (sample.scores or {})["document_rank"]


def expected(planted: Model) -> list[float]:
    """The formula in float64, from the planted rows."""
    token = {
        asked: sum(rows[head].mean(axis=0) for head in CORE) for asked, rows in planted.rows.items()
    }
    added = np.asarray(token[QUERY] - token["N/A"])
    sums = []
    for first, stop in planted.spans:
        each = added[first:stop]
        sums.append(float(each[each >= each.mean() - 2 * each.std(ddof=1)].sum()))
    return sums


def test_a_document_is_scored_by_what_the_query_adds(tmp_path: Path) -> None:
    planted = Model(tmp_path)
    made = found(run(tmp_path, planted))
    assert made.metadata["documents"] == [list(span) for span in planted.spans]
    np.testing.assert_allclose(made.metadata["scores"], expected(planted), atol=1e-5)
    assert made.metadata["ranking"][0] == 1
    assert made.answer == "1"
    assert made.value == {"reciprocal_rank": 1.0, "ndcg@10": 1.0}
    # Without the second call the habit would have won.
    rows = [planted.rows[QUERY][head].mean(axis=0) for head in CORE]
    plain = [float(sum(r[i:j].sum() for r in rows)) for i, j in planted.spans]
    assert int(np.argmax(plain)) == 0


def test_the_second_call_is_the_first_one_without_its_query(tmp_path: Path) -> None:
    planted = Model(tmp_path)
    found(run(tmp_path, planted))
    (first, asked), (second, again) = planted.calls
    assert (first, second) == (PROMPT, " ".join([*DOCUMENTS, "N/A"]))
    assert (asked.max_tokens, again.max_tokens) == (9, 1)
    assert again.temperature == 0.5
    before, after = (read_body(config.extra_body).request for config in (asked, again))
    assert before is not None
    assert after is not None
    assert after.edits == before.edits
    assert len(after.edits) == 1
    assert after.qk is not None
    assert after.qk.heads == ((1, 1), (4, 0))
    assert before.capture is not None
    assert after.capture is None


def test_the_second_call_has_all_that_changes_the_stream(tmp_path: Path) -> None:
    planted = Model(tmp_path)
    found(run(tmp_path, planted, named={"edits_named": ["v", "e"]}))
    before, after = (read_body(config.extra_body).request for _, config in planted.calls)
    assert before is not None
    assert after is not None
    for name in ("edits", "edits_named", "hooks"):
        assert getattr(after, name) == getattr(before, name)
    assert [use.name for use in after.edits_named] == ["v", "e"]


def test_where_another_document_draws_the_heads_the_rank_says_so(tmp_path: Path) -> None:
    planted = Model(tmp_path, drawn=2)
    made = found(run(tmp_path, planted, metadata=METADATA | {"relevant": [0, 1]}))
    ranking = made.metadata["ranking"]
    assert ranking == sorted(range(3), key=lambda i: -expected(planted)[i])
    assert ranking[0] == 2
    assert made.value["reciprocal_rank"] == 1 / 2
    ideal = 1 + 1 / math.log2(3)
    assert made.value["ndcg@10"] == pytest.approx((1 / math.log2(3) + 1 / 2) / ideal)


@solver
def given() -> Solver:
    """Puts an answer there that no call made."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state.output = ModelOutput.from_content("mockllm/model", "Ruvan.")
        return state

    return solve


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": METADATA | {"relevant": 3}}, "relevant='relevant'"),
        ({"metadata": METADATA | {"relevant": True}}, "from 0"),
        ({"metadata": METADATA | {"relevant": []}}, "list of them"),
        ({"metadata": {"relevant": 0, "query": QUERY}}, "0 documents"),
        ({"metadata": METADATA | {"documents": [DOCUMENTS[0], ""]}}, "two texts"),
        ({"metadata": METADATA | {"query": None}}, "query='query'"),
        ({"metadata": METADATA | {"query": "Where is Talmo?"}}, "in no message"),
        ({"metadata": METADATA | {"query": DOCUMENTS[2]}}, "behind the documents"),
        ({"metadata": METADATA | {"documents": [*DOCUMENTS[:2], "nowhere"]}}, "number 2"),
        ({"solver": given()}, "not in the sample's transcript"),
        (
            {"scorer": document_rank(
                HEADS.model_copy(update={"model": "other"}), tokenizer=str(TOKENIZER))},
            "'other', and this is 'model'",
        ),
        ({"scorer": document_rank(HEADS)}, "tokenizer"),
    ],
)  # fmt: skip
def test_what_cannot_be_ranked_is_an_error(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    log = run(tmp_path, Model(tmp_path), **change)
    assert log.status == "error"
    assert log.error is not None
    assert message in log.error.message


def test_a_query_that_stands_twice_and_a_prompt_that_differs_are_refused(tmp_path: Path) -> None:
    planted = Model(tmp_path)
    reader = DocumentReader(HEADS, tokenizer=str(TOKENIZER), check_model=False)
    said = [ChatMessageUser(content=PROMPT)]
    asked = planted(list(said), None, None, GenerateConfig())
    blank = planted(reader.without_query(said, METADATA), None, None, GenerateConfig())
    assert reader.read_captured(asked, blank, metadata=METADATA).ranking[0] == 1
    with pytest.raises(ArtifactError, match="differ in more than the query"):
        reader.read_captured(asked, asked, metadata=METADATA)
    twice = METADATA | {"query": "the"}
    with pytest.raises(ArtifactError, match="more than once"):
        reader.read_captured(asked, blank, metadata=twice)


def test_the_query_is_replaced_in_a_part_of_a_message_and_in_its_last_place() -> None:
    reader = DocumentReader(HEADS, empty=" nothing ")
    parts = [ContentText(text=f"{QUERY} {PROMPT}"), ContentText(text="Answer.")]
    said: list[ChatMessage] = [ChatMessageUser(content=parts), ChatMessageUser(content="Well?")]
    changed = reader.without_query(said, METADATA)
    assert changed[0].text.startswith(f"{QUERY} {DOCUMENTS[0]}")
    assert changed[0].text == said[0].text.replace(f"{DOCUMENTS[2]} {QUERY}",
                                                   f"{DOCUMENTS[2]} nothing")  # fmt: skip
    assert changed[1] is said[1]
    assert QUERY in said[0].text
    with pytest.raises(SpecError, match="empty=' '"):
        document_rank(HEADS, empty=" ")
