"""What patching asks of an engine, and the two that answer: one in this process, and a server."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from inspect_lens._token_texts import TokenTexts
from inspect_lens.client import LensClient
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.spec import CaptureSpec, EditBase, LensRequest, Site, result_name

__all__ = ["Prompt", "Rows", "Run", "Runs", "next_token", "open_runs"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Raw text, token ids, or chat messages. Messages that end with one of the assistant are continued
there; after any other the assistant begins to speak."""

SERVER_REQUESTS = 64
"""Requests in flight at a server, at most."""


class Run(NamedTuple):
    """One prompt to run once."""

    ids: Sequence[int]
    edits: tuple[EditBase, ...] = ()


class Rows(NamedTuple):
    """What a prompt's tokens have at some layers."""

    layers: tuple[int, ...]
    values: NDArray[np.float32]
    """(layers, tokens, width)."""


class Runs(Protocol):
    """An engine as patching uses it."""

    def tokens(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Text of each token."""

    def capture(self, ids: Sequence[int], layers: Sequence[int] | None, site: Site) -> Rows:
        """Rows of a prompt, at all served layers where None are named."""

    def logprobs(
        self, runs: Sequence[Run], tokens: Sequence[int], in_flight: int
    ) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Natural log-probabilities of tokens after each run, with its index, as they come."""


def open_runs(model: Any) -> Runs:
    """Find out what kind of engine this is.

    Args:
        model: a `vllm.LLM` of this process, or a `LensClient`.

    Returns:
        The engine as patching uses it.

    Raises:
        SpecError: it is neither.
    """
    if isinstance(model, LensClient):
        return _Served(model)
    if hasattr(model, "llm_engine"):
        return _Offline(model)
    raise SpecError(
        f"model={type(model).__name__}; allowed are a vllm.LLM and an inspect_lens LensClient; in "
        "an Inspect task use the solvers patch_sweep and causal_trace"
    )


def next_token(runs: Runs, prompt: Prompt, ids: Sequence[int], answer: str | int, name: str) -> int:
    """The first token of an answer behind a prompt.

    Args:
        runs: the engine.
        prompt: that the answer follows.
        ids: token ids of the prompt.
        answer: its text, with the space that it begins with, or a token id.
        name: of the argument, for error messages.

    Returns:
        The token id.

    Raises:
        SpecError: the text makes no token of its own behind this prompt.
    """
    if isinstance(answer, int):
        return answer
    if isinstance(prompt, str):
        longer: Prompt = prompt + answer
    elif _is_chat(prompt):
        *before, last = _messages(prompt)
        if last["role"] == "assistant":
            longer = [*before, last | {"content": f"{last['content']}{answer}"}]
        else:
            longer = [*before, last, {"role": "assistant", "content": answer}]
    else:
        raise SpecError(f"{name}={answer!r}: a prompt of token ids needs a token id here")
    found = runs.tokens(longer)
    n = len(ids)
    if len(found) <= n or list(found[:n]) != list(ids):
        raise SpecError(
            f"{name}={answer!r}: joins the last token of the prompt; let the prompt end before "
            "the space, and the answer begin with it, such as ' Paris'"
        )
    return int(found[n])


class _Offline:
    """A `vllm.LLM` of this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._params: Any = importlib.import_module("vllm").SamplingParams

    def tokens(self, prompt: Prompt) -> list[int]:
        tokenizer = self._llm.get_tokenizer()
        if isinstance(prompt, str):
            return list(tokenizer.encode(prompt))
        if not _is_chat(prompt):
            return list(cast("Sequence[int]", prompt))
        text = tokenizer.apply_chat_template(_messages(prompt), tokenize=False, **_ending(prompt))
        return list(tokenizer.encode(text, add_special_tokens=False))

    def texts(self, ids: Sequence[int]) -> list[str]:
        tokenizer = self._llm.get_tokenizer()
        return [str(tokenizer.decode([i])) for i in ids]

    def capture(self, ids: Sequence[int], layers: Sequence[int] | None, site: Site) -> Rows:
        request = LensRequest(capture=_capture(layers, site))
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
        elif _is_chat(prompt):
            output = self._client.chat(_messages(prompt), max_tokens=1, **_ending(prompt))
        else:
            return list(cast("Sequence[int]", prompt))
        return list(output.prompt_token_ids)

    def texts(self, ids: Sequence[int]) -> list[str]:
        if self._texts is None:
            self._texts = TokenTexts.of(f"vllm-lens/{self._client.model}")
        return self._texts.texts(ids)

    def capture(self, ids: Sequence[int], layers: Sequence[int] | None, site: Site) -> Rows:
        output = self._client.generate(list(ids), max_tokens=1, capture=_capture(layers, site))
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
            asked = {pool.submit(self._ask, run, tokens): i for i, run in enumerate(runs)}
            try:
                for done in as_completed(asked):
                    yield asked[done], done.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _ask(self, run: Run, tokens: Sequence[int]) -> tuple[float, ...]:
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


def _capture(layers: Sequence[int] | None, site: Site) -> CaptureSpec:
    wanted: Any = "all" if layers is None else tuple(layers)
    return CaptureSpec(layers=wanted, site=site, positions="prompt")


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    return [dict(message) for message in cast("Sequence[Mapping[str, Any]]", prompt)]


def _ending(prompt: Prompt) -> dict[str, Any]:
    """Arguments of the chat template: an answer that has begun goes on."""
    goes_on = _messages(prompt)[-1]["role"] == "assistant"
    return {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
