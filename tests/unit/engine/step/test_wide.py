"""Taps that are wider or narrower than the stream, and ranks that share their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.collect.collector import Collector
from inspect_lens._engine.protocol.messages import QK, ROWS, SCORES, seal
from inspect_lens._engine.readout.reduce import HeadCut
from inspect_lens._engine.step.exporter import Sender
from inspect_lens._engine.step.stepper import Stepper
from inspect_lens._engine.tap import buffers
from inspect_lens._engine.tap.buffers import TapState, install
from inspect_lens._engine.tap.op import tap
from inspect_lens._vllm.registered.rows import named_tensors, tensors_by_name
from inspect_lens.spec import Site, SiteWidth, TapPoint, rows_for, tap_points
from tests.kit.steps import FACTS, HIDDEN, exporter

RANKS = 4
HEAD = 6
"""A rank has two query heads, of which the second lies in two rows of the ring."""
WIDTHS = (
    SiteWidth("q", 4 * 12, RANKS, 8),
    SiteWidth("k", 2 * 12, 2, 4),  # four key heads over four ranks that share them in pairs
    SiteWidth("router_logits", 5),
    SiteWidth("mlp_hidden", 4 * 20, RANKS),
)
SITES: tuple[Site, ...] = ("q", "k", "router_logits", "mlp_hidden", "resid_post")
LAYERS = (0, 2)
TAPS = tap_points(SITES, LAYERS)
WIDE = replace(
    FACTS, layers=LAYERS, sites=SITES, taps=TAPS, widths=WIDTHS, ranks=RANKS, ring_rows=1 << 10
)


def truth(point: TapPoint, n: int) -> torch.Tensor:
    """(tokens, width) of a tap, over all ranks."""
    width = WIDE.width_of(point.site).width
    generator = torch.Generator().manual_seed(100 * SITES.index(point.site) + point.layer)
    return torch.randn(n, width, generator=generator)


def by_head(rows: torch.Tensor) -> torch.Tensor:
    """(…, heads, head size) of (…, width)."""
    return rows.reshape(*rows.shape[:-1], -1, HEAD)


class Rank:
    """One of the tensor-parallel workers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        widths = [WIDE.width_of(point.site) for point in TAPS]
        self.state = TapState(
            taps=TAPS, hidden=HIDDEN, dtype=torch.float32, max_tokens=32, max_groups=4,
            ring_rows=1 << 10, bank_rows=2, device=torch.device("cpu"), sum_rows=64 * (not rank),
            tap_rows=[rows_for(width, HIDDEN) for width in widths],
        )  # fmt: skip
        self.ctls = [self.state.new_ctl(i) for i in range(len(TAPS))]
        install(self.state)
        self.stepper = Stepper(self.state, exporter(), rank=rank)

    def step(self, first: int, n: int, total: int) -> None:
        """Feed some tokens of the one request, behind two of somebody else."""
        counts, at = np.asarray([2, n]), np.asarray([0, first])
        self.stepper.begin(["x", "a"], np.asarray([0, 2]), counts, at)
        for point, ctl in zip(TAPS, self.ctls, strict=True):
            width = WIDE.width_of(point.site)
            own = self.rank * width.shards // RANKS
            share = truth(point, total).chunk(width.shards, dim=1)[own]
            # As a view of something wider, which queries and keys are.
            rows = torch.cat([torch.zeros_like(share[:2]), share[first : first + n]])
            wide = torch.cat([rows, rows], dim=1)
            tap(wide[:, : rows.shape[1]], None, ctl)
        self.stepper.end_step("eager")


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    made = [Rank(rank) for rank in range(RANKS)]
    yield made
    for rank in made:
        buffers.uninstall(rank.state)
        rank.stepper.close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def run(ranks: list[Rank], collector: Collector, request: LensRequest) -> tuple[Any, Any]:
    """Feed eleven tokens in chunks and single steps."""
    envelope = seal(request, WIDE, reply=collector.address, n_prompt=7, max_tokens=5)
    collector.open("a", envelope)
    for rank in ranks:
        rank.stepper.add("a", dict(envelope.pack()))
        for first, n in ((0, 3), (3, 4), (7, 1), (8, 1), (9, 1), (10, 1)):
            rank.step(first, n, 11)
        rank.stepper.remove("a")
    capture = envelope.capture
    n = 0
    if capture is not None:
        n = len(capture.positions or range(capture.lo, min(capture.hi, 11)))
    counts = {ROWS: n, SCORES: 0, QK: 11 if envelope.qk is not None else 0}
    return envelope, collector.take("a", counts=counts, n_fed=11, timeout_s=5)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("positions", ["all", [1, 5, 8]])
def test_rows_have_the_width_of_their_site(
    ranks: list[Rank], collector: Collector, site: Site, positions: Any
) -> None:
    request = LensRequest(capture=CaptureSpec(layers=LAYERS, site=site, positions=positions))
    envelope, collected = run(ranks, collector, request)
    (found,) = tensors_by_name(collected.tensors[ROWS], envelope.capture).values()
    at = list(range(11)) if positions == "all" else positions
    expected = np.stack([truth(TapPoint(site, n), 11)[at].numpy() for n in LAYERS])
    np.testing.assert_array_equal(found.storage, expected)
    for rank in ranks:
        assert rank.stepper.n_requests == 0


