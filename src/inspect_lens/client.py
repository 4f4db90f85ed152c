"""A plain HTTP client of a lens server, for scripts and notebooks that do not use Inspect.

```python
with LensClient("http://localhost:8000") as client:
    out = client.generate("The capital of France is", capture_layers=[10], max_tokens=1)
    out.activations["residual_stream"]  # torch.Tensor, (1, tokens, hidden)
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self
from urllib.parse import quote

import httpx
import numpy as np
from numpy.typing import NDArray

from ._torch import to_torch
from .errors import CaptureError, LensError, SpecError, UnsupportedError
from .spec import (
    CaptureSpec,
    LensRequest,
    Receipt,
    SteeringVector,
    TensorData,
    decode_tensor,
    parse_extra_args,
    to_extra_args,
    to_wire_args,
)

if TYPE_CHECKING:
    import torch

__all__ = ["GenerateOutput", "LensClient", "Tensors", "VLLMLensClient"]

_HOOKS = frozenset(
    {
        "register_hooks",
        "collect_hook_results",
        "clear_hooks",
        "clear_hook_results",
        "prefetch_params",
        "clear_prefetched",
    }
)


class Tensors(Mapping[str, "torch.Tensor"]):
    """Captured tensors by name; torch is imported when one is read.

    Args:
        data: (layers, tokens, hidden) by name.
    """

    def __init__(self, data: Mapping[str, TensorData]) -> None:
        self._data = dict(data)

    def __getitem__(self, name: str) -> torch.Tensor:
        return to_torch(self._data[name])

    def numpy(self, name: str = "residual_stream") -> NDArray[np.float32]:
        """One tensor as float32 (exact), without torch."""
        return self._data[name].to_float32()

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        return f"Tensors({', '.join(f'{n}: {t.shape} {t.dtype}' for n, t in self._data.items())})"


@dataclass(frozen=True, kw_only=True)
class GenerateOutput:
    """What one request brought back."""

    text: str
    """Generated text."""
    activations: Tensors | None = None
    """Captured tensors; None when nothing was asked for."""
    receipt: Receipt | None = None
    """What the engine says it did; None from a server that gives no receipts."""
    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: Mapping[str, Any] | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The whole response."""


