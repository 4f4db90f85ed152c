"""A name that nobody reads is refused with the nearest one, wherever names can be given."""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from inspect_ai.model import get_model

import inspect_lens
from inspect_lens import _settings
from inspect_lens._cli._doctor import examined
from inspect_lens._vllm import plugin
from inspect_lens._vllm.compat.engine_facts import refusal
from inspect_lens.client import LensClient
from inspect_lens.collect import collect
from inspect_lens.data import load_dataset
from inspect_lens.errors import LensError
from inspect_lens.model import _provider as _arguments
from inspect_lens.model import lens_config
from inspect_lens.model._host import PrerequisiteError
from inspect_lens.sae import SparseAutoencoder
from inspect_lens.scorer import CascadeRecord
from inspect_lens.spec import LensRequest
from inspect_lens.train import (
    cascade_frontier,
    from_arrays,
    from_hf,
    from_nnsight,
    from_transformer_lens,
    make_estimator,
    persona_vector,
)
from tests.kit.commands import commands, run_command
from tests.kit.fake_server import FakeLensServer
from tests.kit.promises import Promise

COMMANDS = {f"inspect-lens {words}" for words in commands()}
ENVIRONMENT = {f"INSPECT_LENS_* {where}" for where in ("model", "command", "doctor", "vLLM")}
ARGUMENTS = {"-M, server runs", "-M, server is started", "-M, no model"}


def _open_ended() -> Iterator[str]:
    """Public functions and methods of ours that take any keyword."""
    for module in pkgutil.iter_modules(inspect_lens.__path__):
        if module.name.startswith("_"):
            continue
        found = importlib.import_module(f"inspect_lens.{module.name}")
        seen: list[object] = []
        for name in getattr(found, "__all__", ()):
            thing = getattr(found, name)
            inner = vars(thing).items() if inspect.isclass(thing) else ()
            for what, one in [(name, thing), *((f"{name}.{k}", v) for k, v in inner)]:
                own = inspect.isfunction(one) and one.__module__.startswith("inspect_lens")
                if one in seen or not own or what.rpartition(".")[2].startswith("_"):
                    continue
                seen.append(one)
                kinds = [p.kind for p in inspect.signature(one).parameters.values()]
                if (
                    inspect.Parameter.VAR_KEYWORD in kinds
                    and kinds[0] is not kinds[0].VAR_POSITIONAL
                ):
                    yield f"{module.name}.{what}"


PROMISE = Promise(
    "an unknown option is refused with the nearest name",
    surfaces={*COMMANDS, *ENVIRONMENT, *ARGUMENTS, *_open_ended()},
)


def refused(call: Callable[[], object], *, names: str) -> None:
    with pytest.raises((LensError, PrerequisiteError, TypeError, ValueError)) as error:
        call()
    assert names in str(error.value)


@PROMISE.on(*COMMANDS)
def _(surface: str, request: pytest.FixtureRequest) -> None:
    words = surface.removeprefix("inspect-lens ")
    option = max((o for p in commands()[words].params for o in p.opts), key=len)
    capsys = request.getfixturevalue("capsys")
    assert run_command(words, option[:-1]) == 2
    said = capsys.readouterr().err
    assert option[:-1] in said
    assert option in said.replace(option[:-1] + " ", "")


@PROMISE.on("-M, server runs")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    with FakeLensServer() as server:

        def model(**arguments: Any) -> object:
            return get_model("lens/org/tiny", base_url=server.url, memoize=False, **arguments)

        refused(lambda: model(captur=[4]), names="did you mean 'capture'?")
        refused(lambda: model(probe="a/b"), names="did you mean 'probes'?")
        refused(lambda: model(activation="drop"), names="did you mean 'activations'?")
        refused(lambda: model(steer="a/b"), names="a/b")
        caplog: pytest.LogCaptureFixture = request.getfixturevalue("caplog")
        with caplog.at_level(logging.WARNING, logger=_arguments.__name__):
            model(max_model_len=9)
        assert server.url in caplog.text
        assert "max_model_len has no effect" in caplog.text
        model(is_mistral=True, capture=[4])


@PROMISE.on("-M, server is started")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    def model(**arguments: Any) -> object:
        return get_model("vllm-lens/org/tiny", memoize=False, **arguments)

    refused(lambda: model(captur=[4]), names="did you mean 'capture'?")
    refused(lambda: model(probe="a/b"), names="did you mean 'probes'?")
    refused(lambda: model(steer="a/b"), names="a/b")
    model(max_model_len=9, stream_interval=2, enforce_eager=True)


@PROMISE.on("-M, no model")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    importlib.import_module("inspect_lens._registry")
    refused(lambda: get_model("none/none", captur=[4], memoize=False), names="-M captur=")


