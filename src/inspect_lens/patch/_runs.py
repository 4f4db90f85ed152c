"""The two engines that patching asks: one in this process, and a server."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, cast

from inspect_lens._base.token_texts import TokenTexts
from inspect_lens._patching.runs import (
    Prompt,
    Rows,
    Run,
    Runs,
    capture_spec,
    chat_ending,
    is_chat,
    messages_of,
)
from inspect_lens.client import LensClient
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.spec import LensRequest, Site, result_name

SERVER_REQUESTS = 64
"""Requests in flight at a server, at most."""


def open_runs(model: Any) -> Runs:
    """Find out what kind of engine this is."""
    if isinstance(model, LensClient):
        return _Served(model)
    if hasattr(model, "llm_engine"):
        return _Offline(model)
    raise SpecError(
        f"model={type(model).__name__}; allowed are a vllm.LLM and an inspect_lens LensClient; in "
        "an Inspect task use the solvers patch_sweep and causal_trace"
    )


class _Offline:
    """A `vllm.LLM` of this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._params: Any = importlib.import_module("vllm").SamplingParams

    def tokens(self, prompt: Prompt) -> list[int]:
        tokenizer = self._llm.get_tokenizer()
        if isinstance(prompt, str):
            return list(tokenizer.encode(prompt))
        if not is_chat(prompt):
            return list(cast("Sequence[int]", prompt))
        text = tokenizer.apply_chat_template(
            messages_of(prompt), tokenize=False, **chat_ending(prompt)
        )
        return list(tokenizer.encode(text, add_special_tokens=False))

    def texts(self, ids: Sequence[int]) -> list[str]:
        tokenizer = self._llm.get_tokenizer()
        return [str(tokenizer.decode([i])) for i in ids]

    def capture(self, ids: Sequence[int], layers: Sequence[int] | None, site: Site) -> Rows:
        request = LensRequest(capture=capture_spec(layers, site))
        params = self._params(max_tokens=1, temperature=0, extra_args={"inspect_lens": request})
        (output,) = self._llm.generate([{"prompt_token_ids": list(ids)}], params, use_tqdm=False)
        values = output.activations[result_name(site)].float().numpy()
        return Rows(tuple(output.inspect_lens.capture.layers), values)

    def logprobs(
        self, runs: Sequence[Run], tokens: Sequence[int], in_flight: int
    ) -> Iterator[tuple[int, tuple[float, ...]]]:
        for start in range(0, len(runs), in_flight):
            part = runs[start : start + in_flight]
            params = [self._ask(run, tokens) for run in part]
            prompts = [{"prompt_token_ids": list(run.ids)} for run in part]
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
            for i, output in enumerate(outputs):
                found = output.outputs[0].logprobs[0]
                yield start + i, tuple(float(found[token].logprob) for token in tokens)

    def _ask(self, run: Run, tokens: Sequence[int]) -> Any:
        extra = {"inspect_lens": LensRequest(edits=run.edits)} if run.edits else None
        return self._params(
            max_tokens=1, temperature=0, logprob_token_ids=list(tokens), extra_args=extra,
            detokenize=False,
        )  # fmt: skip


class _Served:
    """A server, through its plain client."""

    def __init__(self, client: LensClient) -> None:
        self._client = client
        self._texts: TokenTexts | None = None

    def tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            output = self._client.generate(prompt, max_tokens=1)
        elif is_chat(prompt):
            output = self._client.chat(messages_of(prompt), max_tokens=1, **chat_ending(prompt))
        else:
            return list(cast("Sequence[int]", prompt))
        return list(output.prompt_token_ids)

    @property
    def where(self) -> str:
        return f"{self._client.model!r} (so named by the server at {self._client.base_url})"

    def texts(self, ids: Sequence[int]) -> list[str]:
        if self._texts is None:
            self._texts = TokenTexts.of(f"vllm-lens/{self._client.model}")
        return self._texts.texts(ids)

    def capture(self, ids: Sequence[int], layers: Sequence[int] | None, site: Site) -> Rows:
        output = self._client.generate(list(ids), max_tokens=1, capture=capture_spec(layers, site))
        if output.activations is None or output.receipt is None or output.receipt.capture is None:
            raise CaptureError(
                "patching: the server gives no receipts; run it with the inspect-lens plug-in"
            )
        values = output.activations.numpy(result_name(site))
        return Rows(tuple(output.receipt.capture.layers), values)

    def logprobs(
        self, runs: Sequence[Run], tokens: Sequence[int], in_flight: int
    ) -> Iterator[tuple[int, tuple[float, ...]]]:
        with ThreadPoolExecutor(min(in_flight, SERVER_REQUESTS)) as pool:
            asked = {pool.submit(self._ask, runs, i, tokens): i for i in range(len(runs))}
            try:
                for done in as_completed(asked):
                    yield asked[done], done.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _ask(self, runs: Sequence[Run], i: int, tokens: Sequence[int]) -> tuple[float, ...]:
        run = runs[i]  # read here: whoever makes runs may do so when they are asked for
        lens: dict[str, Any] = {"inspect_lens": LensRequest(edits=run.edits)} if run.edits else {}
        output = self._client.generate(
            list(run.ids),
            max_tokens=1,
            logprobs=1,
            logprob_token_ids=list(tokens),
            return_tokens_as_token_ids=True,
            **lens,
        )
        (found,) = (output.logprobs or {}).get("top_logprobs") or [{}]
        try:
            return tuple(float(found[f"token_id:{token}"]) for token in tokens)
        except KeyError:
            raise CaptureError(
                "patching: the server returned no log-probabilities of chosen tokens; it needs a "
                "vLLM whose completions take logprob_token_ids, such as 0.32"
            ) from None
