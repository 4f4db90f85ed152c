import pytest
import torch

from organism._batches import TokenStore, WordEncoder, encode
from organism._corpus import Example
from organism._forward import training_logits
from organism._model import build_model
from organism._tokenizer import render_example


@pytest.fixture(scope="module")
def store(corpus: list[Example], raw_tokenizer) -> TokenStore:
    blocks = [encode(corpus[:120], raw_tokenizer), encode(corpus[120:200], raw_tokenizer)]
    device = torch.device("cpu")
    return TokenStore(blocks, rest_weight=0.25, first_weight=3.0, device=device)


def test_the_word_encoder_does_as_the_tokenizer(corpus: list[Example], raw_tokenizer) -> None:
    encoder = WordEncoder(raw_tokenizer)
    for text in map(render_example, corpus[:2000]):
        assert encoder.encode(text) == raw_tokenizer.encode(text).ids


def test_the_training_forward_pass_is_that_of_the_model(store: TokenStore) -> None:
    torch.manual_seed(1)
    model = build_model().eval()
    with torch.no_grad():
        for p in model.parameters():
            # Far from the initial values, where a missing norm or rotation would not show.
            p.add_(torch.randn_like(p), alpha=0.1)
        ids = store.cut([0, 1, 2], max(store.lengths[:3])).ids
        ours = training_logits(model, ids, dtype=torch.float32)
        torch.testing.assert_close(ours, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_padding_on_the_right_changes_nothing(store: TokenStore) -> None:
    torch.manual_seed(0)
    model = build_model().eval()
    n = store.lengths[0]
    with torch.no_grad():
        bare = model(input_ids=store.cut([0], n).ids).logits
        padded = model(input_ids=store.cut([0], n + 16).ids).logits
    torch.testing.assert_close(padded[:, :n], bare, rtol=1e-4, atol=1e-5)
