"""`collect`: a data set through a model into a store, many requests at once.

A shard holds a fixed run of the data set, whatever order answers come in, and is written when its
last sample is there. A killed run therefore leaves whole shards, which the next run keeps, and
nothing else that counts.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import anyio.to_thread
import fsspec
from inspect_ai.model import ChatMessage, GenerateConfig, Model, get_model
from pydantic import TypeAdapter

from inspect_lens._base.concurrency import first_error
from inspect_lens._base.progress import progress_bar
from inspect_lens._intake import absolute, is_local
from inspect_lens._shards import About, ShardFacts, read_facts, shard_facts, sum_facts, to_json
from inspect_lens.data import (
    MANIFEST,
    STORE_FORMAT,
    ActivationStore,
    Captured,
    ProbeDataset,
    ProbeSample,
    SampleRecord,
    encode_shard,
    read_whole,
    write_whole,
)
from inspect_lens.errors import CaptureError, LensError, SpecError
from inspect_lens.model import Activations, activations, lens_config, recapture
from inspect_lens.probe import CaptureFacts, fingerprint_model
from inspect_lens.reading._rows import pick_data
from inspect_lens.reading._stored import GivenTokens, given_tokens
from inspect_lens.spec import (
    RESID_POST,
    CaptureSpec,
    Layers,
    Numerics,
    Positions,
    TensorData,
    read_as,
    resolve_positions,
    shown,
)

__all__ = ["collect", "collect_async", "computing_facts"]

_MESSAGES: Final = TypeAdapter(list[ChatMessage])


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to capture, and how to generate."""

    layers: Layers
    positions: Positions
    max_tokens: int
    temperature: float
    seed: int


def request_of(
    at: str, layers: Any, positions: Any, on_error: str, counts: Mapping[str, int], **sampling: Any
) -> Request:
    """Judge what was asked of `collect` or `collect_stream`."""
    asked = read_as(CaptureSpec, {"layers": layers, "positions": positions}, at=at)
    if min(counts.values()) < 1 or on_error not in ("raise", "skip"):
        said = ", ".join(f"{name}={n}" for name, n in counts.items())
        raise SpecError(
            f"{said}, on_error={on_error!r}; allowed are 1 or more, and 'raise' or 'skip'"
        )
    return Request(layers=asked.layers, positions=asked.positions, **sampling)


async def capture_sample(model: Model, index: int, sample: ProbeSample, how: Request) -> Captured:
    if sample.reading == "generate":
        handle, completion = await _generate(model, index, sample, how)
        n_fed = handle.n_prompt + max(handle.n_completion - 1, 0)
        ids = (*handle.prompt_token_ids, *handle.token_ids)
        n_prompt = handle.n_prompt
    else:
        prompt, rest = await _tokens(model, sample)
        # The last id of a replay is not fed; a copy of one stands in for it.
        handle = await recapture(
            model, prompt_token_ids=prompt, token_ids=[*rest, prompt[0]], layers=how.layers
        )
        ids, n_prompt, completion = (*prompt, *rest), len(prompt), sample.completion or ""
        n_fed = len(ids)
    positions = _select(how.positions, n_prompt=n_prompt, n_fed=n_fed, raw=sample.raw)
    if sample.unread and how.positions == "completion":
        first = n_prompt + await _unread(model, sample, ids[n_prompt:])
        positions = tuple(p for p in positions if p >= first)
    acts = rows_at(handle, positions)
    record = record_of(
        index, sample, n_rows=len(positions), n_prompt=n_prompt, completion=completion
    )
    return Captured(
        record=record, acts=acts, layers=handle.layers, positions=positions, token_ids=ids
    )


def record_of(
    index: int, sample: ProbeSample, *, n_rows: int = 0, n_prompt: int = 0,
    completion: str = "", error: str = "",
) -> SampleRecord:  # fmt: skip
    """What a store keeps of a sample beside its rows."""
    return SampleRecord(
        index=index, id=sample.id, label=sample.label, group=sample.group, n_rows=n_rows,
        n_prompt=n_prompt, completion=completion, columns=dict(sample.columns), error=error,
        prompt="\n".join(m.content for m in sample.messages), content=sample.content_id,
    )  # fmt: skip


