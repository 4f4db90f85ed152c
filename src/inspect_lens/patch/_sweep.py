"""`patch_sweep`: rows of one run put into another, for each layer and position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

from numpy.typing import ArrayLike

from inspect_lens._patching import (
    IN_FLIGHT,
    Align,
    CellDone,
    PatchCell,
    PatchSweep,
    Prompt,
    Source,
    SweepEvent,
    SweepSpec,
    SweepStarted,
    events_of,
    gather,
    sweep,
    to_body,
)
from inspect_lens._progress import progress_bar
from inspect_lens.client import LensClient
from inspect_lens.errors import SpecError
from inspect_lens.spec import RESID_POST, Site

from ._runs import open_runs

__all__ = ["Over", "patch_sweep"]

Over = Literal["requests", "server"]
"""`requests` sends one request per cell; `server` sends one for the whole sweep."""


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
    over: Over = "requests",
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
        over: `requests` sends each cell by itself. `server` sends one request, and the server runs
            the cells; it needs a `LensClient`.
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
    spec = SweepSpec(
        clean=clean, corrupted=corrupted, answer=answer, foil=foil, layers=layers,
        positions=positions, site=site, source=source, rows=rows, alpha=alpha, window=window,
        align=align, floor_runs=floor_runs, in_flight=in_flight,
    )  # fmt: skip
    spec.check()
    events = iter(_events(model, spec, over))
    start = next(events)
    assert isinstance(start, SweepStarted)
    n_cells = len(start.layers) * len(start.positions)
    with progress_bar("patch", total=n_cells, done=0, show=progress) as step:
        found: list[SweepEvent] = [start]
        for event in events:
            found.append(event)
            if isinstance(event, CellDone):
                step()
                if on_cell is not None:
                    on_cell(event.cell)
    return gather(found)


def _events(model: Any, spec: SweepSpec, over: Over) -> Iterator[SweepEvent]:
    if over not in get_args(Over):
        raise SpecError(f"over={over!r}; allowed are {', '.join(get_args(Over))}")
    if over == "requests":
        return sweep(open_runs(model), spec)
    if not isinstance(model, LensClient):
        raise SpecError(
            f"over='server' and model={type(model).__name__}; that needs a LensClient of a server, "
            "and an engine of this process takes over='requests'"
        )
    lines = model.stream_lines("/v1/inspect_lens/patch_sweep", to_body(spec, model.model))
    return events_of(lines)
