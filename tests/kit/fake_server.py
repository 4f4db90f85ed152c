"""A small HTTP server that speaks the lens protocol, for tests of everything above it.

No model runs. A prompt's tokens are its words; the row of a token at a layer is a formula
(`residual`), so that a test can say which number has to be where. It answers as one of three
servers: `inspect_lens`, `vllm_lens` (no receipt, only its own keys, one choice captured) and
`plain` vLLM, which ignores what it does not know.
"""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self, cast

from inspect_lens.errors import LensError, SpecError
from inspect_lens.spec import (
    CaptureReceipt,
    EngineAutoencoder,
    EngineLens,
    EngineProbe,
    LensRequest,
    ProbeReceipt,
    ProbeUse,
    Receipt,
    Splice,
    TensorData,
    as_tensor_data,
    encode_frame,
    encode_tensor,
    parse_extra_args,
    result_name,
)

from . import fake_probes
from .fake_hooks import qk_of, saved_of, steering_of
from .fake_rows import at_site, residual, tokens_of
from .reduced import reduced, selected

__all__ = ["FakeLensServer", "at_site", "residual", "tokens_of"]

Dialect = Literal["inspect_lens", "vllm_lens", "plain"]
JSON = dict[str, Any]


class FakeLensServer:
    """The server, as a context manager; `requests` holds the bodies that were posted.

    Args:
        model: name that `/v1/models` lists.
        dialect: which server to be.
        n_layers: decoder layers.
        hidden: width of the residual stream.
        delay_s: time that a completion takes, so that calls overlap.
        expire_handles: answer 410 to every handle of the binary transport.
        api_key: to ask for; None asks for nothing.
        port: to listen on; 0 takes a free one.
    """

    def __init__(
        self,
        *,
        model: str = "org/tiny",
        dialect: Dialect = "inspect_lens",
        n_layers: int = 4,
        hidden: int = 8,
        delay_s: float = 0.0,
        expire_handles: bool = False,
        api_key: str | None = None,
        port: int = 0,
    ) -> None:
        self.model, self.dialect = model, dialect
        self.n_layers, self.hidden = n_layers, hidden
        self.delay_s = delay_s
        self.expire_handles = expire_handles
        self.api_key = api_key
        self.requests: list[JSON] = []
        self._words: dict[int, str] = {}
        self.paths, self.read = list[str](), list[str]()  # of POST, and of GET
        self.adapters: dict[str, str] = {}
        self.computes_with: dict[str, str] = {}
        self.handles: dict[str, bytes] = {}
        self.results: str | None = None  # name by which `serve_here` gives its handles away
        self.probe_scores: dict[str, float] = {}  # what registered probes say of every answer
        self.registry: dict[str, EngineProbe] = {}
        self.weights: dict[str, EngineLens | EngineAutoencoder] = {}
        self.refuses_weights = ""
        # Statuses and bodies of the next completions; and their texts, with the tools they call.
        self.fail_next: list[tuple[int, JSON]] = []
        self.says_next: list[tuple[str, list[tuple[str, JSON]]]] = []
        # What it says to the body of a chat, and how likely first tokens are.
        self.replies: Callable[[JSON], tuple[str, Mapping[str, float]]] | None = None
        self.reduces_nothing = False  # says that it reduced nothing
        self.root = model  # folder or name of what is served
        owner = self

        class Handler(_Handler):
            server_owner = owner

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        serve, often = self._http.serve_forever, {"poll_interval": 0.01}
        self._thread = threading.Thread(target=serve, kwargs=often, daemon=True)

    @property
    def url(self) -> str:
        """Root URL, without `/v1`."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._http.server_close()

    # -- answers -----------------------------------------------------------------

    def get(self, path: str) -> tuple[int, Any]:
        """Answer a GET with a status and JSON, or bytes."""
        self.read.append(path)
        if path == "/v1/models":
            names = [self.model, *self.adapters]
            facts = {"max_model_len": 4096, "root": self.root}
            return 200, {"data": [{"id": name, **facts} for name in names]}
        if path == "/openapi.json":
            own = {"vllm_lens": ["/v1/hooks/register"], "inspect_lens": ["/v1/activations/{h}"]}
            return 200, {"paths": {p: {} for p in ["/v1/models", *own.get(self.dialect, [])]}}
        if path.startswith("/v1/activations/"):
            data = self.handles.get(path.rpartition("/")[2])
            if data is None or self.expire_handles:
                return 410, {"detail": "expired"}
            return 200, data
        if path == "/v1/inspect_lens" and self.dialect == "inspect_lens":
            about = {"computes_with": self.computes_with, "results": self.results}
            return 200, {"version": "0", **about}
        return 404, {"detail": "Not Found"}

    def post(self, path: str, body: JSON) -> tuple[int, Any]:
        """Answer a POST with a status and JSON, or an iterator of server-sent events."""
        self.paths.append(path)
        if path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, {}
        if path == "/detokenize":
            return 200, {"prompt": " ".join(self._words[token] for token in body["tokens"])}
        if path == "/tokenize":
            text = body.get("prompt") or _chat_text(body)
            self._words |= zip(tokens_of(text), text.split(), strict=True)
            return 200, {"tokens": tokens_of(text), "count": len(tokens_of(text))}
        if path == "/v1/inspect_lens/registry" and self.dialect == "inspect_lens":
            return self._register(body)
        if path not in ("/v1/chat/completions", "/v1/completions"):
            return 404, {"detail": "Not Found"}
        self.requests.append(body)
        time.sleep(self.delay_s)
        if self.fail_next:
            return self.fail_next.pop(0)
        if body["model"] not in (self.model, *self.adapters):
            return 404, _error(f"The model {body['model']} does not exist.", "NotFoundError", 404)
        try:
            answer = self._complete(path, body)
        except LensError as error:
            return error.status, _error(str(error), type(error).__name__, error.status)
        if body.get("stream"):
            return 200, self._stream(answer)
        return 200, answer

    def _register(self, body: JSON) -> tuple[int, Any]:
        for field, form in (("lens", EngineLens), ("sae", EngineAutoencoder)):
            if field in body and self.refuses_weights:
                return 429, _error(self.refuses_weights, "CapacityError", 429)
            if field in body:
                self.weights[body["name"]] = form.model_validate(body[field])
                return 200, {"name": body["name"]}
        try:
            name, probe = fake_probes.register(body, n_layers=self.n_layers, hidden=self.hidden)
        except LensError as error:
            return 400, _error(str(error), type(error).__name__, 400)
        self.registry[name] = probe
        return 200, {"name": name}

    def _refuse_unknown(self, request: LensRequest | None) -> None:
        if request is None:
            return
        named = [] if request.lens is None else [request.lens.name]
        named += [edit.sae for edit in request.edits if isinstance(edit, Splice)]
        if unknown := [name for name in named if name and name not in self.weights]:
            raise SpecError(f"no lens or autoencoder is registered as {unknown[0]!r}")

    def _complete(self, path: str, body: JSON) -> JSON:
        chat = path == "/v1/chat/completions"
        prompt = tokens_of(_chat_text(body)) if chat else _prompt_tokens(body["prompt"])
        request = None if self.dialect == "plain" else parse_extra_args(body.get("vllm_xargs"))
        if self.dialect == "vllm_lens" and "inspect_lens" in (body.get("vllm_xargs") or {}):
            request = None
        self._refuse_unknown(request)
        steered = request is not None and steering_of(request, 0) is not None
        choices, activations, receipts, saved = [], [], [], []
        for index in range(body.get("n") or 1):
            text, called, logprobs = self._says(body, index, steered=steered)
            done = tokens_of(text)
            choice: JSON = {"index": index, "finish_reason": "stop", "logprobs": logprobs}
            message: JSON = {"role": "assistant", "content": text}
            choice |= {"message": message} if chat else {"text": text}
            if called:
                message["tool_calls"] = [_tool_call(*one) for one in called]
                choice["finish_reason"] = "tool_calls"
            if body.get("return_token_ids"):
                choice["token_ids"] = done
                if not chat:
                    choice["prompt_token_ids"] = prompt
            choices.append(choice)
            tensors, receipt = self._capture(request, prompt, done)
            saved.append(saved_of(request, index))
            activations.append(tensors)
            receipts.append(receipt)
        answer: JSON = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": body["model"],
            "choices": choices,
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": 3, "total_tokens": 9},
        }
        if body.get("return_token_ids") and chat:
            answer["prompt_token_ids"] = prompt
        if activations[0] is not None:
            answer["activations"] = activations[0]
        if receipts[0] is not None:
            answer["inspect_lens"] = receipts[0]
        answer |= saved[0]
        if self.dialect == "inspect_lens":
            for choice, kept in zip(choices[1:], saved[1:], strict=True):
                choice |= kept
            for choice, tensors, receipt in list(zip(choices, activations, receipts, strict=True))[
                1:
            ]:
                choice |= {"activations": tensors} if tensors else {}
                choice |= {"inspect_lens": receipt} if receipt else {}
        return answer

    def _says(
        self, body: JSON, index: int, *, steered: bool
    ) -> tuple[str, list[tuple[str, JSON]], JSON | None]:
        """Text of a choice, the tools it calls, and the likeliest first tokens."""
        if self.replies is not None and "messages" in body:
            text, likely = self.replies(body)
            return text, [], _logprobs(text, likely) if body.get("logprobs") else None
        words = [f"word{index}{i}" for i in range(min(body.get("max_tokens") or 9, 3 + index))]
        text = " ".join((["steered"] if steered else []) + words)
        return *(self.says_next.pop(0) if self.says_next else (text, [])), None

    def _capture(
        self, request: LensRequest | None, prompt: list[int], done: list[int]
    ) -> tuple[JSON | None, JSON | None]:
        if request is None:
            return None, None
        tokens = prompt + done
        n_fed = len(tokens) - 1
        captured, receipt = None, None
        if request.capture is not None:
            wanted = request.capture.layers
            layers = tuple(range(self.n_layers)) if wanted == "all" else wanted
            if max(layers) >= self.n_layers:
                raise SpecError(
                    f"capture.layers: layer {max(layers)}; {self.model} has layers 0 to "
                    f"{self.n_layers - 1}"
                )
            capture = request.capture
            chosen = selected(capture, len(prompt), n_fed)
            tensor = residual(tokens, layers, list(chosen), self.hidden)
            captured = {
                result_name(site): self._encode(
                    reduced(at_site(tensor, site), capture), capture.transport
                )
                for site in capture.sites
            }
            receipt = CaptureReceipt(
                site=request.capture.site,
                layers=layers,
                n_positions=len(chosen),
                first_position=chosen[0] if isinstance(chosen, range) and len(chosen) else None,
                positions=None if isinstance(chosen, range) else tuple(chosen),
                reduce="none" if self.reduces_nothing else capture.reduce,
                dtype="bfloat16" if capture.dtype == "model" else capture.dtype,
                rows=len(layers) * len(chosen),
            )
        if request.qk is not None:
            captured = (captured or {}) | qk_of(request.qk, n_fed, self.n_layers, self._encode)
        if self.dialect == "vllm_lens":
            return captured, None
        steer = steering_of(request, n_fed)
        whole = Receipt(
            n_prompt=len(prompt),
            n_completion=len(done),
            capture=receipt,
            steer=steer,
            probes=tuple(self._probe(use, prompt, done) for use in request.probes),
            cache_salted=steer is not None,
            paths=("eager",),
            engine="inspect_lens",
            version="0",
            vllm_version="0",
        )
        return captured, whole.model_dump(mode="json", exclude_none=True)

    def _probe(self, use: ProbeUse, prompt: list[int], done: list[int]) -> ProbeReceipt:
        if use.name in self.registry:
            return fake_probes.run_probe(self.registry[use.name], use, prompt, done)
        n_fed = len(prompt) + len(done) - 1
        if use.name not in self.probe_scores:
            raise SpecError(f"probes: no probe is registered as {use.name!r}")
        return fake_probes.canned(use, self.probe_scores[use.name], n_fed)

    def _encode(self, tensor: TensorData, transport: str) -> JSON:
        if transport != "binary":
            return encode_tensor(as_tensor_data(tensor))
        entry, data = encode_frame(as_tensor_data(tensor))
        handle = f"{self.results or 'fake'}-{uuid.uuid4().hex}"
        self.handles[handle] = bytes(data)
        return entry | {"handle": handle, "nbytes": len(data), "transport": "binary"}

    def _stream(self, answer: JSON) -> Iterator[JSON]:
        base = {key: answer[key] for key in ("id", "created", "model")}
        base["object"] = "chat.completion.chunk"
        for choice in answer["choices"]:
            for i, word in enumerate(choice["message"]["content"].split(" ")):
                delta = {"role": "assistant", "content": word if i == 0 else f" {word}"}
                chunk: JSON = base | {"choices": [{"index": choice["index"], "delta": delta}]}
                if "token_ids" in choice:
                    chunk["choices"][0]["token_ids"] = choice["token_ids"][i : i + 1]
                    chunk["prompt_token_ids"] = answer["prompt_token_ids"] if i == 0 else None
                yield chunk
            end = {"index": choice["index"], "delta": {}, "finish_reason": "stop"}
            yield base | {"choices": [end]}
        yield base | {"choices": [], "usage": answer["usage"]}
        names = ("activations", "hook_results", "inspect_lens")
        extra: JSON = {k: answer[k] for k in names if k in answer}
        if extra and len(answer["choices"]) > 1:
            own = [{k: c[k] for k in ("index", *names) if k in c} for c in answer["choices"]]
            extra["inspect_lens_choices"] = [own[0] | extra, *own[1:]]
        if extra:
            # vllm-lens sends a bare object here.
            yield extra if self.dialect == "vllm_lens" else base | {"choices": []} | extra


class _Handler(BaseHTTPRequestHandler):
    server_owner: FakeLensServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(*self._guard() or self.server_owner.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        self._answer(*self._guard() or self.server_owner.post(self.path, body))

    def _guard(self) -> tuple[int, Any] | None:
        key = self.server_owner.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return None
        return 401, {"error": "Unauthorized"}

    def _answer(self, status: int, content: Any) -> None:
        if isinstance(content, Iterator):
            events = [f"data: {json.dumps(event)}\n\n" for event in content]
            self._write(
                status, "".join([*events, "data: [DONE]\n\n"]).encode(), "text/event-stream"
            )
        elif isinstance(content, bytes):
            self._write(status, content, "application/octet-stream")
        else:
            self._write(status, json.dumps(content).encode(), "application/json")

    def _write(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return


def _chat_text(body: JSON) -> str:
    parts = []
    for message in body["messages"]:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = " ".join(part.get("text", "") for part in cast("list[JSON]", content))
        parts.append(f"<{message['role']}> {content}")
    thinking = (body.get("chat_template_kwargs") or {}).get("enable_thinking")
    return " ".join(parts + (["<think>"] if thinking else []))


def _tool_call(name: str, arguments: JSON) -> JSON:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": uuid.uuid4().hex, "type": "function", "function": function}


def _prompt_tokens(prompt: str | list[int]) -> list[int]:
    return tokens_of(prompt) if isinstance(prompt, str) else list(prompt)


def _logprobs(text: str, likely: Mapping[str, float]) -> JSON:
    options = [{"token": t, "logprob": math.log(p), "bytes": None} for t, p in likely.items()]
    first = {"token": text.split(" ")[0], "logprob": 0.0, "bytes": None, "top_logprobs": options}
    return {"content": [first]}


def _error(message: str, kind: str, code: int) -> JSON:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
