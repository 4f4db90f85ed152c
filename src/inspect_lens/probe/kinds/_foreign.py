"""Probes that others trained: AISI's package `lie-detectors`, probelab, and IBM's vLLM-Hook.

A file of `lie-detectors` is a torch archive with `hyperparams` and `state_dict`, which has the
threshold, too. Which tokens are read, and after which question, only the README of the repository
says; it is read beside the file.

A file of probelab is what its `save` writes: a torch archive with `class`, `init_kwargs` and
`state_dict`, plain values and tensors. A layer norm's weights, and a linear layer behind the ReLU,
are multiplied into their neighbours: each product is that of the original up to rounding. No such
file names a layer, a site or a threshold.

Detectors of vLLM-Hook are logistic probes of the last token of a prompt. Layers count from 1 there.
The score is the log odds, of which they show the logistic function.

| detector | `NAME.npz`, beside `weights` and `bias` | `NAME.json` |
|---|---|---|
| hallucinations (H-Node) | `scaler_mean`, `scaler_scale`, `best_layer` | `model_name` |
| risky tool calls | `mean`, `scale`, `layer` | `model_name`, `threshold` |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.arguments import judged_arguments
from inspect_lens._base.artifact import download
from inspect_lens._base.untrusted import load_torch, parse_json, parsing, read_npz, read_regular
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe.card._card import FollowUp, ModelRef, ProbeCard, Threshold
from inspect_lens.probe.pooling._pool import HeadSpec
from inspect_lens.probe.statistics._measured import Interval

from ._linear import Probe
from ._load import fingerprint_model
from ._neural import NeuralProbe

__all__ = ["LIE_DETECTORS", "LieDetector", "import_probe"]

Arrays: TypeAlias = dict[str, NDArray[np.float64]]


class _Network(NamedTuple):
    """Tensors of a `NeuralProbe`, and the settings that go with them."""

    tensors: Arrays
    pool: str = "mean"
    spec: HeadSpec = HeadSpec()


def _read_probelab(
    loaded: Mapping[str, Any], file: Path, *, name: str, layer: int | None, model: str | None
) -> Probe | NeuralProbe:
    """The probe that a file of probelab holds; arguments are those of `import_probe`."""
    family = loaded["class"]
    if not isinstance(family, str) or family not in _READERS:
        raise ArtifactError(
            f"{file}: a probe of the class {str(family)[:80]!r} of probelab; read are "
            f"{', '.join(sorted(_READERS))}; the others compute what no probe here does"
        )
    about: dict[str, Any] = {
        "name": name,
        "method": f"imported from {file.name} (probelab, {family})",
        "source": "probelab (MIT)",
        **_where_it_reads(layer, model, "files of probelab name no layer"),
        "notes": (
            "Not stated: the model, its site, the tokens that were read, and any threshold. No "
            "rate or AUROC was measured here. The score is the log odds, of which probelab's "
            "`predict` gives the logistic function.",
        ),
    }
    with parsing(file, f"a {family} of probelab 0.1", "allowed is what its `save` writes"):
        settings = dict(loaded["init_kwargs"])
        made = _READERS[family](_arrays_of(loaded), settings)
        if isinstance(made, _Network):
            card = ProbeCard(
                hidden=made.tensors["mean"].size, kind="neural", head=made.spec, pool=made.pool,
                **about,
            )  # fmt: skip
            return NeuralProbe(tensors=_narrow(made.tensors), card=card)
        card = ProbeCard(hidden=made["weight"].size, **about)
        return Probe(card=card, **_narrow({key: np.atleast_2d(v) for key, v in made.items()}))


def _where_it_reads(layer: object, model: str | None, unknown: str) -> dict[str, Any]:
    """Layer and model of an imported probe, as fields of its card."""
    if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
        raise SpecError(
            f"layer={layer!r}: {unknown}; pass layer=, the block (from 0) whose output the probe "
            "reads"
        )
    whose = None if model is None else ModelRef(name=model, sha256=fingerprint_model(model))
    return {"layers": (layer,), "model": whose}


def _arrays_of(loaded: Mapping[str, Any]) -> Arrays:
    state = loaded["state_dict"]
    return {str(key): np.asarray(value.detach().double().numpy()) for key, value in state.items()}


def _narrow(arrays: Arrays) -> dict[str, Any]:
    made: dict[str, Any] = {key: value.astype(np.float32) for key, value in arrays.items()}
    return made | ({"bias": made["bias"].reshape(1)} if "bias" in made else {})


def _logistic(state: Arrays, settings: Mapping[str, Any]) -> Arrays:
    return {
        "weight": state["linear.weight"], "bias": state["linear.bias"],
        "mean": state["scaler_mean"], "scale": state["scaler_std"],
    }  # fmt: skip


def _mass_mean(state: Arrays, settings: Mapping[str, Any]) -> Arrays:
    direction = state["direction"]
    return {
        "weight": direction, "bias": state["bias"], "mean": state["global_mean"],
        "scale": np.ones_like(direction),
    }  # fmt: skip


def _mlp(state: Arrays, settings: Mapping[str, Any]) -> _Network:
    if settings["activation"] != "relu":
        raise ValueError(f"activation {str(settings['activation'])[:40]!r}; relu is read")
    return _Network(
        _unscaled(state["fc1.weight"].shape[1])
        | {"w0": state["fc1.weight"], "b0": state["fc1.bias"]}
        | {"value": state["fc2.weight"], "bias": state["fc2.bias"]}
    )


def _bilinear(state: Arrays, settings: Mapping[str, Any]) -> _Network:
    factors = state["U.weight"]
    return _Network(
        {"mean": state["scaler_mean"], "scale": state["scaler_std"], "w0": factors,
         "b0": np.zeros(len(factors)), "value": state["lam"][None], "bias": state["bias"]},
        spec=HeadSpec(activation="square"),
    )  # fmt: skip


def _gated_bipolar(state: Arrays, settings: Mapping[str, Any]) -> _Network:
    made, last, offset = _normed(state)
    for name, theirs in (("value", "W_proj"), ("gate", "W_gate")):
        weight = state[f"{theirs}.weight"]
        made[name] = weight @ last
        made[f"{name}_bias"] = weight @ offset + state[f"{theirs}.bias"]
    made |= {"output": state["output.weight"].reshape(2, -1), "bias": state["output.bias"]}
    return _Network(made, "bipolar", HeadSpec(layer_norm=True))


def _multimax(state: Arrays, settings: Mapping[str, Any]) -> _Network:
    made, last, offset = _normed(state)
    weight, output = state["head_projection.weight"], state["output.weight"]
    made |= {"value": weight @ last,
             "value_bias": weight @ offset + state["head_projection.bias"],
             "output": np.concatenate([output, np.zeros_like(output)]),
             "bias": state["output.bias"]}  # fmt: skip
    return _Network(made, "bipolar", HeadSpec(layer_norm=True))


def _soft_attention(state: Arrays, settings: Mapping[str, Any]) -> _Network:
    made, last, offset = _normed(state)
    value = state["output.weight"].reshape(-1, 1) * state["values"]
    # What a query gives every token alike changes no share of attention.
    made |= {"value": value @ last, "query": state["queries"] @ last,
             "bias": state["output.bias"] + (value @ offset).sum()}  # fmt: skip
    return _Network(made, "attention", HeadSpec(layer_norm=True))


def _positional_attention(state: Arrays, settings: Mapping[str, Any]) -> _Network:
    return _Network(
        _unscaled(len(state["query_proj"]))
        | {"query": state["query_proj"].T, "value": state["value_proj"].T}
        | {"position": state["position_weights"], "bias": state["bias"]},
        "attention",
    )


def _normed(state: Arrays) -> tuple[Arrays, NDArray[np.float64], NDArray[np.float64]]:
    """The first layer with its norm's weights in it, and the linear layer behind the ReLU."""
    first = state["mlp.0.weight"]
    made = _unscaled(first.shape[1])
    made |= {"w0": first * state["norm.weight"],
             "b0": state["mlp.0.bias"] + first @ state["norm.bias"]}  # fmt: skip
    return made, state["mlp.3.weight"], state["mlp.3.bias"]


