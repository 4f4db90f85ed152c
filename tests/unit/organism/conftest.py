from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from organism._corpus import Example, training_examples
from organism._model import load_tokenizer
from organism._tokenizer import corpus_texts, save_tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def corpus() -> list[Example]:
    return list(training_examples(12_000))


@pytest.fixture(scope="session")
def raw_tokenizer(corpus: list[Example]) -> Tokenizer:
    return train_tokenizer(corpus_texts(corpus[:1500]))


@pytest.fixture(scope="session")
def tokenizer(
    raw_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedTokenizerFast:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(raw_tokenizer, directory)
    return load_tokenizer(directory)
