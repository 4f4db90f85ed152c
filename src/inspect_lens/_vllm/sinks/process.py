"""The sinks of a front-end process: which requests they record, and what becomes of that."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from inspect_lens._base.untrusted import at_start
from inspect_lens._intake import absolute
from inspect_lens._shards import ShardWriter
from inspect_lens.errors import ArtifactError, CaptureError, LensError, SpecError, UnsupportedError
from inspect_lens.probe import fingerprint_model
from inspect_lens.spec import (
    CaptureSpec,
    EngineFacts,
    LensRequest,
    SinkUse,
    check_request,
    result_name,
)

from .recorder import Offered, Recorder, new_writer
from .sink import (
    Done,
    FunctionReceiver,
    Receiver,
    SinkConfig,
    StoreReceiver,
    find_function,
    lot,
    read_sinks,
)

logger = logging.getLogger("vllm.inspect_lens")

SINK_KEY = "sink"
"""Of a packed envelope: the sink of its request, for the process that sealed it."""
_EXIT_S = 10.0
"""Seconds that a process gives its sinks when it ends."""

_recorders: dict[int, Recorder] = {}
"""Every sink of this process, by a number of its own."""
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Rule:
    """A request that a rule of the operator has chosen."""

    request: LensRequest
    """What is captured."""
    key: int
    """Of the sink."""
    name: str
    """Of the sink."""


@dataclass(frozen=True)
class SinkTask:
    recorder: Recorder
    use: SinkUse | None
    """None where a rule has chosen the request, and its client knows nothing of it."""

    def offer(self, done: Done) -> Offered:
        """Give the results to the sink; never waits."""
        return self.recorder.take(done, waits=self.use is not None and self.use.wait)


def task_of(packed: Mapping[str, Any]) -> SinkTask | None:
    """What a packed envelope says of a sink; None where it says nothing."""
    found = packed.get(SINK_KEY)
    if found is None:
        return None
    key, use = found
    return SinkTask(_recorders[key], None if use is None else SinkUse.model_validate(use))


def is_by_rule(packed: Mapping[str, Any]) -> bool:
    """Whether a rule has chosen the request of a packed envelope."""
    found = packed.get(SINK_KEY)
    return found is not None and found[1] is None


class Sinks:
    """Sinks by name, of each engine of this process."""

    def __init__(self) -> None:
        self._of: list[tuple[EngineFacts, dict[str, int]]] = []
        self._rules: dict[int, dict[str, Rule]] = {}
        """By identity of an engine's facts: what is recorded by rule."""
        self._has_exit = False

    def learn(self, facts: EngineFacts, setting: str) -> None:
        """Take note of an engine and of the sinks that the operator gives it."""
        configs = read_sinks(setting)
        if not configs:
            return
        keys: dict[str, int] = {}
        for name, config in configs.items():
            try:
                check_request(LensRequest(capture=config.capture()), facts)
            except LensError as error:
                raise SpecError(f"INSPECT_LENS_SINKS: {name}: {error}") from error
            try:
                recorder = _recorder(name, config, facts)
            except OSError as error:  # of the folder to spill to
                raise at_start(f"INSPECT_LENS_SINKS: {name}: cannot be used", str(error)) from None
            keys[name] = next(_numbers)
            _recorders[keys[name]] = recorder
        self._of.append((facts, keys))
        self._rules[id(facts)] = {
            name: Rule(LensRequest(capture=config.capture()), keys[name], name)
            for name, config in configs.items()
            if config.share
        }
        if not self._has_exit:
            self._has_exit = True
            atexit.register(self.flush, _EXIT_S)

    def resolve(self, request: LensRequest, facts: EngineFacts) -> LensRequest:
        """A request with what its sink records as its capture."""
        use = request.sink
        if use is None:
            return request
        keys = self._keys(facts)
        known = [n for n in sorted(keys) if _recorders[keys[n]].config.requests]
        if use.name not in keys:
            raise SpecError(
                f"sink.name={use.name!r}; known are {', '.join(known) or 'none'}; the operator of "
                "the server names sinks in INSPECT_LENS_SINKS"
            )
        config = _recorders[keys[use.name]].config
        if not config.requests:
            raise UnsupportedError(
                f"sink.name={use.name!r}: records what its operator's rule chooses, and no other "
                f"requests; known for those are {', '.join(known) or 'none'}"
            )
        if request.capture is None:
            return request.model_copy(update={"capture": config.capture()})
        if differ := _differ(request.capture, config, facts):
            raise SpecError(
                f"capture: {', '.join(differ)}, and sink {use.name!r} records layers="
                f"{list(config.layers_of(facts))}, site={config.site!r}, positions="
                f"{config.positions!r}, dtype={config.dtype!r}; ask for the same, leave out "
                "capture, or send two requests"
            )
        return request

    def key_of(self, use: SinkUse, facts: EngineFacts) -> int:
        return self._keys(facts)[use.name]

    def rule_for(self, facts: EngineFacts, request_id: str) -> Rule | None:
        """The rule that chooses a request, by its id alone; None where none does."""
        for name, rule in self._rules.get(id(facts), {}).items():
            config = _recorders[rule.key].config
            if lot(config.seed, name, request_id) < config.share:
                return rule
        return None

    def failed(self, rule: Rule, error: BaseException) -> None:
        """Count a request that a rule has chosen, and that could not be recorded."""
        _recorders[rule.key].failed(error)

    def describe(self) -> dict[str, Any]:
        """By name: what a sink records, what waits, and what became of results."""
        return {n: _recorders[key].describe() for _, keys in self._of for n, key in keys.items()}

    def flush(self, timeout_s: float) -> bool:
        """Have what waits in memory given away; False where the time was too short."""
        until = time.monotonic() + timeout_s
        recorders = [_recorders[key] for _, keys in self._of for key in keys.values()]
        return all([r.flush(max(until - time.monotonic(), 0.0)) for r in recorders])

    def _keys(self, facts: EngineFacts) -> dict[str, int]:
        return next((keys for known, keys in self._of if known is facts), {})