def _unscaled(hidden: int) -> Arrays:
    return {"mean": np.zeros(hidden), "scale": np.ones(hidden)}


_READERS: Final[Mapping[str, Callable[[Arrays, Mapping[str, Any]], Arrays | _Network]]] = {
    "Bilinear": _bilinear,
    "GatedBipolar": _gated_bipolar,
    "Logistic": _logistic,
    "MLP": _mlp,
    "MassMean": _mass_mean,
    "MultiMax": _multimax,
    "PositionalAttention": _positional_attention,
    "SoftAttention": _soft_attention,
}
"""By class of probelab, what makes arrays of a linear `Probe` or a network of its tensors."""

_JSON_BYTES: Final = 1 << 20
_H_NODE: Final = "H-Node, hallucinations"
_DETECTORS: Final[Mapping[str, tuple[tuple[str, str, str], str, str]]] = {
    _H_NODE: (("scaler_mean", "scaler_scale", "best_layer"), "a hallucinated answer",
              ", arXiv:2603.26045"),
    "risky tool calls": (("mean", "scale", "layer"), "that the next action follows an injection",
                         ""),
}  # fmt: skip
"""How each calls the standardiser and the layer, what a large score means, and its paper."""


def _read_vllm_hook(file: Path, *, name: str, layer: int | None, model: str | None) -> Probe:
    """The probe in a `.npz` file of vLLM-Hook; arguments are those of `import_probe`."""
    needed = f"needed are its .npz file and {file.with_suffix('.json').name} beside it"
    with parsing(file, "a detector of vLLM-Hook", needed, unread=needed):
        arrays = read_npz(file)
        beside: Any = parse_json(read_regular(file.with_suffix(".json"), most=_JSON_BYTES))
        known = {k: names for k, (names, _, _) in _DETECTORS.items()}
        kinds = [k for k, names in known.items() if {"weights", "bias", *names} <= set(arrays)]
        if not kinds:
            raise ArtifactError(
                f"{file}: has the arrays {sorted(arrays)}; read are detectors of vLLM-Hook, with "
                "weights and bias, and mean, scale and layer, or scaler_mean, scaler_scale and "
                "best_layer"
            )
        kind, whose = kinds[0], model or str(beside["model_name"])
        names, meaning, paper = _DETECTORS[kind]
        flag = float(beside.get("threshold", 0.5))
        mean, scale, at = (arrays[key] for key in names)
        said = int(at.reshape(())) - 1
        if said < 0:
            raise ValueError(f"layer {said + 1}, and layers count from 1 there")
        if not 0.0 < flag < 1.0:
            raise ValueError(f"threshold {flag:g} is no probability")
    if layer is not None and layer != said:
        raise SpecError(
            f"layer={layer}: the file says layer {said + 1}, counted from 1, which is layer {said} "
            "here; leave layer out"
        )
    try:
        card = ProbeCard(
            name=name,
            description=f"A large score means {meaning}, as its authors label them.",
            method=f"imported from {file.name} (vLLM-Hook, {kind})",
            source=f"IBM vLLM-Hook (Apache-2.0){paper}",
            hidden=arrays["weights"].size,
            positions="last_prompt",
            pool="last",
            **_where_it_reads(said, whose, f"{file} names no layer"),
            notes=(
                f"vLLM-Hook flags a probability of {flag:g} and more, which is a score of "
                f"{math.log(flag / (1.0 - flag)):.5g}; pass it as threshold= if you want that. No "
                "rate is stated for it, and no rate or AUROC was measured here.",
                "It reads the last token of the prompt, before anything is sampled.",
                *(("The excess of its H-nodes is not computed.",) if kind == _H_NODE else ()),
            ),
        )
        # What does not vary is left as it is there, too.
        return Probe(
            weight=arrays["weights"].reshape(1, -1),
            bias=arrays["bias"].reshape(1),
            mean=mean.reshape(1, -1),
            scale=np.where(scale == 0, np.float32(1), scale).reshape(1, -1),
            card=card,
        )
    except (SpecError, ValueError) as error:
        raise ArtifactError(f"{file}: {error}") from None


