"""What a choice of a response says of its activations, decoded and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from inspect_lens.errors import CaptureError, SpecError
from inspect_lens.spec import (
    LENS_NAME,
    REDUCTIONS,
    CaptureReceipt,
    CaptureSpec,
    LensRequest,
    Receipt,
    TensorData,
    decode_tensor,
    result_name,
)

from ._payload import Payload

QK_NAMES = ("attn_q", "attn_k")

FetchBytes = Callable[[str], bytes]
"""Gets the bytes behind a handle, in the calling thread."""


@dataclass(kw_only=True)
class ChoiceFields:
    """Lens fields of one choice."""

    activations: Mapping[str, Any] | None = None
    token_ids: list[int] = field(default_factory=list)
    receipt: Mapping[str, Any] | None = None
    hook_results: Mapping[str, Any] | None = None


def fetch_payload(
    choice: ChoiceFields, prompt_token_ids: list[int], request: LensRequest, fetch: FetchBytes
) -> Payload:
    """Fetch what came beside the response, and decode it; not for an event loop."""
    raw = {
        name: fetch(str(entry["handle"]))
        for name, entry in (choice.activations or {}).items()
        if isinstance(entry, Mapping) and "handle" in entry
    }
    return decode_payload(choice, prompt_token_ids, request, raw)


def decode_payload(
    choice: ChoiceFields,
    prompt_token_ids: list[int],
    request: LensRequest,
    raw: Mapping[str, bytes],
) -> Payload:
    """Decode one choice and check that its rows are the tokens that were asked for."""
    try:
        tensors = {
            name: decode_tensor(entry, field=f"activations.{name}", raw=raw.get(name))
            for name, entry in (choice.activations or {}).items()
            if "__json__" not in entry
        }
        receipt = None if choice.receipt is None else Receipt.model_validate(choice.receipt)
    except (SpecError, ValidationError, AttributeError) as error:
        raise CaptureError(
            f"activations: the server sent something that cannot be read ({error}); the versions "
            "of client and server may differ"
        ) from None
    capture = request.capture
    n_tokens = len(prompt_token_ids) + len(choice.token_ids)
    wanted = {result_name(site) for site in capture.sites} if capture else set()
    wanted |= set(QK_NAMES) if request.qk is not None else set()
    wanted |= {LENS_NAME} if request.lens is not None else set()
    if absent := sorted(wanted - tensors.keys()):
        raise CaptureError(
            f"activations: {', '.join(absent)} asked for, and the response has "
            f"{', '.join(tensors) or 'none'}; this server does not serve that site"
        )
    layers: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        if name in QK_NAMES:
            layers[name] = _check_qk(name, tensor, qk_values(choice).get("qk_layers"))
        elif name == LENS_NAME:
            layers[name] = _check_lens(tensor, receipt)
        else:
            layers[name] = _check(name, tensor, capture, receipt, n_tokens)
    return Payload(
        tensors=tensors,
        layers=layers,
        prompt_token_ids=tuple(prompt_token_ids),
        token_ids=tuple(choice.token_ids),
        receipt=receipt,
    )


def qk_values(choice: ChoiceFields) -> dict[str, Any]:
    """`qk_layers` and `qk_meta` of a choice: plain values beside its queries and keys."""
    entries = choice.activations or {}
    return {n: entry["__json__"] for n, entry in entries.items() if "__json__" in entry}


def _check_qk(name: str, tensor: TensorData, layers: Any) -> tuple[int, ...]:
    """Layers of queries or keys, once their shape is known to fit."""
    if not isinstance(layers, list) or len(tensor.shape) != 4 or tensor.shape[0] != len(layers):
        raise CaptureError(
            f"activations.{name}: shape {tensor.shape} for the layers {layers}; wanted is "
            "(layers, tokens, heads, head size)"
        )
    return tuple(int(layer) for layer in layers)


def _check_lens(tensor: TensorData, receipt: Receipt | None) -> tuple[int, ...]:
    """Layers of what a logit lens read, once its shape is known to fit."""
    done = receipt.lens if receipt else None
    if done is None or tensor.shape != (len(done.layers), done.n_positions, done.columns):
        raise CaptureError(
            f"activations.{LENS_NAME}: shape {tensor.shape}, and the receipt says {done}; the "
            "versions of client and server may differ"
        )
    return done.layers


def _check(
    name: str,
    tensor: TensorData,
    capture: CaptureSpec | None,
    receipt: Receipt | None,
    n_tokens: int,
) -> tuple[int, ...]:
    """Layers of a tensor, once its shape is known to fit."""
    shape = tensor.shape
    if len(shape) != 3:
        raise CaptureError(f"activations.{name}: shape {shape}; wanted is (layers, tokens, hidden)")
    done = receipt.capture if receipt else None
    if capture is not None:
        _check_form(name, tensor, capture, done)
    asked = None if capture is None or capture.layers == "all" else capture.layers
    layers = (done.layers if done else asked) or tuple(range(shape[0]))
    rows = done.n_rows if done else shape[1]
    if done is None and n_tokens and capture is not None and capture.is_plain:
        # Without a receipt the tokens are the only witness.
        rows = n_tokens - 1
    if (asked and layers != asked) or shape[:2] != (len(layers), rows):
        raise CaptureError(
            f"activations.{name}: shape {shape} for layers {list(layers)} and {rows} tokens; "
            f"asked were {'all layers' if asked is None else list(asked)}. The server returned "
            "something else than it was asked for"
        )
    return layers


def _check_form(
    name: str, tensor: TensorData, capture: CaptureSpec, done: CaptureReceipt | None
) -> None:
    """See that a server which does not know a form did not pass over it in silence."""
    reduced = done.reduce if done else "none"
    width = REDUCTIONS[reduced].width
    if reduced != capture.reduce or (width is not None and tensor.shape[2] != width):
        raise CaptureError(
            f"activations.{name}: reduce={capture.reduce!r} was asked for, and shape "
            f"{tensor.shape} came with reduce={reduced!r}; this server does not reduce so"
        )
    if capture.dtype not in ("model", tensor.dtype):
        raise CaptureError(
            f"activations.{name}: dtype={capture.dtype!r} was asked for, and {tensor.dtype} came; "
            "this server does not convert"
        )
