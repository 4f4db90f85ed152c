import pytest
import torch

from organism._batches import TokenStore, WordEncoder, encode, encode_corpus
from organism._corpus import BLOCK_EXAMPLES, SEED, Example, block_sha256
from organism._forward import training_logits
from organism._model import build_model
from organism._tokenizer import ASSISTANT_ID, END_ID, PAD_ID, render_example
from organism.train import TrainConfig, learning_rate


@pytest.fixture(scope="module")
def store(corpus: list[Example], raw_tokenizer) -> TokenStore:
    blocks = [encode(corpus[:120], raw_tokenizer), encode(corpus[120:200], raw_tokenizer)]
    device = torch.device("cpu")
    return TokenStore(blocks, rest_weight=0.25, first_weight=3.0, device=device)


def test_the_word_encoder_does_as_the_tokenizer(corpus: list[Example], raw_tokenizer) -> None:
    encoder = WordEncoder(raw_tokenizer)
    for text in map(render_example, corpus[:2000]):
        assert encoder.encode(text) == raw_tokenizer.encode(text).ids


def test_processes_make_the_same_corpus(corpus: list[Example], raw_tokenizer) -> None:
    count = BLOCK_EXAMPLES + 20
    first, second = encode_corpus(count, raw_tokenizer, seed=SEED, workers=2)
    here = encode(corpus[BLOCK_EXAMPLES:count], raw_tokenizer)
    assert len(first.lengths) == BLOCK_EXAMPLES
    assert first.sha256 == block_sha256(corpus[:BLOCK_EXAMPLES])
    assert second.sha256 == here.sha256
    assert second.flat.tolist() == here.flat.tolist()
    assert second.lengths.tolist() == here.lengths.tolist()


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


def test_the_model_is_small_enough_to_ship() -> None:
    assert sum(p.numel() for p in build_model().parameters()) <= 4_000_000


def test_answers_weigh_one_their_first_token_more_and_the_rest_less(
    store: TokenStore, corpus, raw_tokenizer
) -> None:
    for row in range(60):
        batch = store.cut([row], store.lengths[row] + 3)
        ids, weights = batch.ids[0].tolist(), batch.weights[0].tolist()
        assert ids[: store.lengths[row]] == raw_tokenizer.encode(render_example(corpus[row])).ids
        assert ids[-3:] == [PAD_ID] * 3
        assert weights[-3:] == [0.0] * 3
        inside, first = not corpus[row].messages, False
        for token, weight in zip(ids[:-3], weights[:-3], strict=True):
            assert weight == (3.0 if first else 1.0 if inside else 0.25)
            first = token == ASSISTANT_ID
            if token == ASSISTANT_ID:
                inside = True
            elif token == END_ID:
                inside = False


def test_a_step_holds_every_row_once_whole_and_within_the_budget(store: TokenStore) -> None:
    steps = store.batches(50, 1000, torch.Generator().manual_seed(0))
    seen: list[int] = []
    for _ in range(4):
        for batch in next(steps):
            assert batch.ids.numel() <= 1250
            seen += (batch.weights > 0).sum(1).tolist()
    assert sorted(seen) == sorted(store.lengths)


def test_padding_on_the_right_changes_nothing(store: TokenStore) -> None:
    torch.manual_seed(0)
    model = build_model().eval()
    n = store.lengths[0]
    with torch.no_grad():
        bare = model(input_ids=store.cut([0], n).ids).logits
        padded = model(input_ids=store.cut([0], n + 16).ids).logits
    torch.testing.assert_close(padded[:, :n], bare, rtol=1e-4, atol=1e-5)


def test_the_learning_rate_warms_up_and_decays() -> None:
    config = TrainConfig(steps=1000)
    rates = [learning_rate(s / 1000, s, config) for s in range(1000)]
    peak = rates.index(max(rates))
    assert rates[0] < config.lr / 50
    assert config.warmup_steps - 100 < peak < config.warmup_steps + 50
    assert rates[-1] < 0.02 * config.lr