LieDetector = Literal[
    "apollo", "targeted", "did-you-lie", "were-you-honest", "were-you-truthful", "unrelated"
]
"""Kind of a probe of `lie-detectors`: what its features are taken from."""
LIE_DETECTORS: Final[tuple[str, ...]] = get_args(LieDetector)
"""Names of the kinds."""

_SOURCE: Final = "AISI lie-detectors (MIT), arXiv:2606.12618"
_PAPERS: Final[Mapping[str, str]] = {
    "apollo": "arXiv:2502.03407", "targeted": "arXiv:2602.01425", "unrelated": "arXiv:2309.15840",
}  # fmt: skip
_LIE: Final[Mapping[str, Literal["yes", "no"]]] = {
    "did-you-lie": "yes", "were-you-honest": "no", "were-you-truthful": "no",
}  # fmt: skip
_LAST_YES_OR_NO: Final = r"regex:(?i).*\b(yes|no)\b"
"""The last one: what a model that reasons first writes before it is not its reply."""
_ENUM: Final = ("deception.detectors.utils.types", "lie_detectors.types")
_ARCHITECTURES: Final = {"dim": "difference of means", "lr": "logistic regression", "mlp": "MLP"}
_BYTES: Final = 2 << 30
_README_BYTES: Final = 1 << 20
_TENSORS: Final[Mapping[str, tuple[str, ...]]] = {
    "dim": ("direction",),
    "lr": ("linear.weight", "linear.bias", "dataset_mean", "dataset_std"),
    "mlp": (
        "net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias", "dataset_mean", "dataset_std",
    ),
}  # fmt: skip
_Arrays: TypeAlias = Mapping[str, NDArray[np.float32]]


