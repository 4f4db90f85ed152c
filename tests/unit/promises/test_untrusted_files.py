"""A stranger's file is judged before it costs, by every public function that loads one."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import pkgutil
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from inspect_ai.scorer import Score
from safetensors.numpy import save

import inspect_lens
from inspect_lens._base import artifact
from inspect_lens._base.untrusted import parse_yaml
from inspect_lens.attention import import_heads, load_heads
from inspect_lens.data import (
    ActivationStore,
    Recording,
    load_dataset,
    read_layer,
    read_records,
    read_rows,
    read_whole,
)
from inspect_lens.data._store import STORE_FORMAT
from inspect_lens.errors import ArtifactError, LensError
from inspect_lens.lens import import_lens, load_lens
from inspect_lens.model import _places, activations, know_log, read_vector
from inspect_lens.model._handle import REFERENCE
from inspect_lens.model._read import read_sidecar
from inspect_lens.model._scores import SCORES_REFERENCE, ProbeScores
from inspect_lens.oracle import load_oracle, read_reconstructor, read_verbaliser
from inspect_lens.oracle._load import read_config
from inspect_lens.probe import Probe, import_probe, load_probe
from inspect_lens.sae import read_autoencoder, read_sae
from inspect_lens.train import ActivationSet
from inspect_lens.vector import Vector, import_vector, load_vector
from inspect_lens.view._series import choose_probes
from tests.kit.promises import Promise

MIB = 1 << 20
DEEP = "[" * 200_000
LIVE = {"read_given", "read_probe", "read_cascade", "read_results"}
"""These read answers, or logs through functions of the list."""


def _loaders() -> Iterator[str]:
    for module in pkgutil.iter_modules(inspect_lens.__path__):
        if module.name.startswith("_") or module.name in ("reading", "spec"):
            continue  # those read calls and instructions, not files
        found = importlib.import_module(f"inspect_lens.{module.name}")
        for name in getattr(found, "__all__", ()):
            thing = getattr(found, name)
            if name.startswith(("load_", "read_", "import_")) and name not in LIVE:
                yield f"{thing.__module__.split('.')[1]}.{name}"
            elif inspect.isclass(thing):
                own = (m for m in ("load", "open") if m in vars(thing))
                yield from (f"{module.name}.{name}.{m}" for m in own)


PROMISE = Promise("a stranger's file is judged before it costs", surfaces=_loaders())


def judged(call: Callable[[], object], *, most: int = 8 * MIB) -> None:
    """Refused by an error of ours, at a price that the file's own size explains."""
    tracemalloc.start()
    try:
        with pytest.raises(LensError):
            call()
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def pipe(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def overlapping(n: int = 4000, size: int = MIB) -> bytes:
    """A safetensors file whose entries all name the same bytes."""
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    text = json.dumps({f"t{i}": entry for i in range(n)}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def deep_header() -> bytes:
    return len(DEEP).to_bytes(8, "little") + DEEP.encode()


def gguf(n: int, size: int) -> bytes:
    """A GGUF file whose entries all name the same bytes."""
    head = b"GGUF" + struct.pack("<IQQ", 3, n, 0)
    for i in range(n):
        name = f"direction.{i}".encode()
        head += struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, size // 4, 0, 0)
    return head + bytes(-len(head) % 32) + bytes(size)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a:\n  b: SECRET: x", "mapping values are not allowed here in line 2, column 12"),
        (b"a: SECRET\xff", "invalid start byte"),
        ("[" * 100_000, "YAML is nested too deeply"),
    ],
)
def test_what_is_wrong_with_yaml_is_said_without_the_line(text: str | bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        parse_yaml(text)
    assert "SECRET" not in str(caught.value)


@PROMISE.on("oracle.read_verbaliser")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    file = request.getfixturevalue("tmp_path") / "nla_meta.yaml"

    def load(text: str) -> Callable[[], object]:
        file.write_text(text)
        return lambda: read_verbaliser(file)

    judged(load("kind: nla_model\n"))
    judged(load("[" * 100_000))
    judged(load("a: &a [x, x, x, x]\n" + "".join(
        f"{n}: &{n} [*{p}, *{p}, *{p}, *{p}, *{p}, *{p}, *{p}, *{p}]\n"
        for p, n in zip("abcdefghij", "bcdefghijk", strict=True)
    ) + "kind: *k\n"))  # fmt: skip
    judged(load("x" * (4 * MIB)))
    judged(lambda: read_verbaliser(pipe(file)))


@PROMISE.on("oracle.read_reconstructor")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("tmp_path")
    meta, head = folder / "nla_meta.yaml", folder / "value_head.safetensors"
    meta.write_text("[" * 100_000)
    judged(lambda: read_reconstructor(folder))
    for width in (64, 1 << 14, 1 << 40):
        meta.write_text(
            f"kind: nla_model\nrole: ar\nd_model: {width}\nextraction_layer_index: 1\n"
            "prompt_templates: {ar: 'of {explanation}'}\n"
        )
        for content in (overlapping(), deep_header(), b"\xff" * 64, save({"w": np.ones(3)})):
            head.write_bytes(content)
            judged(lambda: read_reconstructor(folder))
    judged(lambda: read_reconstructor(pipe(head).parent))


@PROMISE.on("vector.import_vector")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("tmp_path")

    def load(name: str, content: bytes) -> Callable[[], object]:
        (folder / name).write_bytes(content)
        return lambda: import_vector(folder / name, name="a/b", layer=4)

    judged(load("overlapping.gguf", gguf(4000, MIB)))
    endless = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 0, 1 << 60)
    judged(load("endless.gguf", endless))
    judged(load("deep.svec", DEEP.encode()))
    judged(load("overlapping.safetensors", overlapping()))
    torch = pytest.importorskip("torch")
    for value in (
        torch.zeros(1).expand(1 << 30),
        {i: torch.zeros(MIB // 4) for i in range(4)} | {"x": torch.zeros(1).expand(1 << 26)},
        torch.sparse_coo_tensor([[0]], [1.0], (1 << 40,)),
    ):
        torch.save(value, folder / "wide.pt")
        judged(lambda: import_vector(folder / "wide.pt", name="a/b", layer=4, format="ibm"))
    bomb = folder / "bomb.pt"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", bytes(256 * MIB))
    judged(lambda: import_vector(bomb, name="a/b"))
    judged(lambda: import_vector(pipe(folder / "pipe.gguf"), name="a/b"))


@PROMISE.on("probe.import_probe", "lens.import_lens")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("tmp_path")
    torch = pytest.importorskip("torch")

    def load(path: Path) -> object:
        if surface == "lens.import_lens":
            return import_lens(path, name="a/b")
        return import_probe(path, name="a/b", kind="apollo")

    wide = torch.zeros(1).expand(1 << 30)
    for content in (
        {"J": {0: wide.expand(1, -1)}, "d_model": 1 << 30},
        {"state_dict": {"direction": wide, "threshold": wide[0]}, "hyperparams": {"layer": 1}},
        {"class": "MassMean", "init_kwargs": {}, "state_dict": {"direction": wide}},
        torch.sparse_coo_tensor([[0]], [1.0], (1 << 40,)),
    ):
        torch.save(content, folder / "wide.pt")
        judged(lambda: load(folder / "wide.pt"))
    bomb = folder / "bomb.pt"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", bytes(256 * MIB))
    judged(lambda: load(bomb))
    judged(lambda: load(pipe(folder / "pipe.pt")))


@PROMISE.on("sae.read_sae", "sae.read_autoencoder")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("tmp_path")
    read: Any = read_sae if surface.endswith("read_sae") else read_autoencoder
    file = folder / "params.npz"
    zeros = np.zeros((256, MIB // 4), np.float32)
    np.savez_compressed(file, W_enc=zeros, b_enc=zeros[0], threshold=zeros[0])
    assert file.stat().st_size < 2 * MIB
    judged(lambda: read(file))
    lying = np.lib.format.magic(1, 0) + struct.pack("<H", 118)
    lying += b"{'descr': '<f4', 'fortran_order': False, 'shape': (1073741824,)}".ljust(117) + b"\n"
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("W_enc", "b_enc", "threshold"):
            archive.writestr(f"{name}.npy", lying)
    judged(lambda: read(file))
    file.write_bytes(b"PK\3\4" + bytes(100))
    judged(lambda: read(file))
    judged(lambda: read(pipe(file)))
    weights = folder / "sae_weights.safetensors"
    weights.write_bytes(save({"W_enc": np.zeros((2, 2), np.float32)}))
    (folder / "cfg.json").write_text(DEEP)
    judged(lambda: read(folder))
    (folder / "cfg.json").write_text("{}")
    weights.write_bytes(overlapping())
    judged(lambda: read(folder))


def artefact(load: Callable[[Path], object], tensors: str, folder: Path) -> None:
    """Folders with a safetensors file and a card."""
    (folder / tensors).write_bytes(save({"x": np.zeros(2, np.float32)}))
    for card in (DEEP, json.dumps({"format": 1}), "null"):
        (folder / "card.json").write_text(card)
        judged(lambda: load(folder))
    (folder / tensors).write_bytes(deep_header())
    judged(lambda: load(folder))
    pipe(folder / "card.json")
    judged(lambda: load(folder))
    pipe(folder / tensors)
    judged(lambda: load(folder))


@PROMISE.on(
    "probe.load_probe", "probe.Probe.load", "vector.load_vector", "vector.Vector.load",
    "lens.load_lens",
)  # fmt: skip
def _(surface: str, request: pytest.FixtureRequest) -> None:
    load: Any = {
        "probe.load_probe": load_probe, "probe.Probe.load": Probe.load,
        "vector.load_vector": load_vector, "vector.Vector.load": Vector.load,
        "lens.load_lens": load_lens,
    }[surface]  # fmt: skip
    kind = surface.partition(".")[0]
    artefact(load, f"{kind}.safetensors", request.getfixturevalue("tmp_path"))


@PROMISE.on("train.ActivationSet.load")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    file: Path = request.getfixturevalue("tmp_path") / "set.safetensors"
    for content in (overlapping(), deep_header(), save({"acts": np.zeros(2, np.float32)})):
        file.write_bytes(content)
        judged(lambda: ActivationSet.load(file))
    judged(lambda: ActivationSet.load(pipe(file)))


PLACES = ["http://127.0.0.1:9/x", "file:///etc/hostname", "/etc/hostname", "../../etc/hostname",
          "/dev/zero", "x.lens/pipe", "x.lens/large"]  # fmt: skip


@PROMISE.on("model.read_activations", "model.read_probe_scores")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    """A log names places of the network, of the disk, pipes, and files that are too large."""
    folder: Path = request.getfixturevalue("tmp_path")
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setattr(_places, "_roots", OrderedDict())
    (folder / "x.lens").mkdir()
    pipe(folder / "x.lens" / "pipe")
    with (folder / "x.lens" / "large").open("wb") as file:
        file.truncate(1 << 36)  # a sparse file
    know_log(str(folder / "x.eval"))
    opened: list[str] = []
    monkeypatch.setattr(
        "fsspec.core.url_to_fs", lambda uri, **_: opened.append(uri) or pytest.fail(uri)
    )
    facts = {"sha256": "0" * 16, "n_prompt": 3, "n_completion": 2}
    for uri, root in [(uri, root) for uri in PLACES for root in (str(folder), "/", "http://[::1]")]:
        where = {"uri": uri, "root": root}
        if surface.endswith("scores"):
            reference = {"$lens": SCORES_REFERENCE, "probes": ["p"], **where, **facts}
            handle = ProbeScores.from_reference(reference)
            assert not handle.is_here or "x.lens" in uri
            judged(handle._load)
        else:
            tensors = {"residual_stream": "float32 1x4x8 layers 3"}
            reference = {"$lens": REFERENCE, "tensors": tensors, **where, **facts}
            event = {"output": {"metadata": {"activations": reference}}}
            found = activations(event)
            assert found is not None
            judged(found.numpy)
    assert not opened


def test_a_place_is_followed_where_somebody_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_places, "_followed", set())
    monkeypatch.setattr(_places, "_roots", OrderedDict())
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "notes").write_bytes(b"1")
    digest = hashlib.sha256(b"1").hexdigest()[:16]
    reference = {"$lens": "x/1", "uri": "notes", "root": str(tmp_path / "far"), "sha256": digest}
    with pytest.raises(ArtifactError, match=f"--follow {tmp_path / 'far'}"):
        read_sidecar(reference, kind="x/1")
    know_log("x.eval", follow=str(tmp_path / "f"))
    with pytest.raises(ArtifactError):
        read_sidecar(reference, kind="x/1")
    for say in (str(tmp_path), "all"):
        monkeypatch.setenv("INSPECT_LENS_FOLLOW", f"s3://mine,{say}")
        assert read_sidecar(reference, kind="x/1") == b"1"
        monkeypatch.delenv("INSPECT_LENS_FOLLOW")
    know_log("x.eval", follow=[str(tmp_path)])
    assert read_sidecar(reference, kind="x/1") == b"1"


def test_a_probe_of_a_log_is_fetched_from_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_places, "_followed", set())
    monkeypatch.setattr(_places, "_roots", OrderedDict())
    monkeypatch.setattr(artifact, "download", lambda *_: pytest.fail("asked the hub"))
    for name in ("hf://stranger/probe", str(tmp_path), "../probe"):
        sample: Any = SimpleNamespace(
            scores={"s": Score(value=1, metadata={"probe": name, "probe_sha256": "0"})}
        )
        header: Any = SimpleNamespace(eval=SimpleNamespace(model="lens/x", scorers=[]))
        probes, (note,) = choose_probes(
            (), header, sample, "lens/x", any_model=False, have_kept=True
        )
        assert not probes
        assert f"follow={name}" in note


@PROMISE.on("data.ActivationStore.open", "data.Recording.open", "data.read_whole",
            "_shards.read_layer", "_shards.read_records")  # fmt: skip
def _(surface: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("tmp_path")
    shard = folder / "shard.safetensors"
    for content in (deep_header(), (1 << 62).to_bytes(8, "little"), b""):
        shard.write_bytes(content)
        if surface.endswith("read_layer"):
            judged(lambda: list(read_layer(str(shard), 4, size=10)))
        elif surface.endswith("read_records"):
            judged(lambda: read_records(str(shard)))
            with pytest.raises(ArtifactError, match=r"cannot be read .*; check the path"):
                read_records(str(folder / "nowhere"))  # nothing to delete
    outside = {"format": STORE_FORMAT, "shards": [{"file": "../../etc/passwd", "sha256": "0"}]}
    for text in (DEEP, json.dumps(outside)):
        for name in ("manifest.json", "recording.json"):
            (folder / name).write_text(text)
        if surface.endswith("ActivationStore.open"):
            judged(lambda: ActivationStore.open(folder))
        elif surface.endswith("Recording.open"):
            judged(lambda: Recording.open(folder))
    judged(lambda: read_whole(str(pipe(folder / "pipe"))))


@PROMISE.on(
    "attention.load_heads", "attention.import_heads", "oracle.load_oracle", "data.load_dataset",
    "data.read_rows",
)  # fmt: skip
def _(surface: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("tmp_path")
    names = ("heads.json", "ao_config.json", "adapter_config.json")
    calls: dict[str, Callable[[], object]] = {
        "attention.load_heads": lambda: load_heads(folder / names[0]),
        "attention.import_heads": lambda: import_heads(folder / names[0]),
        "oracle.load_oracle": lambda: load_oracle(folder),
        "data.load_dataset": lambda: load_dataset("organism", path=str(folder / names[0])),
        "data.read_rows": lambda: list(read_rows(str(folder / names[0]))),
    }
    for content in (DEEP, '{"a": ' * 100_000, "null", "[1]"):
        for name in names:
            (folder / name).write_text(content)
        judged(calls[surface])
        judged(lambda: read_config(folder))  # behind an adapter that is right
    for name in names:
        pipe(folder / name)
    judged(calls[surface])
    judged(lambda: read_config(folder))


@PROMISE.on("_intake.read_vector")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    for content in (overlapping(), deep_header()):
        judged(partial(read_vector, content, where="a stranger's"))


test_promise = PROMISE.test()
