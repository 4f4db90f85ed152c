"""Self-explanation on the fake server: which rows go where, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, Model, ModelOutput

from inspect_lens._base.token_texts import TokenTexts
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import activations, lens_config
from inspect_lens.oracle import answer_table, explain_rows
from inspect_lens.oracle._send import random_rows, shuffled_rows
from inspect_lens.solver import self_explain, with_capture
from inspect_lens.spec import LensRequest, Replace, parse_extra_args
from tests.kit.fake_server import FakeLensServer
from tests.unit.oracle.test_oracle_asking import _crc

PROMPT = "the word{} means"


async def answered(model: Model, capture: Any = "all") -> ModelOutput:
    return await model.generate(
        [ChatMessageUser(content="tell me")], config=lens_config(capture=capture)
    )


def sent(server: FakeLensServer) -> list[tuple[dict[str, Any], tuple[Any, ...]]]:
    """Chat requests of the explanations, and their edits."""
    bodies = [r for r in server.requests if "the word" in str(r.get("messages"))]
    return [
        (b, (parse_extra_args(b.get("vllm_xargs")) or LensRequest()).edits)
        for b in bodies
        if "max_tokens" in b
    ]


def test_a_row_takes_the_place_of_every_placeholder(server: FakeLensServer, model: Model) -> None:
    async def run() -> Any:
        output = await answered(model)
        return output, await explain_rows(
            output, PROMPT, model=model, layers=[2, 3], into=1, repeat=2
        )

    output, found = anyio.run(run)
    handle = activations(output)
    assert handle is not None
    last = handle.n_prompt + handle.n_completion - 2  # of the rows that were read
    assert [(a.layers, a.positions) for a in found] == [((2,), (last,)), ((3,), (last,))]
    assert [tuple(a.controls) for a in found] == [("text_only", "shuffled", "random")] * 2
    bodies = sent(server)
    # Without a row the prompt is answered once, whatever the number of rows.
    assert [len(edits) for _, edits in bodies].count(0) == 1
    assert len(bodies) == 1 + 2 * 3
    draw = (0, _crc(handle))
    wanted = []
    for layer in (2, 3):
        row = handle.numpy()[handle.layers.index(layer), last][np.newaxis]
        wanted += [row, shuffled_rows(row, seed=draw), random_rows(row, seed=draw)]
    for body, edits in bodies:
        assert body["messages"] == [{"role": "user", "content": "the word ? ? means"}]
        assert body["temperature"] == 0
        for edit in edits:
            assert isinstance(edit, Replace)
            assert edit.layers == (1,)
            # Words of the fake server: <user>, the, word, ?, ?, means.
            assert edit.positions == (3, 4)
            twice = edit.rows.to_float32()
            assert np.array_equal(twice[0, 0], twice[0, 1])
    rows = [edits[0].rows.to_float32()[0, :1] for _, edits in bodies if edits]
    for row in wanted:
        assert sum(np.array_equal(row, other) for other in rows) == 1


def test_by_default_the_middle_layer_explains_itself_at_its_own_place(
    server: FakeLensServer, model: Model
) -> None:
    async def run() -> Any:
        return await explain_rows(
            await answered(model, [0, 1, 3]), PROMPT, model=model, controls=False
        )

    (answer,) = anyio.run(run)
    assert answer.layers == (1,)
    assert answer.facts["into"] == 1
    ((_, (edit,)),) = sent(server)
    assert edit.layers == (1,)


def test_every_token_is_explained_and_kept_in_the_log(
    server: FakeLensServer, model: Model, tmp_path: Any
) -> None:
    task = Task(
        dataset=[Sample(input="tell me")],
        solver=[with_capture([2]), self_explain(PROMPT, last=None, controls=["text_only"])],
    )
    (log,) = eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    (sample,) = log.samples or []
    kept = sample.metadata["self_explain"]
    assert sample.store["self_explain"] == kept
    assert len(kept) == 2
    assert {tuple(a["controls"]) for a in kept} == {("text_only",)}
    (table,) = [e.data for e in sample.events if e.event == "info"]
    text = sample.attachments[str(table).removeprefix("attachment://")]
    assert text.startswith("| question | token | answer | text only |")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prompt": "no place"}, "write {} once"),
        ({"prompt": "a ? b{}"}, "stands nowhere else"),
        ({"start": "so ? it"}, "stands nowhere else"),
        ({"repeat": 0}, "^repeat=0; allowed are integers of 1 or more"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"layers": [1, 1]}, "different layers"),
        ({"layers": []}, "at least one"),
        ({"into": -1}, "into=-1"),
        ({"source": "memory"}, "allowed are"),
        ({"controls": "none"}, "controls="),
        ({"last": 0}, "last=0"),
    ],
)
def test_wrong_arguments_are_refused_before_any_sample(arguments: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        self_explain(**{"prompt": PROMPT, **arguments})


def test_what_cannot_be_explained_says_why(model: Model) -> None:
    async def nothing_captured() -> None:
        output = await model.generate([ChatMessageUser(content="tell me")])
        await explain_rows(output, PROMPT, model=model)

    async def split() -> None:
        await explain_rows(await answered(model), PROMPT, model=model, placeholder=" two words")

    with pytest.raises(SpecError, match="name a layer"):
        anyio.run(nothing_captured)
    with pytest.raises(ArtifactError, match="is 2 tokens"):
        anyio.run(split)


def test_of_a_prompt_the_words_of_its_user_are_explained(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat template ends every prompt alike; the row there was the same for all of them."""

    async def run() -> Any:
        output = await answered(model)
        handle = activations(output)
        assert handle is not None
        first, *_, last = handle.prompt_token_ids
        pieces = {first: "<|user|>", last: "<|end|>"}
        known = SimpleNamespace(
            decode=lambda ids: pieces.get(ids[0], " word"),
            piece=lambda token: "",
            marks=frozenset(pieces),
        )
        monkeypatch.setattr(TokenTexts, "of", lambda _: TokenTexts(known))  # type: ignore[arg-type]
        assert handle.n_prompt > 2
        found = await explain_rows(
            output, PROMPT, model=model, layers=2, positions="prompt", last=1, controls=False
        )
        return handle, found

    handle, (answer,) = anyio.run(run)
    assert answer.positions == (handle.n_prompt - 2,)
    assert answer.facts["token"] == " word"
    assert f"| {handle.n_prompt - 2} word |" in answer_table([answer])