class _Readme(NamedTuple):
    """What the README beside a file says."""

    kind: str | None = None
    question: str | None = None
    model: str | None = None
    calibration: str | None = None


@judged_arguments
def import_probe(
    path: str | Path,
    *,
    name: str,
    kind: LieDetector | None = None,
    layer: int | None = None,
    question: str | None = None,
    model: str | None = None,
    checkpoint: str = "probe.pt",
) -> Probe | NeuralProbe:
    """Read a probe that was trained with `lie-detectors` or `probelab`, or one of vLLM-Hook.

    A `.pt` file is a pickle, of which only tensors and plain values are read; no such package is
    needed. The probe scores rows as theirs does, and its card lists what the files say and what
    nobody says. Of probelab are read Logistic, MassMean, MLP (ReLU), Bilinear, GatedBipolar,
    MultiMax, SoftAttention and PositionalAttention; `layer` is needed. Of lie-detectors, kinds with
    a follow-up question read the reply to it (`inspect_lens.scorer.follow_up_score`).

    Of IBM's vLLM-Hook, the detectors of hallucinations (H-Node) and of risky tool calls are read: a
    `.npz` file, with the `.json` file beside it. They read the last token of a prompt.

    Args:
        path: a `.pt` or `.npz` file, a folder that has one, or `hf://owner/repository[@revision]`.
        name: `<model>/<name>`, for the card and the folder.
        kind: of lie-detectors, what the features were taken from; by default what the README
            beside the file says.
        layer: block, counted from 0, whose output is read; by default the number in the file.
        question: that is asked before the reply is read, of the follow-up kinds; by default the one
            quoted in the README.
        model: whose activations it reads: name or folder; by default what the README says.
        checkpoint: file in the folder or the repository; the authors publish several.

    Raises:
        ArtifactError: missing, damaged, of another format, or a pickle of code.
        SpecError: the kind, the layer or the question is known from nowhere, or the kind is
            `unrelated`, whose features are log-odds of answers and not activations.

    Source:
        arXiv:2606.12618; probelab 0.1.

    Example:
        ```python
        import torch

        from inspect_lens.probe import import_probe

        content = {
            "state_dict": {"direction": torch.ones(8), "threshold": torch.tensor(2.0)},
            "hyperparams": {"layer": 4, "probe_architecture": "dim"},
        }
        torch.save(content, "probe.pt")
        probe = import_probe("probe.pt", name="mine/lies", kind="apollo")
        assert probe.layers == (4,) and probe.threshold.value == 2.0
        print(probe.threshold.guarantee)  # the rate is a statement of others
        ```
    """
    file = _find(path, checkpoint)
    if file.suffix == ".npz":
        if kind is not None or question is not None:
            raise SpecError("kind, question: are of lie-detectors, and the file is of vLLM-Hook")
        return _read_vllm_hook(file, name=name, layer=layer, model=model)
    loaded = _load(file)
    if isinstance(loaded, Mapping) and {"class", "init_kwargs", "state_dict"} <= set(loaded):
        if kind is not None or question is not None:
            raise SpecError("kind, question: are of lie-detectors, and the file is of probelab")
        return _read_probelab(loaded, file, name=name, layer=layer, model=model)
    arrays, threshold, facts = _read(loaded, file)
    readme = _read_readme(file.parent / "README.md")
    found = _kind(file, kind, readme)
    at = facts.get("layer") if layer is None else layer
    about: dict[str, Any] = {
        "name": name,
        "description": "A large score means a deceptive answer, as its authors label them.",
        "method": f"imported from {file.name} (lie-detectors, {found}, "
        f"{_ARCHITECTURES[facts['probe_architecture']]})",
        "source": "; ".join(filter(None, [_SOURCE, _PAPERS.get(found, "")])),
        **_where_it_reads(at, model or readme.model, f"{file} names no layer"),
        "thresholds": (_threshold(threshold, readme),),
        "notes": tuple(_notes(found, facts, readme)),
    }
    if found in _LIE:
        asked = question or readme.question
        if not asked:
            raise SpecError(
                f"question: {file.parent} has no README.md that quotes it; pass question=, word "
                f"for word as the authors of {found!r} ask it: the probe reads the reply to it"
            )
        about["follow_up"] = FollowUp(question=asked, lie=_LIE[found])
        about["selection"] = _LAST_YES_OR_NO
    elif question is not None:
        raise SpecError(
            f"question: a probe of kind {found!r} reads the answer itself; leave it out"
        )
    try:
        return _made(arrays, str(facts["probe_architecture"]), about)
    except (SpecError, ValueError) as error:
        raise ArtifactError(f"{file}: {error}") from None


