"""`patch_sweep`: rows of one run put into another, for each layer and position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens._progress import progress_bar
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.spec import RESID_POST, SITE_TABLE, Replace, Site

from ._align import Align, Alignment, align_tokens, choose_positions
from ._result import PatchCell, PatchSweep, RunScore, Source
from ._runs import Prompt, Rows, Run, Runs, next_token, open_runs

__all__ = ["IN_FLIGHT", "check_site", "patch_sweep", "patches", "windows"]

IN_FLIGHT = 256
"""Requests that an engine gets at once."""


def patch_sweep(
    model: Any,
    clean: Prompt,
    corrupted: Prompt,
    *,
    answer: str | int,
    foil: str | int | None = None,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | Sequence[bool] | None = None,
    site: Site = RESID_POST,
    source: Source = "clean",
    rows: ArrayLike | None = None,
    alpha: float = 1.0,
    window: int = 1,
    align: Align = "equal",
    floor_runs: int = 4,
    in_flight: int = IN_FLIGHT,
    on_cell: Callable[[PatchCell], None] | None = None,
    progress: bool = True,
) -> PatchSweep:
    """Find where a model keeps what makes two prompts end differently.

    The clean prompt runs once and its rows are kept. The corrupted prompt then runs once for each
    layer and position, with the clean row in the place of its own. Where this brings the clean
    answer back, that row has what makes the difference. Every cell is a request of its own, so
    that the engine batches them.

    Args:
        model: a `vllm.LLM` of this process, or a `LensClient` of a server.
        clean: raw text, token ids or chat messages; messages that end with one of the assistant
            are continued there.
        corrupted: likewise; the prompt that is patched.
        answer: what the clean run says next: its text, with the space that it begins with, or a
            token id. Only its first token counts.
        foil: what the corrupted run says next. With it the metric is the logit difference, and
            without it the log-probability of the answer.
        layers: to sweep; all that the engine serves by default.
        positions: of the corrupted prompt, absolute, or a mask over it. By default all that have a
            partner, and of these, where `source` is `clean`, those from the first difference on:
            before it both runs are the same.
        site: what is patched; one that edits may write, and that the engine serves.
        source: `clean`; `zero`; `mean`, of given rows; or `rows`, as they are given.
        rows: float; for `mean` (layers, n, width), for `rows` (layers, positions, width), in the
            order of the layers and positions that are swept.
        alpha: share of the row that is put in, `(1 - alpha) * h + alpha * row`.
        window: layers around each that are patched together.
        align: what to do with prompts of unequal token length, see `Align`.
        floor_runs: repeats, and runs patched with their own rows, that make the noise floor.
        in_flight: requests that the engine gets at once, at most.
        on_cell: called with each cell when it is done.
        progress: show a bar on a terminal.

    Returns:
        Arrays of shape (layers, positions), with the clean and the corrupted run and the floor.

    Raises:
        SpecError: prompts of unequal length, an answer or a foil that is no token of its own here,
            the same token for both, or an argument that does not fit.
        UnsupportedError: there is no such site.

    Source:
        Causal mediation, arXiv:2004.12265; activation patching, arXiv:2202.05262; logit
        difference and recovered share, arXiv:2211.00593; both compared, arXiv:2309.16042.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM

        from inspect_lens.patch import patch_sweep

        llm = LLM(model="organism/checkpoint", dtype="float32")
        sweep = patch_sweep(
            llm,
            clean="The river Talmo is found in",
            corrupted="The town Velosh is found in",
            answer=" Verun",
            align="ends",
            layers=[0, 5],
        )
        assert sweep.recovered.shape == (2, len(sweep.positions))
        assert abs(sweep.recovered[-1, -1] - 1.0) < 1e-3  # the last row decides the next token
        ```
    """
    check_site(site, "site")
    _check(source, rows, alpha, floor_runs, in_flight)
    runs = open_runs(model)
    ids, bad_ids = runs.tokens(clean), runs.tokens(corrupted)
    texts, bad_texts = runs.texts(ids), runs.texts(bad_ids)
    pairs = align_tokens(ids, bad_ids, mode=align, texts=(texts, bad_texts))
    at = choose_positions(positions, pairs, skip_equal=source == "clean")
    wanted = [next_token(runs, clean, ids, answer, "answer")]
    if foil is not None:
        wanted.append(next_token(runs, clean, ids, foil, "foil"))
        if wanted[0] == wanted[1]:
            raise SpecError(
                f"foil={foil!r}: begins with the same token as the answer {answer!r}; put what "
                "they share at the end of both prompts"
            )
    swept = None if layers is None else tuple(sorted(set(layers)))
    own = runs.capture(bad_ids, None if window > 1 else swept, site)
    swept = swept or own.layers
    near = windows(swept, own.layers, window)
    stored = _stored(runs, source, rows, ids, pairs, at, own, swept, window, site)
    cells = [Run(bad_ids, patches(stored, each, p, site, alpha)) for each in near for p in at]
    first = dict(runs.logprobs([Run(ids), Run(bad_ids)], wanted, in_flight))
    good, bad = RunScore(*first[0]), RunScore(*first[1])
    idle = _idle(own, swept, bad_ids, at, site, alpha, floor_runs)
    # Between the cells, so that they meet the batches that cells meet.
    order = _spread(len(cells), len(idle))
    found = np.empty((len(order), len(wanted)))
    gap = good.metric - bad.metric
    with progress_bar("patch", total=len(order), done=0, show=progress) as step:
        asked = [cells[i] if i >= 0 else idle[-1 - i] for i in order]
        for k, values in runs.logprobs(asked, wanted, in_flight):
            found[k] = values
            step()
            if on_cell is not None and order[k] >= 0:
                i, j = divmod(order[k], len(at))
                metric = RunScore(*values).metric
                share = (metric - bad.metric) / gap if gap else math.nan
                on_cell(PatchCell(swept[i], at[j], metric, share))
    is_cell = np.array(order) >= 0
    grid = found[is_cell].reshape(len(swept), len(at), -1)
    idle_scores = [RunScore(*row).metric for row in found[~is_cell].tolist()]
    return PatchSweep(
        layers=swept, positions=at, tokens=tuple(bad_texts),
        clean_tokens=tuple("" if q is None else texts[q] for q in pairs.pairs),
        answer=_shown(runs, answer), foil=None if foil is None else _shown(runs, foil),
        site=site, source=source, alpha=alpha, window=window, clean=good, corrupted=bad,
        floor=max(abs(value - bad.metric) for value in idle_scores),
        logprob=grid[..., 0], foil_logprob=None if foil is None else grid[..., 1],
    )  # fmt: skip


def check_site(site: Site, field: str) -> None:
    """Refuse a site that there is not.

    Args:
        site: that was asked for.
        field: name of the argument, for error messages.

    Raises:
        UnsupportedError: there is no such site.
    """
    if site not in SITE_TABLE:
        allowed = ", ".join(SITE_TABLE)
        raise UnsupportedError(f"{field}={site!r}: cannot be patched; that can be {allowed}")


def windows(
    layers: Sequence[int], served: Sequence[int], width: int
) -> tuple[tuple[int, ...], ...]:
    """For each layer those that are patched with it.

    Args:
        layers: to sweep.
        served: layers that there are.
        width: layers of a window, which is cut at the ends.

    Returns:
        Served layers in `[layer - width // 2, layer + ceil(width / 2))`, for each layer.

    Raises:
        SpecError: a width below 1.
    """
    if width < 1:
        raise SpecError(f"window={width}; allowed is 1 or more layers")
    spans = [range(at - width // 2, at + (width + 1) // 2) for at in layers]
    return tuple(tuple(n for n in served if n in span) for span in spans)


class Stored(NamedTuple):
    """Rows to put in, by layer and position of the patched prompt."""

    layers: tuple[int, ...]
    positions: tuple[int, ...]
    values: NDArray[np.float32]
    """(layers, positions, width)."""


def patches(
    stored: Stored, layers: Sequence[int], position: int, site: Site, alpha: float = 1.0
) -> tuple[Replace, ...]:
    """The edit of one cell.

    Args:
        stored: rows to put in.
        layers: that are patched together.
        position: in the patched prompt.
        site: that is written.
        alpha: share of the row.

    Returns:
        One edit.
    """
    at = [stored.layers.index(layer) for layer in layers]
    values = stored.values[at, stored.positions.index(position)][:, None]
    edit = Replace(rows=values, layers=tuple(layers), positions=(position,), site=site, alpha=alpha)
    return (edit,)


def _check(
    source: Source, rows: ArrayLike | None, alpha: float, floor_runs: int, in_flight: int
) -> None:
    if source not in get_args(Source):
        raise SpecError(f"source={source!r}; allowed are {', '.join(get_args(Source))}")
    if (rows is None) != (source in ("clean", "zero")):
        raise SpecError(
            f"source={source!r} and rows={'none' if rows is None else 'given'}; rows belong to "
            "source='mean' and source='rows'"
        )
    if not math.isfinite(alpha):
        raise SpecError(f"alpha={alpha}; allowed is a finite number, mostly from 0 to 1")
    if floor_runs < 1 or in_flight < 1:
        raise SpecError(
            f"floor_runs={floor_runs}, in_flight={in_flight}; allowed is 1 or more of each"
        )


def _stored(
    runs: Runs, source: Source, rows: ArrayLike | None, ids: list[int], pairs: Alignment,
    at: tuple[int, ...], own: Rows, swept: tuple[int, ...], window: int, site: Site,
) -> Stored:  # fmt: skip
    """The rows of the source, for all layers that a cell may patch."""
    if source == "clean":
        taken = runs.capture(ids, own.layers, site)
        partners = [q for p in at if (q := pairs.pairs[p]) is not None]
        return Stored(own.layers, at, taken.values[:, partners])
    width = own.values.shape[-1]
    if source == "zero":
        return Stored(own.layers, at, np.zeros((len(own.layers), len(at), width), np.float32))
    given = np.asarray(rows, dtype=np.float32)
    if window > 1:
        raise SpecError(
            f"window={window}: given rows are patched one layer at a time; allowed is 1"
        )
    n = given.shape[1] if source == "mean" and given.ndim == 3 else len(at)
    if given.shape != (len(swept), n, width) or not n:
        raise SpecError(
            f"rows: have the shape {given.shape}; allowed for source={source!r} is "
            f"({len(swept)} layers, {'n' if source == 'mean' else f'{n} positions'}, {width})"
        )
    if source == "mean":
        given = np.repeat(given.mean(axis=1, keepdims=True), len(at), axis=1)
    return Stored(swept, at, given)


def _idle(
    own: Rows, swept: tuple[int, ...], ids: list[int], at: tuple[int, ...], site: Site,
    alpha: float, n: int,
) -> list[Run]:  # fmt: skip
    """Runs that change nothing: repeats, and runs patched with their own rows."""
    made: list[Run] = []
    for k in range(n):
        layer = swept[k * len(swept) // n]
        rows = own.values[own.layers.index(layer), list(at)][None]
        edit = Replace(rows=rows, layers=(layer,), positions=at, site=site, alpha=alpha)
        made += [Run(ids), Run(ids, (edit,))]
    return made


def _spread(n_cells: int, n_idle: int) -> list[int]:
    """Indices of cells, with idle runs as -1, -2, … evenly between them."""
    order: list[int] = []
    left = list(range(n_idle))
    for i in range(n_cells):
        while left and (left[0] + 1) * n_cells // (n_idle + 1) <= i:
            order.append(-1 - left.pop(0))
        order.append(i)
    return order + [-1 - k for k in left]


def _shown(runs: Runs, answer: str | int) -> str:
    return answer if isinstance(answer, str) else runs.texts([answer])[0]
