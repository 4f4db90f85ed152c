"""`patch_sweep`: rows of one run put into another, for each layer and position."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike

from inspect_lens._base.arguments import judged_arguments, one_or_several
from inspect_lens._base.progress import progress_bar
from inspect_lens._base.token_texts import TokenTexts
from inspect_lens._patching.result import CausalTrace, PatchCell, PatchSweep, Source
from inspect_lens._patching.runs import (
    Align,
    Alignment,
    Prompt,
    Rows,
    Run,
    Runs,
    capture_spec,
    chat_ending,
    choose_positions,
    find_subject,
    is_chat,
    messages_of,
    next_token,
    warn_without_space,
)
from inspect_lens._patching.sweep import (
    IN_FLIGHT,
    CellDone,
    Stored,
    SweepEvent,
    SweepSpec,
    events_of,
    gather,
    patches,
    sweep,
    to_body,
    windows,
)
from inspect_lens.client import LensClient
from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.spec import RESID_POST, LensRequest, Replace, Site, check_word, result_name

__all__ = ["Over", "causal_trace", "embedding_std", "patch_sweep"]

SERVER_REQUESTS = 64
"""Requests in flight at a server, at most."""


def open_runs(model: Any) -> Runs:
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


Over = Literal["requests", "server"]
"""`requests` sends one request per cell; `server` sends one for the whole sweep."""


@judged_arguments
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

    Warns:
        UserWarning: an answer or a foil begins without a space behind the last word of the prompt.

    Raises:
        SpecError: prompts of unequal length, an answer or a foil that is no token of its own here,
            the same token for both, or an argument that does not fit.
        UnsupportedError: the engine does not serve the site.

    Source:
        Causal mediation, arXiv:2004.12265; activation patching, arXiv:2202.05262; logit
        difference and recovered share, arXiv:2211.00593; both compared, arXiv:2309.16042.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM

        from inspect_lens.patch import patch_sweep

        llm = LLM(model="organism/checkpoint", dtype="float32")
        clean, corrupted = "The river Talmo is found in", "The town Velosh is found in"
        prompts = {"clean": clean, "corrupted": corrupted, "answer": " Verun"}
        sweep = patch_sweep(llm, **prompts, align="ends", layers=[0, 5])
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
    warn_without_space(clean, answer=answer, foil=foil)
    events = iter(_events(model, spec, over))
    start = next(events)
    assert isinstance(start, PatchSweep)
    with progress_bar("patch", total=start.logprob.size, done=0, show=progress) as step:
        found: list[SweepEvent] = [start]
        for event in events:
            found.append(event)
            if isinstance(event, CellDone):
                step()
                if on_cell is not None:
                    on_cell(event.cell)
    return gather(found)


def _events(model: Any, spec: SweepSpec, over: Over) -> Iterator[SweepEvent]:
    check_word("over", over, Over)
    if over == "requests":
        return sweep(open_runs(model), spec)
    if not isinstance(model, LensClient):
        raise SpecError(
            f"over='server' and model={type(model).__name__}; that needs a LensClient of a server, "
            "and an engine of this process takes over='requests'"
        )
    lines = model.stream_lines("/v1/inspect_lens/patch_sweep", to_body(spec, model.model))
    return events_of(lines)


EMBEDDING: Site = "resid_pre"
"""At layer 0 this is what the embedding gives to the first block, positions and scales included."""


@judged_arguments
def causal_trace(
    model: Any,
    prompt: Prompt,
    *,
    subject: str | Sequence[int],
    answer: str | int,
    noise: float = 3.0,
    std: float | None = None,
    draws: int = 10,
    seed: int = 0,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | Sequence[bool] | None = None,
    site: Site = RESID_POST,
    window: int = 1,
    in_flight: int = IN_FLIGHT,
    on_cell: Callable[[PatchCell], None] | None = None,
    progress: bool = True,
) -> CausalTrace:
    """Find where a model keeps a fact about a subject, with one prompt and no second one.

    Gaussian noise at the subject's embeddings makes the model forget the answer. Then one row of
    the clean run at a time is put back, for each layer and position. The probability that comes
    back is the indirect effect of that row; it is averaged over draws of the noise.

    The noise goes in where the first block reads (`resid_pre` of layer 0), by an edit that puts
    embedding plus noise in the place of each subject token. So the engine needs a tap there, which
    it has by default.

    Args:
        model: a `vllm.LLM` of this process, or a `LensClient` of a server.
        prompt: raw text, token ids or chat messages, that end where the answer begins.
        subject: its text, which stands in the prompt once, or the positions of its tokens.
        answer: its text, with the space that it begins with, or a token id. Only its first token
            counts.
        noise: standard deviations of the noise.
        std: standard deviation of an embedding's numbers, such as `embedding_std` of many
            subjects; that of this prompt's tokens by default.
        draws: of the noise.
        seed: of the draws.
        layers: to restore; all that the engine serves by default.
        positions: to restore, absolute, or a mask; by default all from the subject on, since
            nothing before it changes.
        site: what is restored; one that edits may write, and that the engine serves.
        window: layers around each that are restored together; the paper has 10 for `attn_out` and
            `mlp_out`.
        in_flight: requests that the engine gets at once, at most.
        on_cell: called with each cell when it is done.
        progress: show a bar on a terminal.

    Returns:
        Probabilities by draw, layer and position.

    Warns:
        UserWarning: the answer begins without a space behind the last word of the prompt.

    Raises:
        SpecError: the subject is not in the prompt, or an argument does not fit.
        UnsupportedError: the engine does not serve the site.

    Source:
        Locating and editing factual associations in GPT (ROME), arXiv:2202.05262.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM

        from inspect_lens.patch import causal_trace

        llm = LLM(model="organism/checkpoint", dtype="float32")
        trace = causal_trace(
            llm, "The river Talmo is found in", subject="Talmo", answer=" Verun", draws=2
        )
        assert trace.best(layers=(0,)).position in trace.subject
        ```
    """
    if draws < 1 or noise <= 0 or in_flight < 1:
        raise SpecError(
            f"draws={draws}, noise={noise}, in_flight={in_flight}; allowed are 1 or more draws and "
            "requests, and noise above 0"
        )
    runs = open_runs(model)
    ids = runs.tokens(prompt)
    texts = runs.texts(ids)
    where = find_subject(subject, texts, where=getattr(runs, "where", ""))
    same = Alignment(tuple(range(len(ids))), where[0])
    at = choose_positions(positions, same, skip_equal=True)
    token = next_token(runs, prompt, ids, answer, "answer")
    warn_without_space(prompt, answer=answer)
    swept = None if layers is None else tuple(sorted(set(layers)))
    clean_rows = runs.capture(ids, None if window > 1 else swept, site)
    swept = swept or clean_rows.layers
    near = windows(swept, clean_rows.layers, window)
    stored = Stored(clean_rows.layers, at, clean_rows.values[:, list(at)])
    embedded = runs.capture(ids, [0], EMBEDDING).values[0]
    scale = noise * (float(embedded.std()) if std is None else std)
    rng = np.random.default_rng(seed)
    corrupt = []
    for _ in range(draws):
        noisy = embedded[list(where)] + rng.normal(0.0, scale, (len(where), embedded.shape[1]))
        rows = noisy[None].astype(np.float32)
        corrupt.append(Replace(rows=rows, layers=(0,), positions=where, site=EMBEDDING))
    # These first: what a cell brings back is said as soon as it is done.
    plain = [Run(ids), *(Run(ids, (edit,)) for edit in corrupt)]
    base = dict(runs.logprobs(plain, [token], in_flight))
    clean, *noised = (math.exp(base[k][0]) for k in range(len(plain)))
    cells = [(d, i, j) for d in range(draws) for i in range(len(swept)) for j in range(len(at))]
    asked = [Run(ids, (corrupt[d], *patches(stored, near[i], at[j], site))) for d, i, j in cells]
    restored = np.empty((draws, len(swept), len(at)))
    with progress_bar("trace", total=len(asked), done=0, show=progress) as step:
        for k, (logprob,) in runs.logprobs(asked, [token], in_flight):
            d, i, j = cells[k]
            restored[d, i, j] = math.exp(logprob)
            step()
            if on_cell is not None:
                gap, back = clean - noised[d], float(restored[d, i, j]) - noised[d]
                on_cell(PatchCell(swept[i], at[j], back, back / gap if gap else math.nan, d))
    return CausalTrace(
        layers=swept, positions=at, tokens=tuple(texts), subject=where,
        answer=answer if isinstance(answer, str) else runs.texts([answer])[0],
        site=site, window=window, noise_std=scale, seed=seed, clean=clean,
        corrupted=np.array(noised), restored=restored,
    )  # fmt: skip


def embedding_std(model: Any, subjects: str | Sequence[str]) -> float:
    """Standard deviation of the numbers in the embeddings of many subjects, for `std`.

    Args:
        model: a `vllm.LLM` of this process, or a `LensClient` of a server.
        subjects: one text or several, such as the names that are traced.

    Raises:
        SpecError: there are no subjects.

    Source:
        ROME's noise level, arXiv:2202.05262, appendix B.1.

    Example:
        <!-- test: engine -->
        ```python
        from vllm import LLM

        from inspect_lens.patch import embedding_std

        llm = LLM(model="organism/checkpoint", dtype="float32")
        assert 0 < embedding_std(llm, ["Talmo", "Velosh"]) < 10
        ```
    """
    if not subjects:
        raise SpecError("subjects: is empty; pass one text at least")
    runs = open_runs(model)
    tokens = map(runs.tokens, one_or_several(subjects))
    rows = [runs.capture(ids, [0], EMBEDDING).values[0] for ids in tokens]
    return float(np.concatenate(rows).std())
