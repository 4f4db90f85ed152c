"""One tiny model of each layout against Hugging Face: rows at every site, and steering."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from inspect_lens import SteeringVector
from inspect_lens._vllm.worker import self_check
from inspect_lens.attention import QueriesKeys
from inspect_lens.errors import UnsupportedError
from inspect_lens.spec import result_name
from tests.engine.conftest import Engine, start, tokens
from tests.engine.test_capture import fed
from tests.kit.architectures import CASES, HIDDEN, LAYERS, Case, write
from tests.kit.model_results import CHECK, STEERED
from tests.kit.reference import Edit, HuggingFace, relative_errors

TOLERANCE = 3e-4
"""float32, other kernels; recurrences add up more than attention does."""
MULTIPLE = 3.0
"""In bfloat16, how much farther from float32 rows may be than those of transformers in bfloat16."""
ROUNDING = 2**-9
"""Of one number in bfloat16, at most: embeddings may be exact in transformers' bfloat16."""
Note = Callable[[str, float, float], object]
"""Gets what was checked, how far it is, and how far it may be."""


class Truth(NamedTuple):
    """What transformers has of one site, or of patterns: (layers, rows, numbers)."""

    exact: torch.Tensor
    rounded: torch.Tensor | None
    """In bfloat16, where an engine is."""

    @classmethod
    def joined(cls, parts: Sequence[Truth]) -> Truth:
        """The rows of several texts."""
        rounded = [part.rounded for part in parts if part.rounded is not None]
        exact = torch.cat([part.exact for part in parts], dim=1)
        return cls(exact, torch.cat(rounded, dim=1) if rounded else None)

    def part(self, layer: int, rows: list[int]) -> Truth:
        """Some rows of a layer."""
        exact, rounded = (None if of is None else of[[layer]][:, rows] for of in self)
        assert exact is not None
        return Truth(exact, rounded)


class Judge:
    """Says how far rows are from those of transformers in float32, and whether that is too far.

    An engine in float32 may be off by `TOLERANCE` of a row's norm. What bfloat16 costs depends on
    the model, so the yardstick for such an engine is transformers in bfloat16, with the same
    weights: in no layer may the farthest row be more than `MULTIPLE` times as far away as the
    farthest of transformers. Where tokens choose experts, rounding sends some to others, whose
    rows are far away in both; there the means over rows are compared.
    """

    def __init__(
        self, case: Case, folder: Path, dtype: torch.dtype, note: Note = lambda *_: None
    ) -> None:
        def run(dtype: torch.dtype) -> HuggingFace:
            return HuggingFace(folder, case.layers, is_text=case.is_text, dtype=dtype, **case.reads)

        self._exact = run(torch.float32)
        self._rounded = None if dtype == torch.float32 else run(dtype)
        self._is_routed = case.is_routed
        self._note = note
        self.limit = TOLERANCE if self._rounded is None else MULTIPLE

    def sites(
        self,
        ids: Sequence[int],
        sites: Sequence[str],
        edits: Mapping[tuple[str, int], Edit] | None = None,
    ) -> dict[str, Truth]:
        """What is at the sites, perhaps with edits."""
        exact = self._exact.sites(ids, edits, sites)
        rounded = self._rounded.sites(ids, edits, sites) if self._rounded else {}
        return {site: Truth(exact[site], rounded.get(site)) for site in sites}

    def patterns(self, ids: Sequence[int]) -> Truth:
        """A row for each head and query."""
        found = [
            None if model is None else model.attentions(ids).flatten(1, 2)
            for model in (self._exact, self._rounded)
        ]
        assert found[0] is not None
        return Truth(found[0], found[1])

    def distance(self, found: torch.Tensor, truth: Truth) -> float:
        """At most 1 times `limit` if rows are the right ones."""
        assert found.shape == truth.exact.shape
        errors = relative_errors(found, truth.exact)
        if truth.rounded is None:
            return float(errors.max())
        theirs = relative_errors(truth.rounded, truth.exact)
        reduce = torch.mean if self._is_routed else torch.amax
        return float((reduce(errors, -1) / reduce(theirs, -1).clamp(min=ROUNDING)).max())

    def check(self, what: str, found: torch.Tensor, truth: Truth) -> None:
        """Fail where rows are too far away; note how far."""
        distance = self.distance(found, truth)
        assert distance <= self.limit, (what, distance)
        self._note(what, distance, self.limit)