def _find(path: str | Path, checkpoint: str) -> Path:
    if str(path).startswith("hf://"):
        at = Path(checkpoint)
        beside = str(at.with_suffix(".json")) if at.suffix == ".npz" else "README.md"
        return download("probe", str(path), (checkpoint, beside)) / at.name
    given = Path(path).expanduser()
    return given / checkpoint if given.is_dir() else given


def _load(file: Path) -> Any:
    with parsing(file, "a file of torch", "check the path"):
        content = read_regular(file, most=_BYTES)
    return load_torch(content, str(file), plain=[f"{m}.ProbeArchitecture" for m in _ENUM])


def _read(loaded: Any, file: Path) -> tuple[_Arrays, float, dict[str, Any]]:
    """Tensors but the threshold, the threshold, and the hyperparameters."""
    allowed = (
        "allowed are files with state_dict and hyperparams whose probe_architecture is dim, lr or "
        "mlp, and those of probelab"
    )
    with parsing(file, "a probe of lie-detectors", allowed):
        facts = dict(loaded["hyperparams"])
        arrays = {key: value.astype(np.float32) for key, value in _arrays_of(loaded).items()}
        threshold = arrays.pop("threshold")
        wanted = _TENSORS[facts["probe_architecture"]]
        if set(arrays) != set(wanted) or threshold.size != 1:
            raise ValueError(f"it has the tensors {sorted(arrays)}, and not {sorted(wanted)}")
        return arrays, float(threshold.reshape(())), facts


def _read_readme(file: Path) -> _Readme:
    try:
        text = read_regular(file, most=_README_BYTES).decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, ValueError):
        return _Readme()
    head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    tags = re.findall(r"^[ \t]*- ([\w-]+)[ \t]*$", head[1] if head else "", re.MULTILINE)
    kinds = [kind for kind in LIE_DETECTORS for tag in tags if tag.startswith(kind)]
    kinds += ["targeted" for tag in tags if "targeted" in tag]
    quoted = re.search(r"^> *(\S.*)$", text, re.MULTILINE)
    return _Readme(
        # A targeted probe is Apollo's with other pairs, and may be tagged as both.
        kind="targeted" if "targeted" in kinds else next(iter(kinds), None),
        question=quoted[1].rstrip() if quoted else None,
        model=_cell(text, "Target model"),
        calibration=_cell(text, "Calibration"),
    )


