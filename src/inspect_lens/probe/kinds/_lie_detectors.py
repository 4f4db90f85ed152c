"""Probes that others trained; first those of AISI's package `lie-detectors`.

A file of `lie-detectors` is a torch archive with `state_dict` and `hyperparams`:

| architecture | tensors | score of a row `x` |
|---|---|---|
| `dim` | `direction` | `x·direction` |
| `lr` | `linear.weight`, `linear.bias`, `dataset_mean`, `dataset_std` | of the standardised row |
| `mlp` | `net.0`, `net.2`, `dataset_mean`, `dataset_std` | one ReLU layer of the same |

and `threshold`. Which tokens are read, and after which question, is in no file but in the README of
the repository, which is read beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.artifact import download
from inspect_lens._base.untrusted import load_torch, read_regular
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe.card._card import FollowUp, ProbeCard, Threshold
from inspect_lens.probe.pooling._pool import HeadSpec
from inspect_lens.probe.statistics._measured import Interval

from ._linear import Probe
from ._neural import NeuralProbe
from ._probelab import arrays_of, is_probelab, read_probelab, where_it_reads
from ._vllm_hook import read_vllm_hook

__all__ = ["LIE_DETECTORS", "LieDetector", "import_probe"]

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
    a follow-up question read the reply to that question, which
    `inspect_lens.scorer.follow_up_score` asks.

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

    Returns:
        A linear `Probe` of the architectures `dim`, `lr`, `Logistic` and `MassMean` and of
        detectors of vLLM-Hook, and a `NeuralProbe` of all others.

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
        return read_vllm_hook(file, name=name, layer=layer, model=model)
    loaded = _load(file)
    if is_probelab(loaded):
        if kind is not None or question is not None:
            raise SpecError("kind, question: are of lie-detectors, and the file is of probelab")
        return read_probelab(loaded, file, name=name, layer=layer, model=model)
    arrays, threshold, facts = _read(loaded, file)
    readme = _read_readme(file.parent / "README.md")
    found = _kind(file, kind, readme)
    at = facts.get("layer") if layer is None else layer
    about: dict[str, Any] = {
        "name": name,
        "description": "A large score means a deceptive answer, as its authors label them.",
        "method": f"imported from {file.name} (lie-detectors, {found}, {_of(facts)})",
        "source": "; ".join(filter(None, [_SOURCE, _PAPERS.get(found, "")])),
        **where_it_reads(at, model or readme.model, f"{file} names no layer"),
        "thresholds": (_threshold(threshold, readme),),
        "notes": (*_known(facts, readme), *_assumed(readme), *_unknown(found, facts)),
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
    try:
        content = read_regular(file, most=_BYTES)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{file}: cannot be read ({error}); check the path") from None
    return load_torch(content, str(file), plain=[f"{m}.ProbeArchitecture" for m in _ENUM])


def _read(loaded: Any, file: Path) -> tuple[_Arrays, float, dict[str, Any]]:
    """Tensors but the threshold, the threshold, and the hyperparameters."""
    try:
        facts = dict(loaded["hyperparams"])
        arrays = {key: value.astype(np.float32) for key, value in arrays_of(loaded).items()}
        threshold = arrays.pop("threshold")
        wanted = _TENSORS[facts["probe_architecture"]]
        if set(arrays) != set(wanted) or threshold.size != 1:
            raise ValueError(f"it has the tensors {sorted(arrays)}, and not {sorted(wanted)}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(
            f"{file}: not a probe of lie-detectors ({type(error).__name__}: {error}); allowed are "
            "files with state_dict and hyperparams whose probe_architecture is dim, lr or mlp, and "
            "those of probelab"
        ) from None
    return arrays, float(threshold.reshape(())), facts


def _read_readme(file: Path) -> _Readme:
    try:
        text = read_regular(file, most=_README_BYTES).decode("utf-8")
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


def _of(facts: Mapping[str, Any]) -> str:
    return {"dim": "difference of means", "lr": "logistic regression", "mlp": "MLP"}[
        facts["probe_architecture"]
    ]


def _assumed(readme: _Readme) -> list[str]:
    if _RATE.search(readme.calibration or ""):
        return []
    return ["Assumed: the threshold is for 1 % on Alpaca; neither the file nor a README says so."]


_RATE: Final = re.compile(r"\b(\d+(?:\.\d+)?)\s*% FPR on (\w+)")


def _threshold(value: float, readme: _Readme) -> Threshold:
    stated = _RATE.search(readme.calibration or "")
    if not np.isfinite(value):
        raise ArtifactError(f"threshold={value}: the file holds no number that can be acted on")
    return Threshold(
        value=value,
        fpr=float(stated[1]) / 100 if stated else 0.01,
        control=stated[2] if stated else "Alpaca",
        n_control=0,
        n_above=0,
        interval=Interval(low=0.0, high=1.0, method="none, as nothing was counted"),
        claimed_by="AISI lie-detectors",
    )


def _known(facts: Mapping[str, Any], readme: _Readme) -> list[str]:
    """What the files say, as they say it."""
    plain = {k: v for k, v in facts.items() if isinstance(v, str | int | float) and k != "layer"}
    said = [f"Stated in the file: {', '.join(f'{k} {v}' for k, v in sorted(plain.items()))}."]
    if readme.calibration:
        said.append(f"Stated in README.md of calibration: {readme.calibration}")
    return said


def _unknown(kind: str, facts: Mapping[str, Any]) -> list[str]:
    """What nobody says, and what was assumed instead."""
    said = [
        "Not stated: the engine, dtype and revision of the model whose activations it was fitted "
        "on, and how many samples set its threshold. No rate or AUROC was measured here.",
        "Not stated: how layers are counted. The number in the file is taken as that of the block, "
        "from 0, whose output is read.",
    ]
    if kind not in _LIE:
        said.append("Assumed: the tokens of the answer are read, and the mean of their scores.")
    elif facts["probe_architecture"] == "mlp":
        said.append(
            "The authors average the activations of a reply of several tokens and score the mean; "
            "here their scores are averaged, which is the same for one token only."
        )
    return said


def _made(arrays: _Arrays, architecture: str, about: dict[str, Any]) -> Probe | NeuralProbe:
    if architecture == "dim":
        direction = arrays["direction"]
        card = ProbeCard(hidden=direction.size, **about)
        return Probe.from_direction(direction.reshape(1, -1), card=card)
    mean, scale = arrays["dataset_mean"], arrays["dataset_std"]
    if architecture == "lr":
        return Probe(
            weight=arrays["linear.weight"], bias=arrays["linear.bias"], mean=mean[None],
            scale=scale[None], card=ProbeCard(hidden=mean.size, **about),
        )  # fmt: skip
    tensors = {
        "mean": mean, "scale": scale, "w0": arrays["net.0.weight"], "b0": arrays["net.0.bias"],
        "value": arrays["net.2.weight"], "bias": arrays["net.2.bias"],
    }  # fmt: skip
    card = ProbeCard(hidden=mean.size, kind="neural", head=HeadSpec(), **about)
    return NeuralProbe(tensors=tensors, card=card)