async def computing_facts(model: Model) -> CaptureFacts:
    """What computes a model's activations beside its weights, as its server tells it.

    Args:
        model: `vllm-lens/…` or `lens/…`; its server is started where needed.

    Returns:
        Engine, dtype, tokenizer and template, without the sampling; empty where the server does not
        tell them.

    Example:
        <!-- test: server -->
        ```python
        import anyio
        from inspect_ai.model import get_model

        from inspect_lens.collect import computing_facts

        facts = anyio.run(computing_facts, get_model("vllm-lens/organism/checkpoint"))
        assert facts.engine.startswith("vllm ")
        ```
    """
    tell = getattr(model.api, "describe_server", None)
    told = {} if tell is None else (await tell()).get("computes_with", {})
    return CaptureFacts.known(told)


async def reached(model: Model) -> CaptureFacts:
    """The same, of a server that has to be there: without one every sample would fail alike."""
    try:
        return await computing_facts(model)
    except LensError:
        raise
    except Exception as error:
        raise CaptureError(f"{model}: {_reason(error)}") from error


async def _generate(
    model: Model, index: int, sample: ProbeSample, how: Request
) -> tuple[Activations, str]:
    # All fed tokens from the first position that is wanted; a range is cut by the engine.
    capture = CaptureSpec(layers=how.layers, positions=how.positions)
    base = GenerateConfig(
        temperature=how.temperature, max_tokens=how.max_tokens, seed=how.seed + index
    )
    messages = _MESSAGES.validate_python(_turns(sample))
    try:
        output = await model.generate(messages, config=lens_config(capture=capture, base=base))
    except LensError:
        raise
    except Exception as error:
        raise CaptureError(f"{sample.id}: {_reason(error)}") from error
    if output.error:
        raise CaptureError(f"{sample.id}: {output.error}")
    handle = activations(output)
    if handle is None:
        raise CaptureError(
            f"{sample.id}: no activations came back; allowed are models vllm-lens/… and lens/…; "
            "check the model's name and that the server has the plug-in"
        )
    return handle, output.completion


def _reason(error: Exception) -> str:
    """What a server, or the start of one, said: the error's own text may quote the request."""
    text = getattr(error, "provider_message", None) or str(error)
    return " ".join(str(text).split())[:800] or type(error).__name__


async def _tokens(model: Model, sample: ProbeSample) -> GivenTokens:
    """Ids of the prompt and of what follows, as the server's own template makes them."""
    if sample.raw:
        return await given_tokens(model, sample.messages[0].content)
    try:
        return await given_tokens(model, _turns(sample), sample.completion)
    except CaptureError as error:
        raise CaptureError(f"{sample.id}: {error}") from None


def _turns(sample: ProbeSample) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in sample.messages]


async def _unread(model: Model, sample: ProbeSample, rest: Sequence[int]) -> int:
    """Tokens at the beginning of a completion that are wholly of its unread part."""
    _, part = await given_tokens(model, _turns(sample), sample.unread)
    # A token that joins both parts is read: some of it is of the answer.
    pairs = enumerate(zip(part, rest, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(part), len(rest)))


def _select(positions: Positions, *, n_prompt: int, n_fed: int, raw: bool) -> tuple[int, ...]:
    if raw and positions == "completion":
        positions = "prompt"  # raw text is all there is to read
    return tuple(resolve_positions(positions, n_prompt=n_prompt, n_max=n_fed, field="positions"))


def rows_at(handle: Activations, positions: Sequence[int]) -> TensorData | None:
    return pick_data(handle, None, RESID_POST, positions) if positions else None


_PLAN: Final = "plan.json"
_WHAT: Final = "what collect wrote"
_AHEAD: Final = 2  # shards that may be open at once


def collect(
    model: str | Model, dataset: ProbeDataset, out: str | Path, **options: Any
) -> ActivationStore:
    """Capture activations of a data set, or go on where a stopped run was.

    In a notebook, or wherever an event loop runs already, await `collect_async` instead.

    Args:
        model: `vllm-lens/…` or `lens/…`, or a model of one of these.
        dataset: what to capture.
        out: folder of the store, local or an fsspec URL such as `s3://bucket/set`.
        **options: `layers`, `positions`, `max_tokens` and others, which `collect_async` describes.

    Raises:
        SpecError: an event loop runs already, or what `collect_async` raises.

    Example:
        <!-- test: server -->
        ```python
        from inspect_lens.collect import collect
        from inspect_lens.data import load_dataset

        data = load_dataset("organism", path="organism/data/probe_train.jsonl", limit=4)
        model = "vllm-lens/organism/checkpoint"
        store = collect(model, data, "acts/four", layers=[4], max_tokens=8, progress=False)
        assert len(store) == 4
        ```
    """
    with suppress(RuntimeError):
        anyio.get_current_task()
        raise SpecError(
            "collect: an event loop runs already, as in a notebook; await collect_async"
        )
    return anyio.run(partial(collect_async, model, dataset, out, **options))


