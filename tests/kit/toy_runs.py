"""A transformer of a few numbers, as patching sees an engine; what it should find is arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspect_lens._patching.runs import Rows, Run
from inspect_lens.patch import Prompt
from inspect_lens.spec import (
    CaptureReceipt,
    LensRequest,
    Receipt,
    Replace,
    Site,
    SteerReceipt,
    as_tensor_data,
    encode_tensor,
    parse_extra_args,
    result_name,
)

from .fake_server import FakeLensServer

__all__ = ["ToyRuns", "ToyServer"]

WORDS = (
    "<s>", "The", " river", " town", " Tal", " Talk", "mo", " Vel", "osh", " is", " in", " Verun",
    " Sar",
)  # fmt: skip


class ToyRuns:
    """Adds the mean of all tokens up to each, squashed; the last row times a matrix is the logits.

    Args:
        layers: of the model.
        width: of its stream.
    """

    def __init__(self, layers: int = 3, width: int = 6) -> None:
        rng = np.random.default_rng(0)
        self.layers = layers
        self.embedding = rng.standard_normal((len(WORDS), width))
        self.mix = rng.standard_normal((layers, width, width))
        self.unembed = rng.standard_normal((width, len(WORDS)))
        self.asked: list[Run] = []

    def tokens(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(i) for i in prompt]  # type: ignore[arg-type]
        rest, found = prompt, [0]
        while rest:
            word = max((w for w in WORDS if rest.startswith(w)), key=len)
            found.append(WORDS.index(word))
            rest = rest.removeprefix(word)
        return found

    def texts(self, ids: Sequence[int]) -> list[str]:
        return [WORDS[i] for i in ids]

    def capture(self, ids: Sequence[int], layers: Sequence[int] | None, site: Site) -> Rows:
        rows = self.run(Run(ids))
        if site == "resid_pre":
            rows = np.concatenate([self.embedding[None, list(ids)], rows[:-1]])
        at = tuple(range(self.layers)) if layers is None else tuple(layers)
        return Rows(at, rows[list(at)].astype(np.float32))

    def logprobs(
        self, runs: Sequence[Run], tokens: Sequence[int], in_flight: int
    ) -> Iterator[tuple[int, tuple[float, ...]]]:
        self.asked += runs
        # As a server answers: in another order.
        for i in reversed(range(len(runs))):
            found = self.logits(runs[i])
            found = found - np.log(np.exp(found).sum())
            yield i, tuple(float(found[token]) for token in tokens)

    def logits(self, run: Run) -> NDArray[np.float64]:
        """Logits behind the last token, (words,)."""
        made: NDArray[np.float64] = self.run(run)[-1, -1] @ self.unembed
        return made

    def run(self, run: Run) -> NDArray[np.float64]:
        """(layers, tokens, width) after each block, with the run's edits."""
        h = _edited(self.embedding[list(run.ids)], run, "resid_pre", 0)
        rows = []
        for layer in range(self.layers):
            seen = np.cumsum(h, axis=0) / np.arange(1, len(h) + 1)[:, None]
            h = _edited(h + np.tanh(seen @ self.mix[layer]), run, "resid_post", layer)
            rows.append(h)
        return np.stack(rows)


def _edited(h: NDArray[np.float64], run: Run, site: Site, layer: int) -> NDArray[np.float64]:
    made = h.copy()
    for edit in run.edits:
        assert isinstance(edit, Replace)
        if edit.site == site and layer in edit.layers:
            rows = edit.rows.to_float32()[edit.layers.index(layer)]
            assert isinstance(edit.positions, tuple)
            at = [int(p) for p in edit.positions]
            made[at] = (1 - edit.alpha) * made[at] + edit.alpha * rows
    return made


class ToyServer(FakeLensServer):
    """The toy behind `/v1/completions`, as vLLM answers it.

    Args:
        toy: that answers.
        knows_tokens: whether completions take `logprob_token_ids`; older releases pass it over.
    """

    def __init__(self, toy: ToyRuns, *, knows_tokens: bool = True) -> None:
        super().__init__(model="org/toy")
        self._toy = toy
        self._knows_tokens = knows_tokens

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Answer a completion of one token."""
        self.requests.append(body)
        prompt = body["prompt"]
        ids = self._toy.tokens(prompt)
        request = parse_extra_args(body.get("vllm_xargs")) or LensRequest()
        run = Run(ids, request.edits)
        choice: dict[str, Any] = {"text": "", "prompt_token_ids": ids, "token_ids": [1]}
        answer: dict[str, Any] = {"choices": [choice]}
        capture, steer = None, None
        if request.capture is not None:
            assert isinstance(request.capture.site, str)
            named = request.capture.layers
            layers = None if isinstance(named, str) else named
            rows = self._toy.capture(ids, layers, request.capture.site)
            name = result_name(request.capture.site)
            tensor = as_tensor_data(rows.values, field="rows")
            answer["activations"] = {name: encode_tensor(tensor)}
            capture = CaptureReceipt(
                layers=rows.layers, n_positions=len(ids), dtype="float32",
                rows=rows.values[..., 0].size,
            )  # fmt: skip
        if request.edits:
            steer = SteerReceipt(layers=(0,), n_tokens=1, vectors=())
        if request.capture is not None or request.edits:
            answer["inspect_lens"] = Receipt(
                n_prompt=len(ids), n_completion=1, capture=capture, steer=steer, cache_salted=False,
                paths=("eager",), engine="inspect_lens", version="0", vllm_version="0",
            ).model_dump(mode="json", exclude_none=True)  # fmt: skip
        if "logprobs" in body:
            wanted = body["logprob_token_ids"] if self._knows_tokens else [1]
            ((_, values),) = self._toy.logprobs([run], wanted, 1)
            assert body["return_tokens_as_token_ids"]
            named_values = {f"token_id:{t}": v for t, v in zip(wanted, values, strict=True)}
            choice["logprobs"] = {"token_logprobs": [values[0]], "top_logprobs": [named_values]}
        return 200, answer