def check_case(
    case: Case,
    folder: Path,
    *,
    dtype: torch.dtype,
    note: Note = lambda *_: None,
    **options: Any,
) -> None:
    """Start an engine, and compare captures and steering with Hugging Face."""
    write(case, folder, dtype)
    judge = Judge(case, folder, dtype, note)
    with pytest.MonkeyPatch.context() as environment:
        more = ("q", "k") if case.has_patterns else ()
        environment.setenv("INSPECT_LENS_SITES", ",".join((*case.sites, *more)))
        engine = start(
            folder,
            dtype=str(dtype).removeprefix("torch."),
            enable_prefix_caching=False,
            max_model_len=256,
            **(case.options | options),
        )
    try:
        check_rows(case, engine, judge)
        check_steering(engine, judge)
        if case.has_patterns:
            check_patterns(engine, judge)
        if case.has_latent_attention:
            with pytest.raises(
                UnsupportedError, match=r"output_qk: .*\(MLA\), which keeps no keys"
            ):
                engine.run([tokens(3)], {"output_qk": True})
    finally:
        engine.close()


def check_rows(case: Case, engine: Engine, judge: Judge) -> None:
    request = {"inspect_lens": {"capture": {"site": list(case.sites)}}}
    outputs = engine.run([tokens(n, seed=n) for n in (3, 90)], request, max_tokens=10)
    truths = [judge.sites(fed(output), case.sites) for output in outputs]
    rows = {
        site: torch.cat([o.activations[result_name(site)] for o in outputs], dim=1)  # type: ignore[arg-type]
        for site in case.sites
    }
    for site in case.sites:
        truth = Truth.joined([of[site] for of in truths])
        judge.check(site, rows[site], truth)
        # Rows of another token, layer or site could not pass.
        others = [rows[site].roll(1, 1), rows[site].roll(1, 0)]
        others += [rows[other] for other in case.sites if other != site]
        for wrong in others:
            if wrong.shape == truth.exact.shape:
                assert judge.distance(wrong, truth) > judge.limit, site


def check_steering(engine: Engine, judge: Judge) -> None:
    v = 4.0 * torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(1))
    prompt, layer, where = tokens(80, seed=4), LAYERS - 2, [0, 40, 79]
    vector = SteeringVector(activations=v, layer_indices=[layer], position_indices=where)
    everything = {"output_residual_stream": True}
    request = {"apply_steering_vectors": [vector], **everything}
    plain, steered = engine.run([prompt, prompt], [everything, request], max_tokens=10)

    def edit(h: torch.Tensor) -> torch.Tensor:
        out = h.clone()
        out[where] += v[0].to(h.dtype)
        return out

    before, after = (o.activations["residual_stream"] for o in (plain, steered))
    edits = {("resid_post", layer): edit}
    edited = judge.sites(fed(steered), ["resid_post"], edits)["resid_post"]
    unedited = judge.sites(fed(plain), ["resid_post"])["resid_post"]
    judge.check(STEERED, after, edited)
    judge.check("resid_post", before, unedited)
    # A mean over all rows could hide these. One token of them may choose other experts, and the two
    # prompts lie otherwise in steps, whose kernels round otherwise.
    exact = before[layer, where].float() + v[0]
    for rows, is_steered in ((after, True), (before, False)):
        error = relative_errors(rows[layer, where], exact).median()
        assert (error <= 16 * ROUNDING) == is_steered
    others = [p for p in range(80) if p not in where]
    judge.check("resid_post", after[[layer]][:, others], unedited.part(layer, others))
    assert steered.inspect_lens.steer.n_tokens == len(where)