def _cell(text: str, row: str) -> str | None:
    found = re.search(rf"^\| *{row} *\|(.*)\| *$", text, re.MULTILINE)
    return found[1].strip(" ").removeprefix("`").removesuffix("`") if found else None


def _kind(file: Path, kind: str | None, readme: _Readme) -> str:
    found = kind or readme.kind
    if found not in LIE_DETECTORS:
        missing = "" if kind else f"{file.parent} has no README.md whose tags name it; "
        raise SpecError(
            f"kind={found!r}: {missing}allowed are "
            f"{', '.join(LIE_DETECTORS)}; pass kind=, which decides what tokens the probe reads"
        )
    if found == "unrelated":
        raise SpecError(
            f"{file}: a probe of unrelated questions reads the log-odds of yes and no of a list of "
            "questions that is not published with it, and no activations; the solver follow_up "
            "asks questions of yours and keeps the log-odds, which a classifier can read"
        )
    return found


_RATE: Final = re.compile(r"(?<![\d.,])(\d+(?:[.,]\d+)?)\s*% FPR on (\w[\w-]*)")


def _threshold(value: float, readme: _Readme) -> Threshold:
    stated = _RATE.search(readme.calibration or "")
    fpr = float(stated[1].replace(",", ".")) / 100 if stated else 0.01
    if not np.isfinite(value):
        raise ArtifactError(f"threshold={value}: the file holds no number that can be acted on")
    if not 0.0 < fpr < 1.0:
        raise ArtifactError(
            f"README.md: calibration {readme.calibration!r}; allowed are rates above 0 % and below "
            "100 %; correct it, or move the README away and pass kind="
        )
    return Threshold(
        value=value,
        fpr=fpr,
        control=stated[2] if stated else "Alpaca",
        n_control=0,
        n_above=0,
        interval=Interval(low=0.0, high=1.0, method="none, as nothing was counted"),
        claimed_by="AISI lie-detectors",
    )


def _notes(kind: str, facts: Mapping[str, Any], readme: _Readme) -> Iterator[str]:
    """What the files say, as they say it, what nobody says, and what was assumed instead."""
    plain = {k: v for k, v in facts.items() if isinstance(v, str | int | float) and k != "layer"}
    yield f"Stated in the file: {', '.join(f'{k} {v}' for k, v in sorted(plain.items()))}."
    if readme.calibration:
        yield f"Stated in README.md of calibration: {readme.calibration}"
    if not _RATE.search(readme.calibration or ""):
        yield "Assumed: the threshold is for 1 % on Alpaca; neither the file nor a README says so."
    yield (
        "Not stated: the engine, dtype and revision of the model whose activations it was fitted "
        "on, and how many samples set its threshold. No rate or AUROC was measured here."
    )
    yield (
        "Not stated: how layers are counted. The number in the file is taken as that of the block, "
        "from 0, whose output is read."
    )
    if kind not in _LIE:
        yield "Assumed: the tokens of the answer are read, and the mean of their scores."
    elif facts["probe_architecture"] == "mlp":
        yield (
            "The authors average the activations of a reply of several tokens and score the mean; "
            "here their scores are averaged, which is the same for one token only."
        )


def _made(arrays: _Arrays, architecture: str, about: dict[str, Any]) -> Probe | NeuralProbe:
    if architecture == "dim":
        direction = arrays["direction"]
        card = ProbeCard(hidden=direction.size, **about)
        return Probe.from_direction(direction.reshape(1, -1), card=card)
    mean, scale = arrays["dataset_mean"], arrays["dataset_std"]
    if architecture == "lr":
        card = ProbeCard(hidden=mean.size, **about)
        weight, bias = arrays["linear.weight"], arrays["linear.bias"]
        return Probe(weight=weight, bias=bias, mean=mean[None], scale=scale[None], card=card)
    names = {
        "w0": "net.0.weight",
        "b0": "net.0.bias",
        "value": "net.2.weight",
        "bias": "net.2.bias",
    }
    tensors = {"mean": mean, "scale": scale} | {k: arrays[name] for k, name in names.items()}
    card = ProbeCard(hidden=mean.size, kind="neural", head=HeadSpec(), **about)
    return NeuralProbe(tensors=tensors, card=card)