def _recorder(name: str, config: SinkConfig, facts: EngineFacts) -> Recorder:
    writer, about = new_writer(), _about(name, config, facts)
    receiver: Receiver
    if config.store is not None:
        shards = ShardWriter(absolute(config.store), about, writer)
        try:
            shards.claim()
        except (ArtifactError, CaptureError) as error:
            # Perhaps it is back when the first shard is written.
            logger.warning("inspect_lens: sink %r: %s", name, error)
        receiver = StoreReceiver(shards)
    else:
        assert config.callback is not None
        receiver = FunctionReceiver(find_function(config.callback), {"sink": name, **about})
    return Recorder(name, config, receiver, result_name(config.site), writer)


def _about(name: str, config: SinkConfig, facts: EngineFacts) -> dict[str, Any]:
    """What a recording says of itself, in the words of a manifest of `collect`."""
    layers = list(config.layers_of(facts))
    dtype = facts.dtype if config.dtype == "model" else config.dtype
    dataset = {
        "name": name, "split": "recorded", "source": "server", "revision": "", "licence": "",
        "label_meaning": config.label_meaning, "on_policy": True, "text_overlap_group": name,
        "unverified": "requests of a server: who sent them, and whether texts repeat, is not known",
    }  # fmt: skip
    return {
        "model": {"name": facts.model, "sha256": fingerprint_model(facts.model)},
        "dataset": dataset,
        "request": {"layers": layers, "positions": config.positions, "site": config.site},
        "layers": layers,
        "site": config.site,
        "hidden": facts.width_of(config.site).width,
        "dtype": dtype,
    }


def _differ(capture: CaptureSpec, config: SinkConfig, facts: EngineFacts) -> list[str]:
    """What a capture has otherwise than a sink."""
    every = tuple(range(facts.n_layers))

    def dtype(asked: str) -> str:
        return facts.dtype if asked == "model" else asked

    asked: dict[str, tuple[Any, Any]] = {
        "layers": (every if capture.layers == "all" else capture.layers, config.layers_of(facts)),
        "site": (capture.site, config.site),
        "positions": (capture.positions, config.positions),
        "phase": (capture.phase, "both"),
        "heads": (capture.heads, None),
        "reduce": (capture.reduce, "none"),
        "dtype": (dtype(capture.dtype), dtype(config.dtype)),
    }
    return [f"{key}={mine!r}" for key, (mine, theirs) in asked.items() if mine != theirs]


def offers(outputs: Iterable[Any]) -> list[tuple[Any, Offered]]:
    """Choices of outputs whose results are at a sink, and are waited for."""
    found = [
        (completion, getattr(completion, "inspect_lens_offered", None))
        for output in outputs
        for completion in getattr(output, "outputs", ())
    ]
    return [(c, offered) for c, offered in found if offered and offered.future is not None]


async def settle(output: Any, timeout_s: float) -> None:
    """Wait for what becomes of results at sinks, and put it into receipts."""
    waiting = offers([output])
    futures = [asyncio.wrap_future(o.future) for _, o in waiting if o.future is not None]
    if futures:
        await asyncio.wait(futures, timeout=timeout_s)
    _note(waiting, timeout_s)


def settle_now(outputs: Iterable[Any], timeout_s: float) -> None:
    """The same for an engine that its caller steps, once all steps are done."""
    waiting = offers(outputs)
    until = time.monotonic() + timeout_s
    for _, offered in waiting:
        if offered.future is not None:
            try:
                offered.future.result(max(until - time.monotonic(), 0.0))
            except TimeoutError:
                break
    _note(waiting, timeout_s)


def _note(waiting: Iterable[tuple[Any, Offered]], timeout_s: float) -> None:
    for completion, offered in waiting:
        future = offered.future
        receipt = offered.receipt.model_copy(
            update={"reason": f"still waits for the sink after {timeout_s:g} s"}
        )
        if future is not None and future.done():
            receipt = future.result()
        # Frozen for everybody else; nobody has seen it yet.
        completion.inspect_lens.__dict__["sink"] = receipt
        del completion.inspect_lens_offered
