"""Requests of an offline engine whose outputs come step by step, as `AsyncLLM` gives them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspect_lens._base.partial import Partial

_keys = count()


def outputs_of(
    llm: Any, asked: Sequence[tuple[Sequence[int], dict[str, Any] | None]], **sampling: Any
) -> Iterator[list[Any]]:
    """Run prompts with what each asks; the outputs of each step, whose request ids are `0`, `1`…"""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    names = {}
    for i, (prompt, extra) in enumerate(asked):
        given = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "max_tokens": 8}
        params = SamplingParams(
            output_kind=RequestOutputKind.DELTA, extra_args=extra, **(given | sampling)
        )
        names[f"streamed-{next(_keys)}"] = str(i)
        name = list(names)[-1]
        llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
    while llm.llm_engine.has_unfinished_requests():
        found = llm.llm_engine.step()
        for output in found:
            output.request_id = names[output.request_id]
        yield found


class Joined:
    """All that came of one choice."""

    def __init__(self) -> None:
        self.parts: list[Partial] = []
        self.token_ids: list[int] = []
        self.sizes: list[tuple[int, int]] = []
        """Of each output: tokens of the text so far, and rows so far."""
        self.last: Any = None

    def add(self, completion: Any, name: str) -> None:
        """Take an output's choice."""
        self.token_ids += list(completion.token_ids)
        part = completion.__dict__.get("inspect_lens_partial")
        if part is not None:
            self.parts.append(part)
        if completion.finish_reason is not None:
            self.last = completion
        self.sizes.append((len(self.token_ids), len(self.positions(name))))

    def positions(self, name: str) -> list[int]:
        """Positions of all parts of a tensor."""
        return [p for part in self.parts for p in part.positions.get(name, ())]

    def rows(self, name: str) -> NDArray[Any]:
        """All parts of a tensor, along the tokens."""
        found = [part.tensors[name].storage for part in self.parts if name in part.tensors]
        return np.concatenate(found, axis=1)


def joined(steps: Iterator[list[Any]], name: str = "residual_stream") -> dict[tuple[int, int], Any]:
    """What came of each request and choice, by their indices."""
    found: dict[tuple[int, int], Joined] = {}
    for outputs in steps:
        for output in outputs:
            for completion in output.outputs:
                key = int(output.request_id), completion.index
                found.setdefault(key, Joined()).add(completion, name)
    return found