@pytest.mark.parametrize("reduce", ["mean", "max", "last", "norm"])
def test_reductions_of_all_widths_at_once(
    ranks: list[Rank], collector: Collector, reduce: Any
) -> None:
    request = LensRequest(capture=CaptureSpec(layers=LAYERS, site=SITES, reduce=reduce))
    envelope, collected = run(ranks, collector, request)
    found = tensors_by_name(collected.tensors[ROWS], envelope.capture)
    for site in SITES:
        rows = torch.stack([truth(TapPoint(site, n), 11) for n in LAYERS])
        expected = {
            "mean": rows.mean(dim=1, keepdim=True),
            "max": rows.amax(dim=1, keepdim=True),
            "last": rows[:, -1:],
            "norm": rows.norm(dim=-1, keepdim=True),
        }[reduce]
        name = "residual_stream" if site == "resid_post" else site
        np.testing.assert_allclose(found[name].storage, expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("capture", [None, {"layers": [2], "site": ["k", "resid_post"]}])
def test_queries_and_keys_come_beside_a_capture(
    ranks: list[Rank], collector: Collector, capture: Any
) -> None:
    if capture is not None:
        capture = capture | {"positions": [2, 9]}
    envelope, collected = run(ranks, collector, LensRequest(capture=capture, qk=True))
    found = tensors_by_name(collected.tensors[QK], envelope.qk)
    for site in ("q", "k"):
        expected = np.stack([truth(TapPoint(site, n), 11).numpy() for n in LAYERS])
        np.testing.assert_array_equal(found[site].storage, expected)
    if capture is not None:
        captured = tensors_by_name(collected.tensors[ROWS], envelope.capture)
        expected = truth(TapPoint("k", 2), 11)[[2, 9]].numpy()[None]
        np.testing.assert_array_equal(captured["k"].storage, expected)


@pytest.mark.parametrize("site", ["q", "k"])
@pytest.mark.parametrize("heads", [[3], [1, 0, 2]])
@pytest.mark.parametrize("reduce", ["none", "mean", "max", "last", "norm"])
@pytest.mark.parametrize("phase", ["both", "decode"])
def test_chosen_heads_are_those_of_a_whole_row(
    ranks: list[Rank], collector: Collector, site: Site, heads: list[int], reduce: Any, phase: Any
) -> None:
    request = LensRequest(
        capture=CaptureSpec(layers=LAYERS, site=site, heads=heads, reduce=reduce, phase=phase)
    )
    envelope, collected = run(ranks, collector, request)
    assert collected.tensors[ROWS].shape[::2] == (
        6 if len(heads) > 1 else 2,
        1 if reduce == "norm" else HEAD,
    )
    (found,) = tensors_by_name(collected.tensors[ROWS], envelope.capture).values()
    first = 0 if phase == "both" else 7
    rows = torch.stack([truth(TapPoint(site, n), 11)[first:] for n in LAYERS])
    chosen = by_head(rows)[:, :, heads].flatten(2)
    expected = {
        "none": chosen,
        "mean": chosen.mean(dim=1, keepdim=True),
        "max": chosen.amax(dim=1, keepdim=True),
        "last": chosen[:, -1:],
        "norm": chosen.norm(dim=-1, keepdim=True),
    }[reduce]
    np.testing.assert_allclose(found.storage, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_what_waits_to_be_sent_is_counted_by_the_heads_alone() -> None:
    def waits(heads: HeadCut | None) -> int | None:
        result = SimpleNamespace(
            form=None, gates=(), lens=None, readout=None, heads=heads, ranks=(0, 0, 1)
        )
        group = SimpleNamespace(is_live=False, crosses=False, results={ROWS: result})
        sender: Any = SimpleNamespace(
            sum_table=SimpleNamespace(rows_in_use=0), reducer=SimpleNamespace(resumed=()),
            _ring=torch.zeros(8, 64), _groups={0: group},
        )  # fmt: skip
        block: Any = SimpleNamespace(group=0, n_tokens=5)
        return Sender.bytes_that_wait(sender, [block])

    assert waits(None) == 3 * 5 * 64 * 4
    assert waits(HeadCut(HEAD, (0, HEAD, 0))) == 3 * 5 * HEAD * 4


def test_heads_of_several_sites_and_layers_come_beside_each_other(
    ranks: list[Rank], collector: Collector
) -> None:
    pairs = [(2, 5), (0, 7), (2, 4), (0, 1)]
    capture = CaptureSpec(layers=[2], site=("q", "k"), heads=[2, 0], positions=[1, 8])
    envelope, collected = run(ranks, collector, LensRequest(capture=capture, qk={"heads": pairs}))
    made = named_tensors(envelope, QK, collected.tensors[QK], {})
    queries = {n: by_head(truth(TapPoint("q", n), 11)) for n in LAYERS}
    keys = {n: by_head(truth(TapPoint("k", n), 11)) for n in LAYERS}
    wanted = torch.stack([queries[n][:, head] for n, head in sorted(pairs)])
    np.testing.assert_array_equal(made["attn_q"].storage, wanted.numpy())
    # Two query heads of layer 2 read the same key head.
    wanted = torch.stack([keys[0][:, 0], keys[0][:, 3], keys[2][:, 2]])
    np.testing.assert_array_equal(made["attn_k"].storage, wanted.numpy())
    captured = tensors_by_name(collected.tensors[ROWS], envelope.capture)
    for site, of in (("q", queries), ("k", keys)):
        rows = of[2][[1, 8]][:, [2, 0]].flatten(1)[None]
        np.testing.assert_array_equal(captured[site].storage, rows.numpy())


def test_ranks_without_a_share_tell_nothing(ranks: list[Rank], collector: Collector) -> None:
    request = LensRequest(capture=CaptureSpec(layers=LAYERS, site=("resid_post", "router_logits")))
    run(ranks, collector, request)
    told = [rank.stepper.arena.name in collector._workers for rank in ranks]
    assert told == [True, False, False, False]