async def collect_async(
    model: str | Model,
    dataset: ProbeDataset,
    out: str | Path,
    *,
    layers: Layers | list[int] = "all",
    positions: Positions | list[int] = "completion",
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    concurrency: int = 64,
    shard_samples: int = 64,
    on_error: Literal["raise", "skip"] = "raise",
    progress: bool = True,
    model_args: dict[str, Any] | None = None,
) -> ActivationStore:
    """Capture activations of a data set, or go on where a run before stopped.

    Samples without a completion are answered by the model; given completions and raw texts
    are fed as they stand. At most `concurrency` requests run at once, and at most two shards
    and the requests in flight are in memory. The store depends on the data set, the model and
    the settings only: a run that was killed at any point and started again ends with the same
    bytes, as far as the model itself gives the same answer twice (a sample's seed is `seed`
    plus its number; engines round differently from batch to batch).

    Args:
        model: `vllm-lens/…` or `lens/…`, or a model of one of these.
        dataset: what to capture.
        out: folder of the store, local or an fsspec URL such as `s3://bucket/set`.
        layers: `all`, or layer numbers.
        positions: tokens to keep: `completion`, `prompt`, `all`, `last_prompt` or numbers.
        max_tokens: longest answer.
        temperature: of sampling.
        seed: of sampling.
        concurrency: requests at once.
        shard_samples: samples of a shard.
        on_error: `raise` ends the run, keeping finished shards; `skip` writes the sample
            without rows, with the reason, as long as the server is there.
        progress: show a bar on a terminal.
        model_args: for `get_model`, such as `base_url`.

    Raises:
        SpecError: the folder holds another run, or a setting is wrong.
        CaptureError: the server does not start or answer, a sample failed, or a file could not be
            written.

    Example:
        <!-- test: server -->
        ```python
        from functools import partial

        import anyio

        from inspect_lens.collect import collect_async
        from inspect_lens.data import load_dataset

        data = load_dataset("organism", path="organism/data/probe_train.jsonl", limit=4)
        run = partial(collect_async, layers=[4], max_tokens=8, progress=False)
        store = anyio.run(run, "vllm-lens/organism/checkpoint", data, "acts/four")
        assert store.layers == (4,)
        ```
    """
    how = request_of(
        "collect", layers, positions, on_error,
        {"concurrency": concurrency, "shard_samples": shard_samples},
        max_tokens=max_tokens, temperature=temperature, seed=seed,
    )  # fmt: skip
    name = model if isinstance(model, str) else str(model)
    plan = plan_of(name, dataset, how, shard_samples)
    uri = str(out).rstrip("/")
    with claimed(uri, plan):
        if read_whole(f"{uri}/{MANIFEST}") is not None:
            return ActivationStore.open(uri)
        todo = [k for k in _shards(plan) if _facts(uri, k, plan) is None]
        if todo:
            total = len(dataset)
            done = total - sum(len(_span(k, plan)) for k in todo)
            async with opened(model, concurrency, model_args) as live:
                facts = await reached(live)
                way = "start the server as it was for the first run, or choose another out="
                refuse_other_weights(f"out={uri!r}: its runs", [*_told_of(uri, plan), facts], way)
                with progress_bar(
                    dataset.name, total=total, done=done, show=progress, at_once=concurrency
                ) as tick:

                    async def capture(index: int) -> Captured:
                        sample = dataset.samples[index]
                        captured = await capture_or_skip(live, index, sample, how, on_error)
                        tick()
                        return captured

                    def write(k: int, samples: list[Captured]) -> None:
                        write_shard(uri, k, plan, samples, facts)

                    await _fill_shards(todo, plan, concurrency, capture, write)
        return finish(uri, plan)


@asynccontextmanager
async def opened(
    model: str | Model, concurrency: int, model_args: dict[str, Any] | None
) -> AsyncIterator[Model]:
    """The model; one that is given by its name is opened here, and closed again."""
    if not isinstance(model, str):
        yield model
        return
    config = GenerateConfig(max_connections=concurrency)
    try:
        live = get_model(model, config=config, memoize=False, **(model_args or {}))
    except ValueError as error:
        named = model.startswith(("lens/", "vllm-lens/"))
        advice = "" if named else f" Write lens/{model}, or vllm-lens/{model}."
        raise SpecError(f"model={model}: {error}{advice}") from None
    async with live:
        yield live


