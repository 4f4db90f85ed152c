"""What we publish beside the code: evals, the model organism, its probes, vectors and the rest.

Wheels have them inside the package: the evals in that of `inspect-lens`, all others in that of
`inspect-lens-organism`. In a clone they lie in the folders of its root.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from inspect_lens.errors import ArtifactError

_HERE: Final = Path(__file__).resolve().parents[1]

ORGANISM: Final = "organism"
"""Name of the shipped model: `--model vllm-lens/organism`."""

MODELS: Final = {ORGANISM: "organism/checkpoint", "organism-agent": "organism/agent"}
"""The shipped models' folders below `shipped_root()`, by their names: the organism, which answers
one question, and the agent made from it, which thinks and calls tools."""

SERVER_ARGS: Final[dict[str, dict[str, bool | str]]] = {
    "organism-agent": {
        "enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3",
    }
}  # fmt: skip
"""What vLLM has to be told to serve a shipped model, beside its folder."""

EVALS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "aobench.asking": (("solver", "ask_of_contexts"),),
    "aobench.grading": (("scorer", "aobench_answer"), ("metric", "aobench_metrics")),
    "aobench.task": (("task", "aobench"),),
    "ai_liar.task": (("task", "ai_liar"),),
    "geometry_of_truth.task": (("task", "geometry_of_truth"), ("scorer", "statement_probe")),
    "insider_trading.task": (("task", "insider_trading"),),
    "kit.grading": (
        ("metric", "graded_report"),
        ("scorer", "deception_grade"),
        ("scorer", "graded_probe"),
    ),
    "lens_audit.task": (("task", "lens_audit"), ("scorer", "target_alarm")),
    "organism_agent.task": (
        ("task", "organism_agent"),
        ("solver", "converse"),
        ("scorer", "planted"),
    ),
    "organism_causal_tracing.task": (
        ("task", "organism_causal_tracing"),
        ("scorer", "planted_position"),
        ("metric", "chance_share"),
    ),
    "organism_deception.task": (
        ("task", "organism_deception"),
        ("task", "organism_control"),
        ("scorer", "truthfulness"),
    ),
    "organism_hidden_reason.task": (("task", "organism_hidden_reason"),),
    "organism_lens.task": (
        ("task", "organism_lens"),
        ("solver", "read_values"),
        ("scorer", "truth_behind_lie"),
        ("metric", "share_with_interval"),
    ),
    "organism_oracle.task": (("task", "organism_oracle"),),
    "organism_steering_sweep.task": (
        ("task", "organism_steering_sweep"),
        ("scorer", "truth_by_dose"),
    ),
    "organism_truth.task": (("task", "organism_truth"), ("scorer", "truth_probe")),
    "prompt_injection.task": (
        ("task", "prompt_injection"),
        ("metric", "auroc_padded"),
        ("scorer", "injected_heads"),
        ("scorer", "injection_followed"),
    ),
    "refusal_ablation.task": (
        ("task", "refusal_ablation"),
        ("solver", "refusal_edits"),
        ("metric", "rates_by_kind"),
        ("scorer", "refusals_by_edit"),
    ),
    "refusal_steering.task": (
        ("task", "refusal_steering"),
        ("metric", "by_kind"),
        ("scorer", "refusals_by_dose"),
    ),
    "roleplaying_deception.task": (("task", "roleplaying_deception"),),
    "sae_clamp.task": (
        ("task", "sae_clamp"),
        ("scorer", "behaviour_by_value"),
        ("scorer", "activation_by_value"),
        ("scorer", "behaviour_seen"),
    ),
    "sandbagging.task": (("task", "sandbagging"),),
    "secret_word.task": (("task", "secret_word"),),
    "sycophancy_steering.task": (
        ("task", "sycophancy_steering"),
        ("scorer", "agreement_by_dose"),
        ("scorer", "behaviour_match"),
    ),
}
"""Kinds and names that each module of the evals registers."""


def shipped_root() -> Path | None:
    """Folder of the shipped `probes/`, `vectors/`, `lenses/`, `oracles/`, `heads/` and `evals/`."""
    for root in _roots():
        if (root / MODELS[ORGANISM]).is_dir():
            return root
    return None


def _roots() -> Iterator[Path]:
    yield from (_HERE, _HERE.parents[1])
    # It may be installed in another folder than this package.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.distribution("inspect-lens-organism")
        yield Path(str(found.locate_file("inspect_lens")))


def organism_data() -> Path:
    """Folder of the model organism's data: a JSON Lines file for each split.

    Returns:
        `organism/data` in a clone, and its place in the wheel of `inspect-lens-organism` elsewhere.

    Raises:
        ArtifactError: the organism is not installed.

    Example:
        ```python
        from inspect_lens.data import load_dataset, organism_data

        data = load_dataset("organism", path=str(organism_data() / "demo.jsonl"), limit=4)
        assert len(data.samples) == 4
        ```
    """
    root = shipped_root()
    if root is None:
        raise ArtifactError(organism_advice("organism/data"))
    return root / "organism" / "data"


def organism_advice(name: str) -> str:
    """What to do about the name of the organism, or of its artefacts, where these are not here."""
    is_ours = name in MODELS or name.split("/")[0] == ORGANISM
    if not is_ours or shipped_root() is not None:
        return ""
    # Not by a name of an index, where no package is ours yet.
    return (
        f"{name!r} comes with the organism, which is not installed; run `pip install ./organism` "
        "in a clone of inspect-lens"
    )


def model_path(name: str) -> str:
    """The checkpoint behind a model's name."""
    root = shipped_root() if name in MODELS else None
    if root is None or (Path(name) / "config.json").is_file():
        return name
    return str(root / MODELS[name])


def served_name(name: str) -> str | None:
    """Name under which a server has to know a model, where its path is another."""
    return name if model_path(name) != name else None


def from_eval(module: str, name: str) -> Callable[..., Any]:
    """Import a task or scorer of the evals."""
    if (_HERE / "evals").is_dir():
        package = "inspect_lens.evals"
    else:
        package = "evals"
        root = shipped_root()
        # A clone's own folders are no installed packages.
        if root is not None and str(root) not in sys.path:
            sys.path.append(str(root))
    found: Callable[..., Any] = getattr(importlib.import_module(f"{package}.{module}"), name)
    return found
