"""Hooks of live requests: whose rows they see, what they keep, and how they fail alone.

The worker's glue puts Python into the layers for the steps in which one of these requests runs,
and calls `run` there. Nothing here raises into a forward pass: what a hook raises fails its
request, whose rows go on unedited. So do rows that are not finite.

Tensor-parallel ranks gather parameters while layers run, and run a step eagerly or not, all of them
alike. So whether a request takes part, and where, is decided by what all ranks know: that the
scheduler began it and has not ended it, and what it asks for. A request that has failed on one of
them goes on.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from inspect_lens._engine.protocol.messages import Saved
from inspect_lens._engine.protocol.processes import ends_process
from inspect_lens.errors import CaptureError, HookError, LensError, SpecError

from .request import (
    HookContext,
    HookedRequest,
    LoadedHook,
    Place,
    finite,
    is_known_to_be_fine,
    not_finite,
    side,
)
from .results import OWN, PERSISTENT, pack_saved
from .unpickle import load_function

logger = logging.getLogger("vllm.inspect_lens")

EAGER_KEY = "eager"
"""Where the sealed request says what makes its steps run eagerly."""

_TRACEBACK_LINES = 40


class Part(NamedTuple):
    """One request in a step."""

    key: str
    start: int
    """Index of its first token in the step."""
    n_tokens: int
    position: int
    """Absolute position of its first token."""


@dataclass
class Needs:
    """What a step needs at one layer."""

    pre: bool = False
    post: bool = False
    asks_pre: bool = False
    asks_post: bool = False
    """Whether a hook there may ask for parameters that ranks have to gather."""


class HookRunner:
    """Runs the hooks of one worker."""

    def __init__(
        self,
        *,
        layers: Iterable[int],
        allowed: bool,
        most_bytes: int,
        model: Any = None,
        parameter: Callable[..., torch.Tensor] | None = None,
        send: Callable[[str, int, Saved], None] | None = None,
    ) -> None:
        self._layers = frozenset(layers)
        self._allowed = allowed
        self._most = most_bytes
        self._model = model
        self._parameter = parameter or _no_parameter
        self._send = send
        self.live: dict[str, HookedRequest] = {}
        self._persistent: dict[str, LoadedHook] = {}
        self._places: dict[str, Place] = {}
        """Of persistent hooks, also those that could not be read here."""
        self._spans: list[tuple[Part, HookedRequest]] = []

    # -- requests ----------------------------------------------------------------

    def add(self, key: str, envelope: Mapping[str, Any]) -> None:
        asked = envelope[EAGER_KEY]
        places = [self._places[name] for name in asked["persistent"] if name in self._places]
        places += [Place.of(item) for item in asked["own"]]
        at = frozenset[int]().union(*(place.layers for place in places)) & self._layers
        request = HookedRequest(
            envelope["reply"], envelope["pid"], [], tuple(sorted(at)), tuple(places)
        )
        if at:
            # First: it takes part on this rank, too, should the rest fail here alone.
            self.live[key] = request
        hooks = []
        for i, name in enumerate(asked["persistent"]):
            if name not in self._persistent:
                raise SpecError(f"persistent hook {name} is not registered at this worker")
            hooks.append((PERSISTENT, str(i), self._persistent[name]))
        hooks += [(OWN, str(i), self._load(item)) for i, item in enumerate(asked["own"])]
        request.hooks = hooks

    def remove(self, key: str) -> None:
        """Forget a request that ended, or was given up half-way, and send what it saved."""
        request = self.live.pop(key, None)
        if request is not None and request.is_whole and request.next:
            self._export(key, request)

    def flush(self, key: str) -> None:
        """Send what a request has saved so far."""
        request = self.live.get(key)
        if request is not None and request.is_whole:
            self._export(key, request)

    def drop(self, key: str) -> None:
        """Keep and send nothing more; it takes part until `remove`, as other ranks may not know."""
        if (request := self.live.get(key)) is not None:
            request.is_dropped = True

    def register(self, name: str, item: Mapping[str, Any]) -> None:
        """Make a persistent hook known under a name."""
        self._places[name] = Place.of(item)
        self._persistent[name] = self._load(item)

    def unregister(self, names: Iterable[str]) -> None:
        """Forget persistent hooks; requests that run keep them."""
        for name in names:
            self._persistent.pop(name, None)
            self._places.pop(name, None)

    def _load(self, item: Mapping[str, Any]) -> LoadedHook:
        name = item["name"] or item["sha256"][:12]
        function = load_function(item["data"], name=name, allowed=self._allowed)
        return LoadedHook(function, name, Place.of(item))

    # -- a step --------------------------------------------------------------------

    def begin(self, parts: Iterable[Part]) -> dict[int, Needs]:
        self._spans = []
        needs: dict[int, Needs] = {}
        for part in parts:
            request = self.live.get(part.key)
            if request is None:
                continue
            if part.position < request.next:
                request.restart()
            if part.position > request.next and request.error is None:
                request.error = CaptureError(
                    f"positions {request.next} to {part.position - 1} were not computed in front "
                    "of its hooks"
                )
            self._spans.append((part, request))
            for layer in request.layers:
                need = needs.setdefault(layer, Needs())
                for place in request.places:
                    if layer in place.layers:
                        need.pre |= place.pre
                        need.post |= not place.pre
                        need.asks_pre |= place.pre and place.asks
                        need.asks_post |= place.asks and not place.pre
        return needs

    def run(
        self, layer: int, pre: bool, rows: Callable[[int, int], torch.Tensor]
    ) -> list[tuple[int, int, torch.Tensor]]:
        """Run the hooks of a layer; called in the forward pass."""
        edits = []
        for part, request in self._spans:
            if request.error is not None:
                continue
            stop = part.start + part.n_tokens
            stream: torch.Tensor | None = None
            is_edited = False
            for group, index, hook in request.hooks:
                if hook.place.pre != pre or layer not in hook.place.layers:
                    continue
                try:
                    if stream is None:
                        stream = rows(part.start, stop)
                    result = self._call(request, (group, index), hook, layer, part, stream)
                    if result is not None:
                        where = f"hook {hook.name} {side(hook)} layer {layer}"
                        stream, is_edited = finite(result, stream, request.is_fine, where), True
                        request.n_edited += 1
                except BaseException as error:
                    if ends_process(error, in_user_code=True):
                        raise
                    # A hook's fault fails its request.
                    request.error = _explained(error, hook, layer)
                    is_edited = False
                    break
            if is_edited and stream is not None:
                edits.append((part.start, stop, stream))
        return edits

    def fail_step(self, error: BaseException) -> None:
        """Fail all requests of the step: the layer could not be read."""
        for _, request in self._spans:
            if request.error is None:
                request.error = CaptureError(f"hooks could not run: {error}")

    def end(self) -> list[tuple[str, LensError]]:
        for part, request in self._spans:
            request.next = part.position + part.n_tokens
            if request.error is None and not all(
                map(is_known_to_be_fine, request.is_fine.values())
            ):
                request.error = not_finite(request)
        self._spans = []
        return [
            (key, r.error)
            for key, r in self.live.items()
            if r.error is not None and not r.is_dropped
        ]

    def _call(
        self,
        request: HookedRequest,
        place: tuple[str, str],
        hook: LoadedHook,
        layer: int,
        part: Part,
        stream: torch.Tensor,
    ) -> torch.Tensor | None:
        context = request.contexts.get(place)
        if context is None:
            parameter = functools.partial(self._parameter, may_gather=hook.place.asks)
            context = request.contexts[place] = HookContext(self._model, parameter)
        context.layer_idx, context.seq_len = layer, part.n_tokens
        context.position = part.position
        # A copy: what a hook writes into its rows counts when it gives them back, and not else.
        result = hook.function(context, stream.clone())
        if result is None:
            return None
        if not isinstance(result, torch.Tensor) or result.shape != stream.shape:
            shape = f"shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else ""
            raise SpecError(
                f"it returned {type(result).__name__} {shape}; give None, or a tensor of shape "
                f"{tuple(stream.shape)}"
            )
        return result.to(device=stream.device, dtype=stream.dtype)

    def _export(self, key: str, request: HookedRequest) -> None:
        if self._send is None:
            return
        if not all(map(bool, request.is_fine.values())):
            raise not_finite(request)
        saved: dict[str, Any] = {"layers": list(request.layers), OWN: {}, PERSISTENT: {}}
        for (group, index), context in request.contexts.items():
            saved[group][index] = context.saved
        data = pack_saved(saved, most=self._most, where="ctx.saved")
        message = Saved(key, len(request.layers), request.next, request.n_edited, data)
        self._send(request.reply, request.pid, message)


def _explained(error: BaseException, hook: LoadedHook, layer: int) -> LensError:
    frames = error.__traceback__
    # The first frames are ours; the hook's own are what its author wants to see.
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    lines = "".join(traceback.format_exception(type(error), error, frames)).rstrip().splitlines()
    text = "\n".join(lines[-_TRACEBACK_LINES:])
    return HookError(f"hook {hook.name} {side(hook)} layer {layer} raised:\n{text}")


def _no_parameter(name: str, *, may_gather: bool) -> torch.Tensor:
    raise LensError(f"{name}: this worker knows no parameters")