async def _fill_shards(
    todo: Sequence[int],
    plan: Mapping[str, Any],
    concurrency: int,
    capture: Callable[[int], Awaitable[Captured]],
    write: Callable[[int, list[Captured]], None],
) -> None:
    """Capture samples in the order of the data set, and write shards as they fill up."""
    open_shards = anyio.Semaphore(_AHEAD + -(-concurrency // plan["shard_samples"]))
    requests = anyio.Semaphore(concurrency)
    done: dict[int, dict[int, Captured]] = {}

    async def one(k: int, index: int) -> None:
        try:
            captured = await capture(index)
        finally:
            requests.release()
        done[k][index] = captured
        if len(done[k]) == len(_span(k, plan)):
            ordered = [sample for _, sample in sorted(done.pop(k).items())]
            await anyio.to_thread.run_sync(write, k, ordered)
            open_shards.release()

    try:
        async with anyio.create_task_group() as tasks:
            for k in todo:
                await open_shards.acquire()
                done[k] = {}
                for index in _span(k, plan):
                    await requests.acquire()
                    tasks.start_soon(one, k, index)
    except BaseExceptionGroup as group:
        raise first_error(group) from None


async def capture_or_skip(
    model: Model, index: int, sample: ProbeSample, how: Request, on_error: str
) -> Captured:
    """Capture one sample; with `skip`, one that fails at a server that is there has no rows."""
    try:
        return await capture_sample(model, index, sample, how)
    except LensError as error:
        if on_error == "raise":
            raise
        await reached(model)
        record = record_of(index, sample, error=str(error))
        return Captured(record=record, acts=None, layers=(), positions=(), token_ids=())


def plan_of(model: str, dataset: ProbeDataset, how: Request, shard_samples: int) -> dict[str, Any]:
    """What makes the store what it is; compared when a run goes on."""
    if not isinstance(dataset, ProbeDataset):
        raise SpecError(
            f"dataset={shown(dataset)}; allowed is a ProbeDataset, such as load_dataset(…) gives; "
            "of samples of your own ProbeDataset(…, samples=…) makes one"
        )
    path = model.partition("/")[2]
    return {
        "format": STORE_FORMAT,
        "model": {"name": path, "sha256": fingerprint_model(path)},
        "dataset": dataset.facts(),
        "request": {
            "layers": how.layers if how.layers == "all" else list(how.layers),
            "positions": how.positions if isinstance(how.positions, str) else list(how.positions),
            "max_tokens": how.max_tokens,
            "temperature": how.temperature,
            "seed": how.seed,
        },
        "shard_samples": shard_samples,
    }


@contextmanager
def claimed(uri: str, plan: dict[str, Any]) -> Iterator[None]:
    """Hold the folder for this run; one that it began and wrote no shard into is free again."""
    with _alone(uri):
        is_new = _claim(uri, plan)
        try:
            yield
        except BaseException:
            is_ours = False
            # A store that cannot be reached must not hide what went wrong before.
            with suppress(OSError):
                with suppress(SpecError):
                    is_ours = any(_finished(uri, plan))
                if is_new and not is_ours:
                    filesystem, path = fsspec.core.url_to_fs(f"{uri}/{_PLAN}")
                    filesystem.rm_file(path)
            raise


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Lock a local folder, until this process ends or is done: two would write the same files."""
    with ExitStack() as stack:
        if is_local(folder := absolute(uri)) and "\0" not in folder:
            with suppress(OSError):  # of which the plan says more, or that nothing is locked there
                os.makedirs(folder, exist_ok=True)
                stack.callback(os.close, handle := os.open(folder, os.O_RDONLY))
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise SpecError(
                        f"out={uri!r}: another run is writing into this folder; wait until it has "
                        "ended, which keeps what it finished, or name another folder"
                    ) from None
                # A process that was forked meanwhile, such as an engine, has the handle, too.
                stack.callback(fcntl.flock, handle, fcntl.LOCK_UN)
        yield


def _claim(uri: str, plan: dict[str, Any]) -> bool:
    """Write the plan, or compare it with the one that is there; whether it was written."""
    where = f"{uri}/{_PLAN}"
    content = read_whole(where)
    if content is None:
        write_whole(where, to_json(plan))
        return True
    there = read_facts(where, content, About, _WHAT)
    differ = [
        f"{key}: {there.get(key)!r}, now {value!r}"
        for key, value in plan.items()
        if there.get(key) != json.loads(json.dumps(value))
    ]
    if differ:
        raise SpecError(
            f"out={uri!r}: holds another run ({'; '.join(differ)[:600]}); allowed is the same run, "
            "which goes on where it stopped; use another folder, or delete this one"
        )
    return False


def _shards(plan: dict[str, Any]) -> range:
    return range(-(-plan["dataset"]["n_samples"] // plan["shard_samples"]))


def _span(k: int, plan: Mapping[str, Any]) -> range:
    size = plan["shard_samples"]
    return range(k * size, min((k + 1) * size, plan["dataset"]["n_samples"]))


def _file(k: int) -> str:
    return f"shard-{k:05d}.safetensors"


def _facts(uri: str, k: int, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Facts of a finished shard; they are written after it."""
    where = f"{uri}/shard-{k:05d}.json"
    if (content := read_whole(where)) is None:
        return None
    made = read_facts(where, content, ShardFacts, _WHAT)
    if made.get("plan") != _mark(plan):
        raise SpecError(
            f"out={uri!r}: {_file(k)} is of a run with other settings; allowed is one run in a "
            "folder; use another folder, or delete this one"
        )
    return made


def _finished(uri: str, plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Facts of the shards of a plan that are finished."""
    return (made for k in _shards(plan) if (made := _facts(uri, k, plan)) is not None)


def _told_of(uri: str, plan: dict[str, Any]) -> Iterator[CaptureFacts]:
    """What computed the shards that are finished."""
    return (CaptureFacts.known(s.get("computed_with", {})) for s in _finished(uri, plan))


def refuse_other_weights(what: str, told: Iterable[Numerics], way: str) -> None:
    """Refuse to put rows of two dtypes, or of weights that were quantised differently, together."""
    kinds = {(one.dtype, one.quantization or "none") for one in told if one.dtype}
    if len(kinds) > 1:
        raise SpecError(
            f"{what} had {sorted(kinds)} as dtype and quantisation; allowed is one of each, "
            f"because others have other rows; {way}"
        )


def n_kept(uri: str) -> int:
    """Samples in the finished shards of a folder, which the next run keeps."""
    uri = uri.rstrip("/")
    if (content := read_whole(f"{uri}/{_PLAN}")) is None:
        return 0
    plan = read_facts(f"{uri}/{_PLAN}", content, About, _WHAT)
    return sum(facts["n_samples"] for facts in _finished(uri, plan))


def write_shard(
    uri: str, k: int, plan: dict[str, Any], samples: list[Captured], capture: CaptureFacts
) -> None:
    """Write a shard, and then its facts."""
    _facts(uri, k, plan)
    content = encode_shard(samples)
    write_whole(f"{uri}/{_file(k)}", content)
    facts = shard_facts(_file(k), hashlib.sha256(content).hexdigest(), samples)
    facts |= {"plan": _mark(plan), "computed_with": capture.model_dump(exclude_defaults=True)}
    write_whole(f"{uri}/shard-{k:05d}.json", to_json(facts))


def finish(uri: str, plan: dict[str, Any]) -> ActivationStore:
    """Write the manifest out of the facts of all shards."""
    shards = [_facts(uri, k, plan) or {} for k in _shards(plan)]
    full = [s for s in shards if s["n_rows"]]
    kinds = {(tuple(s["layers"]), s["hidden"], s["dtype"]) for s in full}
    if len(kinds) != 1:
        raise SpecError(
            f"out={uri!r}: shards have {sorted(kinds)} as layers, width and dtype; allowed is one "
            "kind, and at least one token; the model changed between runs, or positions select "
            "nothing; use another folder"
        )
    layers, hidden, dtype = kinds.pop()
    told = [s.get("computed_with", {}) for s in shards]
    manifest = plan | {
        # What changed between runs is not known of the whole.
        "computed_with": {k: v for k, v in told[0].items() if all(t.get(k) == v for t in told)},
        "layers": list(layers),
        "hidden": hidden,
        "dtype": dtype,
        **sum_facts(shards),
    }
    write_whole(f"{uri}/{MANIFEST}", to_json(manifest))
    return ActivationStore.open(uri)


def _mark(plan: dict[str, Any]) -> str:
    """Tells the shards of one plan from those of others."""
    return hashlib.sha256(to_json(plan)).hexdigest()[:16]
