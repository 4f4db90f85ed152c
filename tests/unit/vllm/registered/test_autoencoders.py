"""Autoencoders by name: looked up for requests of all tiers, judged, bounded, and shared."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from inspect_lens._engine.protocol.messages import SPLICED_KEY, seal
from inspect_lens._engine.readout.logit_lens import LensStore
from inspect_lens._settings import Settings
from inspect_lens._vllm.compat import features
from inspect_lens._vllm.frontend.state import FrontEnd
from inspect_lens._vllm.registered.contents import (
    WorkerContents,
    compose,
    parse_item,
    parse_shared,
    read_kept,
    start_items,
)
from inspect_lens._vllm.registered.registry import Registry
from inspect_lens._vllm.registered.shared_names import SharedNames
from inspect_lens._vllm.worker import worker
from inspect_lens.errors import CapacityError, SpecError, UnsupportedError
from inspect_lens.sae import SparseAutoencoder
from inspect_lens.spec import (
    EngineAutoencoder,
    EngineConfig,
    EngineEdits,
    LensRequest,
    Splice,
    check_engine_autoencoder,
    check_request,
)
from tests.kit.edit_cases import WIDTH, random_rows
from tests.kit.edit_table import N_PROMPT, facts


def form(seed: int = 0, width: int = WIDTH) -> EngineAutoencoder:
    rows, bias = random_rows(seed, 30, width), random_rows(seed + 1, 1, 30)[0]
    base = random_rows(seed + 2, 1, width)[0]
    return SparseAutoencoder(
        weight=rows, bias=bias, decoder=rows, decoder_bias=base, hook="blocks.1.hook_resid_post"
    ).for_engine()


def asking(**options: object) -> LensRequest:
    return LensRequest.model_validate(
        {"edits": [{"op": "splice", "sae": "mine", "layers": [1], **options}]}
    )


def test_requests_and_configurations_get_what_the_name_stands_for_and_their_own_blocks() -> None:
    one, other = form(), form(5)
    registry, salts, named = Registry({"mine": one}), set(), set()
    for item, options in ((one, {}), (one, {"latents": {"3": 0.0}}), (other, {})):
        registry.add("mine", item, replace=True, reference="r")
        composed, _ = compose(registry, asking(**options))
        check_request(composed, facts())
        sealed = seal(composed, facts(), reply="here", n_prompt=N_PROMPT, max_tokens=4)
        assert sealed.edited.autoencoders == (item.sha256,)
        assert sealed.pack()[SPLICED_KEY] > N_PROMPT
        salts.add(sealed.steer_hash)
        named.add(sealed.edited.hashes)
    assert len(salts) == 3, "another content is another key of the cache"
    assert len(named) == 3, "receipts tell apart what does different things"
    config = EngineConfig(edits=[Splice(sae="mine", layers=[2])])
    registry.add("whole", config)
    composed, _ = compose(registry, LensRequest(configs=["whole"]))
    assert composed.edits[0].content == other.sha256
    with pytest.raises(SpecError, match="'mine' is used by the configuration 'whole'"):
        registry.remove("mine")
    with pytest.raises(SpecError, match="no sae is registered as 'nobody'"):
        registry.add("other", EngineConfig(edits=[Splice(sae="nobody", layers=[2])]))
    with pytest.raises(SpecError, match="no lens is registered as 'mine'"):
        registry.resolve(LensRequest(lens={"name": "mine"}))


def test_what_registered_edits_name_stays_behind_configurations_too() -> None:
    hashes = set()
    for item in (form(), form(5)):
        registry = Registry({"mine": item})
        registry.add("listed", EngineEdits(edits=[Splice(sae="mine", layers=[1])]))
        registry.add("conf", EngineConfig(edits_named=[{"name": "listed"}]))
        hashes.add(registry.sha256_of(registry.config("conf")))
        with pytest.raises(SpecError, match="'mine' is used by the edits 'listed'"):
            registry.add("mine", form(9), replace=True, reference="r")
        with pytest.raises(SpecError, match="'mine' is used by the edits 'listed'"):
            registry.remove("mine")
        with pytest.raises(SpecError, match="no sae is registered as 'nobody'"):
            registry.add("other", EngineEdits(edits=[Splice(sae="nobody", layers=[1])]))
        for name in ("conf", "listed", "mine"):
            registry.remove(name)
    assert len(hashes) == 2, "a configuration does what the autoencoder of its edits does"


def test_what_does_not_fit_is_refused_before_it_costs_anything() -> None:
    with pytest.raises(SpecError, match=f"rows of width {WIDTH + 1}; m has rows of these widths"):
        check_engine_autoencoder(form(width=WIDTH + 1), facts())
    n = facts().n_layers
    with pytest.raises(SpecError, match=f"layer {n}; m has layers 0 to {n - 1}"):
        check_engine_autoencoder(form().model_copy(update={"layers": (0, n)}), facts())
    for wrong in (-1, 1 << 31, 10**30):
        with pytest.raises(ValueError, match=r"layers \(-?\d+,\)"):
            EngineAutoencoder(kind="relu", layers=(wrong,), tensors=form().tensors)
    registry = Registry({"mine": form()})
    with pytest.raises(SpecError, match=r"edits\[0\]\.latents: 30; .* has 0 to 29"):
        compose(registry, asking(latents={"30": 1.0}))
    two = asking().model_copy(update={"edits": (*asking().edits, *asking(layers=[0, 1]).edits)})
    with pytest.raises(SpecError, match=r"edits\[1\]: a second autoencoder at resid_post of layer"):
        check_request(compose(registry, two)[0], facts())
    small = Registry({}, Settings(lens_bytes=form().nbytes))
    small.add("one", form())
    with pytest.raises(CapacityError, match=r"sae 'two' has .* INSPECT_LENS_LENS_BYTES"):
        small.add("two", form(5))


def test_it_travels_whole_to_workers_and_as_an_entry_to_other_front_ends(tmp_path: Path) -> None:
    item = form()
    wire = item.model_dump(mode="json")
    name, sent = parse_item({"name": "mine", "sae": wire})
    assert isinstance(sent, EngineAutoencoder)
    assert (name, sent.sha256) == ("mine", item.sha256)
    found = read_kept(wire)
    assert isinstance(found, EngineAutoencoder)
    assert found.sha256 == item.sha256
    path = tmp_path / "sae.json"
    path.write_text(json.dumps({"sae": wire}))
    started = start_items(f"mine={path}")["mine"]
    assert isinstance(started, EngineAutoencoder)
    assert started.sha256 == item.sha256

    class Store:
        def __init__(self) -> None:
            self.known: list[str] = []

        def add(self, item: EngineAutoencoder) -> None:
            self.known.append(item.sha256)

        def remove(self, sha256: str) -> None:
            self.known.remove(sha256)

    lenses = Store()
    contents = WorkerContents(Store(), lenses)
    contents.add("r", item)
    assert lenses.known == [item.sha256]
    contents.remove("r")
    assert lenses.known == []
    first, second = Registry({"mine": item}), Registry()
    first.share(SharedNames(tmp_path / "names", parse_shared))
    second.share(SharedNames(tmp_path / "names", parse_shared))
    assert second.describe()["mine"] == item.entry.reference()
    composed, _ = compose(second, asking())
    assert composed.edits[0].content == item.sha256
    with pytest.raises(ValueError, match="top_k"):
        EngineAutoencoder(kind="topk", tensors=item.tensors)
    ones = np.ones((2, WIDTH))
    with pytest.raises(ValueError, match=r"tensors.bias has shape"):
        EngineAutoencoder(
            kind="relu",
            tensors={"encoder": ones, "bias": ones, "decoder": ones, "decoder_bias": ones[0]},
        )


def test_an_unknown_autoencoder_is_told_with_the_edit_that_names_it() -> None:
    registry = Registry({"mine": form()})
    known, unknown = asking().edits[0], Splice(sae="nobody", layers=[0])
    with pytest.raises(SpecError, match=r"^edits\[1\]\.sae: no sae is registered as 'nobody'"):
        compose(registry, LensRequest(edits=[known, unknown]))
    registry.add("config", EngineConfig(edits=[known]))
    registry._items["config"] = EngineConfig(edits=[known, unknown])
    with pytest.raises(SpecError, match=r"^configs: 'config': edits\[1\]\.sae: no sae"):
        compose(registry, LensRequest(configs=["config"]))


def test_what_cannot_splice_refuses_an_autoencoder_when_it_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    front = FrontEnd()
    front.engines = [facts()]
    edits = EngineEdits(edits=[Splice(sae="mine", layers=[1])])
    front.register("mine", form(), reference="r")
    front.check("edits", edits)
    with monkeypatch.context() as patch:
        patch.setattr(features._Off, "reasons", {"splice": "no graphs"})
        for item in (form(5), edits, EngineConfig(edits=edits.edits)):
            with pytest.raises(UnsupportedError, match=r"whole autoencoders: off .* no graphs"):
                front.check("other", item)
        with pytest.raises(UnsupportedError, match=r"whole autoencoders: off .* no graphs"):
            front.compile(asking(), facts())
    store = LensStore(torch.device("cpu"))
    store.refusals[EngineAutoencoder] = "this vLLM has no place for it"
    runner = SimpleNamespace(
        inspect_lens=SimpleNamespace(lenses=store), inspect_lens_kept=WorkerContents(store, store)
    )
    sent = form().model_dump(mode="json")
    answer = worker.register(SimpleNamespace(model_runner=runner), "r", sent)
    assert answer == "UnsupportedError: autoencoder: this vLLM has no place for it"
    assert not store.nbytes