def check_patterns(engine: Engine, judge: Judge) -> None:
    """Windows and scales are those that the engine says, to what transformers returns."""
    (output,) = engine.run([tokens(90, seed=2)], {"output_qk": True}, max_tokens=4)
    captured = QueriesKeys.of(output.activations)
    windows = {facts.window for facts in captured.facts}
    assert windows == {(31, 0), (-1, -1)}, "both kinds of layers"
    found = [torch.from_numpy(captured.patterns(layer)).flatten(0, 1) for layer in captured.layers]
    judge.check("attention patterns", torch.stack(found), judge.patterns(fed(output)))


BY_DAY = {"gemma3", "gemma4", "opt", "granite-hybrid", "stablelm", "idefics3", "gpt_oss"}
"""Gemma 3 has norms on queries and keys, OPT a plain residual, gpt-oss sinks and biases of experts;
two workers run Mixtral by day.
"""
AT_NIGHT = pytest.mark.nightly(
    held_by=(
        "tests/engine/test_architectures.py::test_an_architecture_equals_hugging_face",
        "tests/engine/test_expert_parallel.py::test_router_logits_equal_hugging_face",
        "tests/engine/test_expert_parallel.py::"
        "test_rows_of_experts_on_two_workers_equal_hugging_face",
    ),
    why="an engine for each; models with each part of their layouts run by day",
)


@pytest.mark.engine
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in BY_DAY else [AT_NIGHT])
        for case in CASES
        if not case.needs_gpu and not case.refusal
    ],
)
def test_an_architecture_equals_hugging_face(
    case: Case,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    assert "INSPECT_LENS_LAYERS" not in os.environ
    told: list[str] = []
    # In this process an engine starts in a fifth of the time, but it could change the class that
    # is the reference.
    if not case.is_by_transformers:
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        monkeypatch.setattr(self_check.logger, "info", lambda said, *of: told.append(said % of))
    check_case(
        case,
        tmp_path,
        dtype=getattr(torch, case.dtype_on_cpu),
        note=lambda *found: record_property(CHECK, list(found)),
        enforce_eager=True,
        **case.cpu_options,
    )
    if not case.is_by_transformers:
        found = re.search(r"check passed.*: (\d+) of (\d+) rows of a token", "\n".join(told))
        # Rows that differ from pass to pass are not compared, nor those behind them.
        assert found is not None
        assert found[1] == found[2]


def check_refusal(case: Case, folder: Path, sites: str, reason: str, **options: Any) -> None:
    """Start an engine that refuses the lens with a reason, and generates as without it."""
    dtype = options.get("dtype", "float32")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("INSPECT_LENS_SITES", sites)
        engine = start(
            write(case, folder, getattr(torch, dtype)),
            max_model_len=256,
            **(case.options | options),
        )
    try:
        with pytest.raises(UnsupportedError, match=reason):
            engine.run([tokens(3)], {"output_residual_stream": True})
        (output,) = engine.run([tokens(3)], max_tokens=4)
        assert len(output.outputs[0].token_ids) == 4
    finally:
        engine.close()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "sites", "reason"),
    [
        *((case.name, "resid_post", case.refusal) for case in CASES if case.refusal),
        ("falcon_h1", "attn_out,resid_post", "attn_out: FalconH1ParallelHybrid"),
        ("nemotron_h", "mlp_out,resid_post", "mlp_out: NemotronHMambaDecoderLayer"),
        ("deepseek_v2", "q,k,resid_post", r"this model has no q: .* \(MLA\)"),
    ],
)
def test_what_an_architecture_lacks_is_refused_with_the_reason(
    name: str, sites: str, reason: str, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.name == name)
    options = {"in_process": True, "enforce_eager": True} | case.cpu_options
    check_refusal(case, tmp_path, sites, reason, **options)