class LensClient:
    """Client of one server, this package's or vllm-lens'.

    Args:
        base_url: with or without `/v1`.
        model: to ask for; None asks the server what it serves.
        api_key: that the server asks for.
        timeout: of a request, in seconds; None waits for ever.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float | None = 600.0,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._model = model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=self.base_url, headers=headers, timeout=timeout)

    @property
    def model(self) -> str:
        """Name of the model that is asked for."""
        if self._model is None:
            self._model = str(_json(self._http.get("/v1/models"))["data"][0]["id"])
        return self._model

    def generate(
        self,
        prompt: str | list[int],
        *,
        max_tokens: int = 16,
        temperature: float = 0.0,
        capture_layers: Sequence[int] | bool | None = None,
        steering_vectors: Sequence[SteeringVector | Mapping[str, Any]] | None = None,
        activations_transport: str | None = None,
        capture: CaptureSpec | Mapping[str, Any] | None = None,
        hooks: object = None,
        capture_qk: object = None,
        logprobs: int | None = None,
        echo: bool = False,
        **kwargs: Any,
    ) -> GenerateOutput:
        """Complete a raw prompt, as text or token ids.

        Args:
            prompt: the prompt.
            max_tokens: tokens to sample at most.
            temperature: of sampling.
            capture_layers: layers whose residual stream to return; True means all.
            steering_vectors: vectors to add.
            activations_transport: `binary` fetches tensors beside the response; None has them
                in it.
            capture: a CaptureSpec, for what `capture_layers` cannot say (sites, positions).
            hooks: of vllm-lens; not served by this release.
            capture_qk: of vllm-lens; not served by this release.
            logprobs: log-probabilities per token.
            echo: return the prompt too.
            **kwargs: other fields of the request body.

        Returns:
            Text, tensors and receipt.

        Raises:
            SpecError: the request is wrong.
            UnsupportedError: hooks or query/key capture.
            CaptureError: what was asked for did not come.
            LensError: the server answered with an error; the message is the server's.
        """
        body: dict[str, Any] = {"prompt": prompt}
        if logprobs is not None:
            body["logprobs"] = logprobs
        if echo:
            body["echo"] = True
        request = _request(
            capture_layers, steering_vectors, activations_transport, capture, hooks, capture_qk
        )
        sampling = {"max_tokens": max_tokens, "temperature": temperature}
        return self._post("/v1/completions", body | sampling | kwargs, request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 16,
        temperature: float = 0.0,
        capture_layers: Sequence[int] | bool | None = None,
        steering_vectors: Sequence[SteeringVector | Mapping[str, Any]] | None = None,
        activations_transport: str | None = None,
        capture: CaptureSpec | Mapping[str, Any] | None = None,
        hooks: object = None,
        capture_qk: object = None,
        **kwargs: Any,
    ) -> GenerateOutput:
        """Complete a chat; arguments, result and errors are those of `generate`."""
        request = _request(
            capture_layers, steering_vectors, activations_transport, capture, hooks, capture_qk
        )
        body: dict[str, Any] = {"messages": [dict(message) for message in messages]}
        sampling = {"max_tokens": max_tokens, "temperature": temperature}
        return self._post("/v1/chat/completions", body | sampling | kwargs, request)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> NoReturn:
        if name in _HOOKS:
            raise UnsupportedError(
                f"{name}: custom hooks run code of the client in the server and are not served by "
                "this release; capture, steering and probes are"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _post(self, path: str, body: dict[str, Any], request: LensRequest | None) -> GenerateOutput:
        body = {"model": self.model, "return_token_ids": True} | body
        if request is not None:
            own: Any = body.get("vllm_xargs") or {}
            body["vllm_xargs"] = dict(own) | to_wire_args(to_extra_args(request))
        answer = _json(self._http.post(path, json=body))
        choice = answer["choices"][0]
        text = (choice.get("message") or {}).get("content") or choice.get("text") or ""
        receipt = answer.get("inspect_lens")
        return GenerateOutput(
            text=text,
            activations=self._tensors(answer.get("activations"), request),
            receipt=None if receipt is None else Receipt.model_validate(receipt),
            prompt_token_ids=answer.get("prompt_token_ids") or choice.get("prompt_token_ids") or [],
            token_ids=choice.get("token_ids") or [],
            logprobs=choice.get("logprobs"),
            raw=answer,
        )

    def _tensors(
        self, entries: Mapping[str, Any] | None, request: LensRequest | None
    ) -> Tensors | None:
        if not entries:
            if request is not None and request.capture is not None:
                raise CaptureError(
                    "activations: asked for, and the response has none; the server runs without "
                    "the inspect-lens plug-in"
                )
            return None
        return Tensors({name: self._decode(name, entry) for name, entry in entries.items()})

    def _decode(self, name: str, entry: Mapping[str, Any]) -> TensorData:
        handle = entry.get("handle")
        raw = None
        if handle is not None:
            response = self._http.get(f"/v1/activations/{quote(str(handle), safe='')}")
            if response.status_code != httpx.codes.OK:
                raise CaptureError(
                    f"activations.{name}: handle {handle!r} answered HTTP {response.status_code}; "
                    "it expired or belongs to another API-server process; leave out "
                    "activations_transport"
                )
            raw = response.content
        try:
            return decode_tensor(entry, field=f"activations.{name}", raw=raw)
        except SpecError as error:
            raise CaptureError(str(error)) from None


VLLMLensClient = LensClient
"""The name that vllm-lens uses."""


def _request(
    capture_layers: Sequence[int] | bool | None,
    steering_vectors: Sequence[SteeringVector | Mapping[str, Any]] | None,
    transport: str | None,
    capture: CaptureSpec | Mapping[str, Any] | None,
    hooks: object,
    capture_qk: object,
) -> LensRequest | None:
    for name, value in (("hooks", hooks), ("capture_qk", capture_qk)):
        if value is not None:
            raise UnsupportedError(f"{name}: not served by this release; leave it out")
    args: dict[str, Any] = {}
    if capture_layers is not None:
        layers = capture_layers
        args["output_residual_stream"] = layers if isinstance(layers, bool) else list(layers)
    if steering_vectors is not None:
        args["apply_steering_vectors"] = list(steering_vectors)
    if transport is not None:
        args["activations_transport"] = transport
    request = parse_extra_args(args)
    if capture is None:
        return request
    if capture_layers is not None:
        raise SpecError("capture and capture_layers: give one of them")
    fields = dict(capture) if isinstance(capture, Mapping) else capture.model_dump()
    if transport is not None:
        fields["transport"] = transport
    chosen = parse_extra_args({"inspect_lens": {"capture": fields}})
    update = {"capture": chosen.capture if chosen else None}
    return (request or LensRequest()).model_copy(update=update)


def _json(response: httpx.Response) -> Any:
    """The JSON of a good answer; the server's words as an error otherwise."""
    try:
        content = response.json()
    except ValueError:
        content = {}
    error = content.get("error") if isinstance(content, dict) else None
    if response.is_success and error is None:
        return content
    status = response.status_code
    message = error.get("message") if isinstance(error, Mapping) else error
    text = f"HTTP {status}: {message or response.text[:500] or response.reason_phrase}"
    raise SpecError(text) if status in (400, 422) else LensError(text)
