"""An image before the text: positions are those of the prompt that the model saw."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText, get_model
from PIL import Image

from inspect_lens._base.token_texts import TokenTexts
from inspect_lens.client import LensClient
from inspect_lens.engine import register
from inspect_lens.errors import LensError, UnsupportedError
from inspect_lens.model import activations, lens_config, recapture, token_logprobs
from inspect_lens.spec import Add, CaptureSpec, EngineProbe, result_name
from tests.engine.conftest import Engine
from tests.engine.test_capture import fed
from tests.kit.api_server import api_server
from tests.kit.reference import HuggingFace, max_relative_error
from tests.kit.tiny_models import tiny_idefics3

pytestmark = pytest.mark.engine

SITES = ("resid_pre", "attn_out", "mlp_out", "resid_post")
QUESTION = "The quick brown fox is here"
PROMPT = f"<|user|><image>{QUESTION}<|end|><|assistant|>"
MARK, GLOBAL, PLACE = 1025, 1026, 1024
"""Tokens around an image, behind the first of these, and where the image is."""
IMAGE = [MARK, GLOBAL, PLACE, PLACE, PLACE, PLACE, MARK]
LIMIT = 1e-4
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
}


@pytest.fixture(scope="module")
def image() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 48, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_idefics3(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def reference(folder: Path, image: Image.Image) -> HuggingFace:
    from transformers import AutoProcessor

    made = HuggingFace(folder, "model.text_model.layers", is_text=False)
    processor: Any = AutoProcessor.from_pretrained(folder)
    given = processor(text=PROMPT, images=[image], return_tensors="pt")
    assert given["input_ids"][0, 1 : 1 + len(IMAGE)].tolist() == IMAGE
    made.media = {name: given[name] for name in ("pixel_values", "pixel_attention_mask")}
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    from vllm import LLM

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        environment.setenv("INSPECT_LENS_SITES", ",".join(SITES))
        # The image lies across two steps.
        made = Engine(LLM(model=str(folder), max_num_batched_tokens=32, **OPTIONS))
    yield made
    made.close()


def ask(engine: Engine, prompt: dict[str, Any], lens: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=5, temperature=0, extra_args={"inspect_lens": lens})
    (output,) = engine.llm.generate([prompt], params, use_tqdm=False)
    return output


def test_rows_edits_and_probes_of_an_engine(
    engine: Engine, reference: HuggingFace, image: Image.Image
) -> None:
    prompt = {"prompt": PROMPT, "multi_modal_data": {"image": image}}
    register(engine.llm, "p", EngineProbe(layers=(2,), tensors={"weight": np.ones((1, 128), "f")}))
    scored = {"name": "p", "positions": "all", "tokens": True}
    plain = ask(engine, prompt, {"capture": {"site": list(SITES)}, "probes": [scored]})
    assert plain.prompt_token_ids[1 : 1 + len(IMAGE)] == IMAGE
    expected = reference.sites(fed(plain))
    for site in SITES:
        rows = plain.activations[result_name(site)]  # type: ignore[arg-type]
        assert max_relative_error(rows, expected[site]) <= LIMIT, site
    (receipt,) = plain.inspect_lens.probes
    assert list(receipt.tokens) == pytest.approx(
        expected["resid_post"][2].sum(dim=-1).tolist(), abs=1e-2
    )
    v = 3 * torch.randn(128, generator=torch.Generator().manual_seed(1))
    # On the image, and behind it; what is found by its text is behind it, too.
    behind = plain.prompt_token_ids.index(PLACE) + 7
    for positions, where in (([4], [4]), ([behind], [behind]), ({"pattern": "quick"}, [9, 10])):
        edit = Add(vector=v.numpy(), layers=[1], positions=positions).model_dump(mode="json")
        steered = ask(engine, prompt, {"capture": {}, "edits": [edit]})

        def added(h: torch.Tensor, where: list[int] = where) -> torch.Tensor:
            h[where] += v
            return h

        edited = reference.residual_stream(fed(steered), {1: added})
        assert max_relative_error(steered.activations["residual_stream"], edited) <= LIMIT
    # vLLM puts the tokens of an image where token ids have one.
    ids = [2, PLACE, *plain.prompt_token_ids[1 + len(IMAGE) :]]
    last = {"capture": {"positions": [len(plain.prompt_token_ids) - 1]}}
    again = ask(engine, {"prompt_token_ids": ids, "multi_modal_data": {"image": image}}, last)
    assert (
        max_relative_error(
            again.activations["residual_stream"],
            expected["resid_post"][:, [len(plain.prompt_token_ids) - 1]],
        )
        <= LIMIT
    )
    with pytest.raises(UnsupportedError, match="token 1024 at position 3 stands for an image"):
        ask(engine, {"prompt_token_ids": plain.prompt_token_ids}, {"capture": {}})


def test_a_chat_over_http_and_inspect(
    folder: Path, reference: HuggingFace, image: Image.Image, tmp_path: Path
) -> None:
    png = io.BytesIO()
    image.save(png, "png")
    url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
    environment = {"INSPECT_LENS_SITES": "resid_post"}
    with api_server(
        {"model": str(folder), "served_model_name": "tiny", **OPTIONS},
        environment=os.environ | environment,
        log=tmp_path / "server.log",
        preloaded=True,
    ) as server:
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": QUESTION},
        ]
        with LensClient(server.url) as client:
            output = client.chat(
                [{"role": "user", "content": content}], max_tokens=5, capture=CaptureSpec()
            )
            check(output.prompt_token_ids, output.token_ids, output.activations, reference)
            with pytest.raises(LensError, match="stands for an image"):
                client.generate(output.prompt_token_ids, capture=CaptureSpec())
        model = get_model("vllm-lens/tiny", base_url=f"{server.url}/v1", api_key="none")
        message = ChatMessageUser(content=[ContentImage(image=url), ContentText(text=QUESTION)])

        async def through_inspect() -> None:
            config = lens_config(capture=[0, 1, 2, 3], max_tokens=5, temperature=0.0)
            answer = await model.generate([message], config=config)
            handle = activations(answer)
            assert handle is not None
            check(handle.prompt_token_ids, handle.token_ids, handle, reference)
            ids = {"prompt_token_ids": handle.prompt_token_ids, "token_ids": handle.token_ids}
            with pytest.raises(LensError, match="stands for an image"):
                await recapture(model, **ids, layers=[2])
            with pytest.raises(LensError, match="stands for an image"):
                await token_logprobs(model, **ids)

        anyio.run(through_inspect)


def check(prompt: Any, completion: Any, found: Any, reference: HuggingFace) -> None:
    """Rows are those of transformers, of the tokens that the answer names."""
    ids, rows = [*prompt, *completion], torch.tensor(found.numpy())
    texts = TokenTexts.of("", tokenizer=str(reference.model.name_or_path)).texts(ids)
    assert [i for i, text in enumerate(texts) if text == "<image>"] == [4, 5, 6, 7]
    expected = reference.residual_stream(ids[: rows.shape[1]])
    assert rows.shape == expected.shape
    assert max_relative_error(rows, expected) <= LIMIT