@PROMISE.on(*ENVIRONMENT)
def _(surface: str, request: pytest.FixtureRequest) -> None:
    monkeypatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setenv("INSPECT_LENS_CAPTUR", "4")
    hint = "did you mean 'INSPECT_LENS_CAPTURE'?"
    where = surface.rpartition(" ")[2]
    if where == "model":
        refused(lambda: get_model("vllm-lens/org/tiny", memoize=False), names=hint)
    elif where == "command":
        capsys = request.getfixturevalue("capsys")
        assert run_command("view", "x.eval") == 3
        assert hint in capsys.readouterr().err
    elif where == "doctor":
        found = examined()
        assert hint in found["features"]["lens"]["off"]
        assert not found["ok"]
    else:
        # An engine that nobody asked to be lensed starts, and says why it is not.
        assert hint in (refusal(SimpleNamespace()) or "")
        started: list[str] = []
        monkeypatch.setattr(plugin, "_install", lambda: started.append("wrapped"))
        plugin.register()
        assert started == ["wrapped"]
        monkeypatch.setenv("INSPECT_LENS_REQUIRED", "1")
        refused(plugin.register, names=hint)
    monkeypatch.delenv("INSPECT_LENS_CAPTUR")
    _settings.Settings.load()


@PROMISE.on("model.lens_config")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    refused(lambda: lens_config(captur=[4]), names="captur")


@PROMISE.on(*(f"client.{c}.{m}" for c in ("LensClient",) for m in ("generate", "chat", "stream")))
def _(surface: str, request: pytest.FixtureRequest) -> None:
    with FakeLensServer() as server, LensClient(server.url) as client:
        call: Any = getattr(client, surface.rpartition(".")[2])
        given: Any = [{"role": "user", "content": "x"}] if surface.endswith("chat") else "x"
        refused(
            lambda: call(given, output_residual_steam=True),
            names="did you mean 'output_residual_stream'?",
        )
        refused(lambda: call(given, capture_layer=[4]), names="did you mean 'capture_layers'?")
        refused(lambda: call(given, max_token=4), names="did you mean 'max_tokens'?")
        assert not server.requests


@PROMISE.on("train.make_estimator")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    refused(lambda: make_estimator("lr", regularisation=1), names="regularisation")


@PROMISE.on("data.load_dataset")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    refused(lambda: load_dataset("instructed_pairs", number=4), names="number")


@PROMISE.on("collect.collect")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    data = load_dataset("instructed_pairs", limit=2)
    refused(lambda: collect("lens/org/tiny", data, "out", layer=[4]), names="layer")


@PROMISE.on("scorer.CascadeRecord.arguments")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    record: Any = CascadeRecord(*[None] * len(CascadeRecord._fields))  # type: ignore[arg-type]
    refused(lambda: cascade_frontier(**record.arguments(probe_treshold=1)), names="probe_treshold")


@PROMISE.on("train.persona_vector")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    rows = [np.random.default_rng(i).standard_normal((1, 2, 8)).astype("float32") for i in range(4)]
    columns = {"trait": ["0", "90", "0", "90"], "coherence": ["90"] * 4}
    data = from_arrays(rows, [0, 1, 0, 1], layers=[0], groups=["a", "a", "b", "b"], columns=columns)
    refused(lambda: persona_vector(data, name="a/b", layr=0), names="layr")


@PROMISE.on(
    "train.from_hf", "train.from_nnsight", "train.from_transformer_lens", "train.from_arrays"
)
def _(surface: str, request: pytest.FixtureRequest) -> None:
    rows = np.zeros((4, 2, 3, 8), dtype=np.float32)
    call: Any = {
        "from_hf": lambda **k: from_hf(list(rows), [0, 1, 0], **k),
        "from_nnsight": lambda **k: from_nnsight({0: rows[0]}, [0, 1], **k),
        "from_transformer_lens": lambda **k: from_transformer_lens(
            {"blocks.0.hook_resid_post": rows[0]}, [0, 1], **k
        ),
        "from_arrays": lambda **k: from_arrays(list(rows[:2]), [0, 1], layers=[0, 1], **k),
    }[surface.rpartition(".")[2]]
    refused(lambda: call(group=["a", "b"]), names="group")


@PROMISE.on("sae.SparseAutoencoder.gate")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    rows, none = np.eye(4, dtype=np.float32), np.zeros(4, dtype=np.float32)
    sae = SparseAutoencoder(
        weight=rows, bias=none, decoder=rows, decoder_bias=none, hook="blocks.1.hook_resid_post"
    )
    refused(lambda: sae.gate(0, scop="rest"), names="scop")


@PROMISE.on("spec.LensRequest.with_fields")
def _(surface: str, request: pytest.FixtureRequest) -> None:
    refused(lambda: LensRequest().with_fields(captur=1), names="captur")


test_promise = PROMISE.test()
