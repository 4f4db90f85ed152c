"""`-M edits` on tasks of `inspect_evals`, whose code stays as it is; skipped without it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset
from inspect_ai.event import ModelEvent
from inspect_ai.model import get_model

from inspect_lens.spec import Add, parse_extra_args
from tests.kit.fake_server import FakeLensServer

pytest.importorskip("inspect_evals", reason="inspect_evals is no dependency; install it beside")

EDITS = [{"op": "add", "vector": [1.0] * 8, "layers": [1], "scale": 2.0}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "boolq": [
        {"passage": f"{i} is small.", "question": f"Is {i} small?", "answer": True}
        for i in range(3)
    ],
    "squad": [
        {"id": str(i), "context": f"{i} is small.", "question": "How?", "title": "t",
         "answers": {"text": ["small"]}}
        for i in range(3)
    ],
    "gsm8k": [
        {"question": f"What is {i} and 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"}
        for i in range(3)
    ],
}  # fmt: skip


def task_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Task:
    """The task as it is published, on rows of our own instead of those of the hub."""
    module = importlib.import_module(f"inspect_evals.{name}.{name}")

    def local(*_: Any, sample_fields: Any, **__: Any) -> MemoryDataset:
        return MemoryDataset([sample_fields(row) for row in ROWS[name]], name=name)

    monkeypatch.setattr(module, "hf_dataset", local)
    made: Task = getattr(module, name)(**({"fewshot": 0} if name == "gsm8k" else {}))
    return made


@pytest.mark.parametrize("name", sorted(ROWS))
def test_an_unchanged_task_is_edited_in_every_call(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("edits.json").write_text(json.dumps(EDITS))
    with FakeLensServer() as server:
        for given in ({}, {"edits": "edits.json"}):
            before = len(server.requests)
            model = get_model("lens/org/tiny", base_url=server.url, memoize=False, **given)
            (log,) = eval(task_of(name, monkeypatch), model=model, display="none", log_dir="logs")
            assert log.status == "success", log.error
            asked = [parse_extra_args(r.get("vllm_xargs") or {}) for r in server.requests[before:]]
            assert len(asked) == 3
            for request in asked:
                edits = () if request is None else request.edits
                assert [type(edit) for edit in edits] == ([Add] if given else [])
            assert ("edits" in log.eval.model_args) == bool(given)
            assert log.samples is not None
            for sample in log.samples:
                (event,) = [e for e in sample.events if isinstance(e, ModelEvent)]
                said = json.dumps(event.model_dump(mode="json", include={"config"}))
                assert ('"op": "add"' in said) == bool(given), "each call of the log says so"
