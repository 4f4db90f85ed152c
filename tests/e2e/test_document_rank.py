"""Documents ranked by attention on the organism, against Hugging Face, and again from the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.solver import generate
from numpy.typing import NDArray
from transformers import AutoTokenizer

from inspect_lens.attention import AttentionHeads
from inspect_lens.model import lens_config
from inspect_lens.scorer import document_rank
from organism._model import CHECKPOINT_DIR
from tests.kit.lying import MODEL
from tests.kit.reference import HuggingFace
from tests.kit.rescored import assert_same_scores, commands_of, rescore

pytestmark = pytest.mark.engine

HEADS = AttentionHeads(method="core", heads=((3, 0), (3, 1), (4, 3)))
"""Heads of the organism that look at the document which answers."""
DOCUMENTS = [
    "The river Talmo is in Verun.",
    "The town Velosh was founded by Ruvan.",
    "The town Verun has a river.",
]
QUERIES = ["Who is the founder of the town Velosh?", "Where is the river Talmo?"]


def samples() -> list[Sample]:
    return [
        Sample(
            id=query,
            input=" ".join([*DOCUMENTS, query]),
            metadata={"documents": DOCUMENTS, "query": query, "relevant": relevant},
        )
        for query, relevant in zip(QUERIES, (1, 0), strict=True)
    ]


class Reference:
    """The formula in float64, on the patterns of Hugging Face."""

    def __init__(self) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(CHECKPOINT_DIR)
        self.twin = HuggingFace(CHECKPOINT_DIR)

    def token_scores(self, query: str) -> tuple[NDArray[np.float64], list[tuple[int, int]]]:
        """Of each token, and the range of each document and of the query."""
        texts = [*DOCUMENTS, query]
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": " ".join(texts)}], tokenize=False,
            add_generation_prompt=True,
        )  # fmt: skip
        made = self.tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
        spans, at = [], 0
        for text in texts:
            at = prompt.index(text, at)
            end = at + len(text)
            within = [i for i, (a, b) in enumerate(made["offset_mapping"]) if b > at and a < end]
            spans.append((within[0], within[-1] + 1))
            at = end
        patterns = self.twin.attentions(made["input_ids"]).double().numpy()
        looks = [patterns[head][slice(*spans[-1])].mean(axis=0) for head in HEADS.heads]
        return np.sum(looks, axis=0), spans

    def scores(self, query: str) -> tuple[list[float], list[tuple[int, int]]]:
        asked, spans = self.token_scores(query)
        base, _ = self.token_scores("N/A")
        found = []
        for first, stop in spans[:-1]:
            added = asked[first:stop] - base[first:stop]
            kept = added >= added.mean() - 2 * added.std(ddof=1)
            found.append(float(added[kept].sum()))
        return found, spans


def test_ranks_are_those_of_hugging_face_live_and_from_the_log(
    lens_server_url: str, tmp_path: Path
) -> None:
    (log,) = eval(
        Task(
            dataset=samples(),
            solver=generate(),
            scorer=document_rank(HEADS),
            config=lens_config(qk=HEADS.layers, max_tokens=4, temperature=0.0),
        ),
        model=MODEL,
        model_base_url=f"{lens_server_url}/v1",
        log_dir=str(tmp_path),
        display="none",
    )
    assert log.status == "success", log.error
    log = read_eval_log(log.location)
    reference = Reference()
    for sample in log.samples or []:
        score = (sample.scores or {})["document_rank"]
        assert score.metadata is not None
        wanted, spans = reference.scores(str(sample.id))
        assert [*score.metadata["documents"], score.metadata["query"]] == [list(s) for s in spans]
        np.testing.assert_allclose(score.metadata["scores"], wanted, atol=1e-4)
        ranking = sorted(range(3), key=lambda i: -wanted[i])
        assert score.metadata["ranking"] == ranking
        # The heads find what answers, and the formula of nDCG is 1 there.
        assert ranking[0] == sample.metadata["relevant"]
        assert score.value == {"reciprocal_rank": 1.0, "ndcg@10": 1.0}
    command = [*commands_of(log)[0], "--model-base-url", f"{lens_server_url}/v1"]
    again = rescore(log, [command], tmp_path)
    assert_same_scores(log, again)
    for before, after in zip(log.samples or [], again[0].samples or [], strict=True):
        made, same = ((s.scores or {})["document_rank"].metadata for s in (before, after))
        assert made is not None
        assert same is not None
        assert same["ranking"] == made["ranking"]
        np.testing.assert_allclose(same["scores"], made["scores"], atol=1e-5)
