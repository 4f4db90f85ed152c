"""`feed_again`: the tokens of a store through another engine, to compare the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import anyio
import numpy as np
from inspect_ai.model import Model
from numpy.typing import NDArray

from inspect_lens._base.arguments import judged_arguments
from inspect_lens._base.concurrency import together
from inspect_lens._base.progress import progress_bar
from inspect_lens.data import Captured
from inspect_lens.errors import SpecError
from inspect_lens.model import recapture
from inspect_lens.probe import CaptureFacts

from ._collect import opened, reached, rows_at

__all__ = ["FedAgain", "feed_again"]


class FedAgain(NamedTuple):
    """Rows of known tokens, as another engine computes them."""

    acts: tuple[NDArray[np.float32], ...]
    """Per sample (layers, rows, hidden), at the positions that the sample has."""
    capture: CaptureFacts
    """What computed them; empty where the server does not tell."""


@judged_arguments
async def feed_again(
    model: str | Model,
    samples: Sequence[Captured],
    *,
    layers: Sequence[int],
    concurrency: int = 64,
    progress: bool = True,
    model_args: dict[str, Any] | None = None,
) -> FedAgain:
    """Feed the very tokens of stored samples to a model again, and keep the rows that they have.

    Nothing is sampled and no chat template is rendered, so what differs from the stored rows is
    what the engine computes: its release, data type, quantisation, kernels and weights.

    Args:
        model: `vllm-lens/…` or `lens/…`, or a model of one of these.
        samples: as `ActivationStore.samples` gives them, with or without their rows; those that
            have no positions are refused.
        layers: to capture, ascending.
        concurrency: requests at once.
        progress: show a bar on a terminal.
        model_args: for `get_model`, such as `base_url`.

    Raises:
        SpecError: a sample has no rows, `concurrency` is below 1, or the model's name is wrong.
        UnsupportedError: the model's provider cannot.
        CaptureError: the server refused or returned no activations.

    Example:
        <!-- test: server -->
        ```python
        from functools import partial

        import anyio

        from inspect_lens.collect import collect, feed_again
        from inspect_lens.data import load_dataset

        data = load_dataset("organism", path="organism/data/probe_train.jsonl", limit=4)
        model = "vllm-lens/organism/checkpoint"
        store = collect(model, data, "acts/four", layers=[4], max_tokens=8, progress=False)
        run = partial(feed_again, model, list(store.samples()), layers=[4], progress=False)
        again = anyio.run(run)
        assert [a.shape[1] for a in again.acts] == [r.n_rows for r in store.records()]
        ```
    """
    if concurrency < 1:
        raise SpecError(f"concurrency={concurrency}; allowed are 1 or more")
    if empty := next((s.record.id for s in samples if not s.positions), None):
        raise SpecError(f"samples: {empty} has no rows; leave such samples out")
    requests = anyio.Semaphore(concurrency)
    async with AsyncExitStack() as stack:
        live = await stack.enter_async_context(opened(model, concurrency, model_args))
        capture = await reached(live)
        tick = stack.enter_context(
            progress_bar(
                "fed again", total=len(samples), done=0, show=progress, at_once=concurrency
            )
        )

        async def one(sample: Captured) -> NDArray[np.float32]:
            ids, n = sample.token_ids, sample.record.n_prompt
            n_fed = max(sample.positions) + 1
            # `recapture` leaves out the last token that it is given, so any stands behind these.
            prompt, rest = ids[:n], (*ids[n : max(n_fed, n)], ids[0])
            async with requests:
                handle = await recapture(
                    live, prompt_token_ids=prompt, token_ids=rest, layers=list(layers)
                )
                rows = await anyio.to_thread.run_sync(rows_at, handle, sample.positions)
            assert rows is not None
            tick()
            return rows.to_float32()

        made = await together(*(one(sample) for sample in samples))
    return FedAgain(tuple(made), capture)
