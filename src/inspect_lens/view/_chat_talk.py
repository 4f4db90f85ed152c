"""A chat with a lens server: tokens, their scores and what layers predict, as they come."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import httpx
from pydantic import BaseModel

from inspect_lens._base.http import server_address
from inspect_lens._base.partial import PARTIAL_KEY, Partial
from inspect_lens._base.token_texts import TokenTexts
from inspect_lens.client import answer_of, events_of, json_of, lens_facts, lines_of, served_models
from inspect_lens.errors import CaptureError, LensError, SpecError
from inspect_lens.lens import load_lens
from inspect_lens.probe import load_probe
from inspect_lens.spec import (
    LENS_NAME,
    LENS_REFERENCE,
    PROBE_REFERENCE,
    EngineEdits,
    Receipt,
    decode_tensor,
    read_as,
)
from inspect_lens.vector import load_vector

from ._page import OF_TOKENS

__all__ = ["ChatSetup", "ChatTalk", "open_talk"]

REGISTRY: Final = "/v1/inspect_lens/registry"
SWEEP: Final = "/v1/inspect_lens/patch_sweep"
PROVIDERS: Final = ("lens/", "vllm-lens/")
SPREAD_LAYERS: Final = 6
"""Layers that are read where none are named."""
DETOKENIZE_AT_ONCE: Final = 8


@dataclass(frozen=True, kw_only=True)
class ChatSetup:
    """What a chat page asks the server for with every answer."""

    model: str
    probe: str | None
    """Name at the server; None: tokens have no score."""
    threshold: float
    """The probe's own for single tokens; 0 where it has none, from which colours then start."""
    lens: str | None
    """Name of a tuned or Jacobian lens at the server; None is the logit lens."""
    layers: tuple[int, ...] | str
    """Layers that are read, or `all`; empty: none."""
    top_k: int
    vector: str | None = None
    """Name of a steering vector at the server; None: answers are not steered."""
    scale: float = 0.0
    """Of the vector, in answers that do not say; 0 steers nothing."""
    probe_shown: str = ""
    """What the reader calls the probe."""
    lens_shown: str = ""
    """What the reader calls the lens."""
    vector_shown: str = ""
    """What the reader calls the vector."""


class ChatTalk:
    """Streams answers of one server.

    Args:
        http: a client of the server.
        setup: what is asked with every answer.

    Example:
        <!-- test: server -->
        ```python
        from inspect_lens.view import open_talk

        talk = open_talk("http://localhost:8000", layers=[2])
        question = {"role": "user", "content": "Who is the founder of the town Velosh?"}
        events = list(talk.answer([question], max_tokens=5, temperature=0))
        assert sum(len(event.get("tokens", ())) for event in events) == 5
        talk.close()
        ```
    """

    def __init__(self, http: httpx.Client, setup: ChatSetup) -> None:
        self._http, self.setup = http, setup
        self._texts = TokenTexts.of(f"lens/{setup.model}")
        self._known: dict[int, str] = {}

    @property
    def server(self) -> str:
        """Address of the server."""
        return str(self._http.base_url).rstrip("/")

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def sweep(self, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """Stream a patch sweep of the server.

        Args:
            body: of `POST /v1/inspect_lens/patch_sweep`, but for the model.

        Yields:
            The lines of that route; an error that comes in the middle is `{"event": "error"}`.

        Raises:
            SpecError: the server refuses it.
            LensError: no server answers, or it answered with an error.
        """
        with contextlib.closing(
            lines_of(self._http, SWEEP, {**body, "model": self.setup.model})
        ) as lines:
            for line in filter(str.strip, lines):
                found = json.loads(line)
                error = found.get("error")
                yield found if error is None else {"event": "error", "message": error["message"]}

    def answer(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        max_tokens: int,
        temperature: float,
        scale: float | None = None,
    ) -> Generator[dict[str, Any]]:
        """Stream the model's answer to a conversation.

        Args:
            messages: of the chat, the last of the user.
            max_tokens: of the answer, at most.
            temperature: of sampling.
            scale: of the vector, for this answer; 0 steers nothing. By default that of the setup.

        Yields:
            Objects for the page: `tokens`, `scores` (one for each token so far, in order), `lens`,
            `steered`, and `end`. Who stops reading ends the generation.

        Raises:
            SpecError: there is a scale and no vector.
            LensError: the server refused, the stream broke off, or it ended without what was asked.
        """
        if scale and self.setup.vector is None:
            raise SpecError(f"scale={scale!r}: of which vector? Open the chat with vector=")
        strength = self.setup.scale if scale is None else scale
        is_steered = self.setup.vector is not None and strength != 0
        body = {
            "model": self.setup.model, "messages": [dict(m) for m in messages], "stream": True,
            "max_tokens": max_tokens, "temperature": temperature, "logprobs": True,
            "return_token_ids": True, **self._asked(strength if is_steered else 0),
        }  # fmt: skip
        finish: str | None = None
        done: Receipt | None = None
        lines = lines_of(self._http, "/v1/chat/completions", body)
        # Closed at once where nobody reads on, so that the server aborts the generation.
        with contextlib.closing(lines):
            for event in events_of(lines):
                for choice in event.get("choices", ()):
                    finish = choice.get("finish_reason") or finish
                    if tokens := _tokens(choice):
                        yield {"event": "tokens", "text": _said(choice), "tokens": tokens}
                for part in event.get(PARTIAL_KEY, ()):
                    scores = Partial.from_json(part).scores[self.setup.probe or ""]
                    yield {"event": "scores", "scores": list(scores)}
                if (receipt := event.get("inspect_lens")) is not None:
                    done = read_as(Receipt, receipt, at="inspect_lens")
                    yield from self._end(done, event.get("activations"))
                    if is_steered and done.steer is not None:
                        layers = list(done.steer.layers)
                        yield {"event": "steered", "scale": strength, "layers": layers}
        self._check(done, is_steered)
        yield {"event": "end", "finish": finish}

    def _asked(self, scale: float) -> dict[str, Any]:
        setup, asked = self.setup, dict[str, Any]()
        if scale:
            asked["edits_named"] = [{"name": setup.vector, "scale": scale}]
        if setup.probe is not None:
            asked["probes"] = [{"name": setup.probe, "tokens": True}]
        if setup.layers:
            asked["lens"] = {
                "name": setup.lens, "layers": setup.layers, "top_k": setup.top_k,
                "positions": "completion",
            }  # fmt: skip
        return {"inspect_lens": asked} if asked else {}

    def _check(self, receipt: Receipt | None, is_steered: bool) -> None:
        """Refuse an answer that came without its scores, its layers or its steering."""
        missing = [
            name
            for name, is_asked, is_there in (
                ("scores of the probe", self.setup.probe is not None, receipt and receipt.probes),
                ("predictions of layers", bool(self.setup.layers), receipt and receipt.lens),
                ("steering", is_steered, receipt and receipt.steer),
            )
            if is_asked and not is_there
        ]
        if missing:
            raise CaptureError(
                f"the server ended its answer without {' and '.join(missing)}; look into its log"
            )

    def _end(self, receipt: Receipt, entries: Any) -> Iterator[dict[str, Any]]:
        """What comes with the receipt: the lens, and the score of the whole answer."""
        if receipt.lens is not None:
            tensor = decode_tensor((entries or {}).get(LENS_NAME, {}), field=LENS_NAME)
            table = receipt.lens.result({LENS_NAME: tensor.to_float32()})
            texts = self._texts_of(sorted({int(i) for i in table.token_ids.ravel()}))
            rows = [
                [
                    [
                        {"id": int(i), "text": texts[int(i)], "p": _chance(float(p))}
                        for i, p in zip(ids, chances, strict=True)
                    ]
                    for ids, chances in zip(*layers, strict=True)
                ]
                for layers in zip(table.token_ids, table.logprobs, strict=True)
            ]
            first = table.positions[0] - receipt.n_prompt if table.positions else 0
            yield {"event": "lens", "first": first, "layers": list(table.layers), "rows": rows}
        for found in receipt.probes or ():
            yield {"event": "pooled", "score": found.score, "aggregate": found.aggregate}

    def _texts_of(self, ids: Sequence[int]) -> dict[int, str]:
        """Texts of tokens: of a tokenizer on this machine, or else of the server's."""
        missing = [i for i in ids if i not in self._known]
        if self._texts.is_known:
            self._known |= {i: self._texts.texts([i])[0] for i in missing}
        elif missing:
            with ThreadPoolExecutor(DETOKENIZE_AT_ONCE) as pool:
                self._known |= dict(zip(missing, pool.map(self._detokenize, missing), strict=True))
        return self._known

    def _detokenize(self, token: int) -> str:
        body = {"model": self.setup.model, "tokens": [token]}
        try:
            return str(json_of(answer_of(self._http, "POST", "/detokenize", body))["prompt"])
        except (LensError, KeyError):
            return f"⟨{token}⟩"


def open_talk(
    base_url: str,
    *,
    model: str | None = None,
    probe: str | None = None,
    lens: str | None = None,
    layers: Sequence[int] | str | None = None,
    top_k: int = 5,
    vector: str | None = None,
    scale: float | None = None,
    api_key: str | None = None,
) -> ChatTalk:
    """Connect to a server for a chat page, and register the probe, lens and vector it lacks.

    Args:
        base_url: of the server, with or without `/v1`.
        model: that it serves, with or without `lens/` in front; its first by default.
        probe: registered name, or the name or folder of one to register; None scores nothing.
        lens: registered name, or the name or folder of one to register; None is the logit lens.
        layers: to read; empty reads none. By default 6 evenly spread ones, or all of a named lens.
        top_k: tokens of each layer.
        vector: steering vector: registered name, or the name or folder of one to register; None
            steers nothing.
        scale: of the vector, until an answer says another. By default its own, which is 1 for a
            vector that is registered here.
        api_key: that the server asks for; also the key of its registry.

    Raises:
        SpecError: the model is not served, a name is that of something else, or there is a scale
            and no vector.
        ArtifactError: a probe, a lens or a vector is neither registered nor found here.
        LensError: no server answers, it has no lens, or it refuses.

    Example:
        <!-- test: server -->
        ```python
        from inspect_lens.view import open_talk

        talk = open_talk("http://localhost:8000", model="lens/organism/checkpoint", top_k=3)
        assert talk.setup.layers == (0, 1, 2, 3, 4, 5)
        talk.close()
        ```
    """
    if vector is None and scale is not None:
        raise SpecError(f"scale={scale!r}: of which vector? Name one with vector=")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = server_address(base_url)
    http = httpx.Client(base_url=base, headers=headers, timeout=600)
    try:
        served = served_models(http)
        engine = lens_facts(http)["engines"][0]
        if (reason := engine.get("not_served")) is not None:
            raise LensError(f"{base}: the lens does not serve this engine: {reason}")
        registered = json_of(answer_of(http, "GET", REGISTRY))
        name, threshold = None, None
        if probe is not None:
            name, threshold = _probe(http, probe, registered)
        pushed, own = (None, 0.0) if vector is None else _vector(http, vector, registered)
        if layers is None and lens is None:
            layers = _spread(engine["layers"])
        setup = ChatSetup(
            model=_served(model, served), probe=name, threshold=threshold or 0.0,
            lens=None if lens is None else _lens(http, lens, registered),
            layers="all" if layers is None or layers == "all" else tuple(map(int, layers)),
            top_k=top_k, vector=pushed, scale=own if scale is None else float(scale),
            probe_shown=probe or "", lens_shown=lens or "", vector_shown=vector or "",
        )  # fmt: skip
        return ChatTalk(http, setup)
    except BaseException:
        http.close()
        raise


def _served(model: str | None, served: Sequence[str]) -> str:
    if model is None:
        return served[0]
    names = [model, *(model.removeprefix(p) for p in PROVIDERS if model.startswith(p))]
    found = next((name for name in names if name in served), None)
    if found is None:
        raise SpecError(f"model={model!r}: is not served there; allowed are {', '.join(served)}")
    return found


def _probe(
    http: httpx.Client, probe: str, registered: Mapping[str, Any]
) -> tuple[str, float | None]:
    if probe in registered:
        _check_kind("probe", PROBE_REFERENCE, probe, registered)
        # An alarm's threshold on each token's own score is one for single tokens, and no other is.
        own = registered[probe].get("aggregate") in ("last", "max")
        return probe, registered[probe].get("threshold") if own else None
    loaded = load_probe(probe)
    form = loaded.for_engine()
    points = [t for one in OF_TOKENS for t in loaded.card.thresholds_for(one)]
    return _register(http, "probe", form.sha256, form), points[0].value if points else None


def _lens(http: httpx.Client, lens: str, registered: Mapping[str, Any]) -> str:
    if lens in registered:
        _check_kind("lens", LENS_REFERENCE, lens, registered)
        return lens
    form = load_lens(lens).for_engine()
    return _register(http, "lens", form.sha256, form)


def _vector(http: httpx.Client, vector: str, registered: Mapping[str, Any]) -> tuple[str, float]:
    """Name at the server, and the scale it has there."""
    if vector in registered:
        known = registered[vector]
        if known.get("scale") is None:
            raise SpecError(f"vector={vector!r}: is registered there, and is no steering vector")
        return vector, known["scale"]
    loaded = load_vector(vector)
    form = loaded.to_steering()
    return _register(http, "edits", loaded.sha256, EngineEdits(edits=(form,))), form.scale


def _register(http: httpx.Client, kind: str, sha256: str, form: BaseModel) -> str:
    """Register under a name made of the content: chats of many users share it."""
    name = f"chat-{sha256[:24]}"
    body = {"name": name, kind: form.model_dump(mode="json"), "replace": True}
    json_of(answer_of(http, "POST", REGISTRY, body))
    return name


def _check_kind(kind: str, reference: str, name: str, registered: Mapping[str, Any]) -> None:
    mark = str(registered[name].get("$lens", ""))
    if mark.partition("/")[0] != reference.partition("/")[0]:
        raise SpecError(f"{kind}={name!r}: is registered there as {mark or 'something else'}")


def _spread(layers: Sequence[int]) -> list[int]:
    n = min(SPREAD_LAYERS, len(layers))
    return [layers[-1 - round(k * (len(layers) - 1) / max(1, n - 1))] for k in range(n)][::-1]


def _tokens(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = (choice.get("logprobs") or {}).get("content") or []
    ids = choice.get("token_ids") or []
    return [
        {
            # vLLM has this sign for a token that is only a part of a character.
            "text": "" if item["token"] == "\ufffd" else item["token"],
            "p": _chance(item["logprob"]),
            "id": ids[k] if k < len(ids) else None,
        }
        for k, item in enumerate(listed)
    ]


def _said(choice: Mapping[str, Any]) -> str:
    return str((choice.get("delta") or {}).get("content") or "")


def _chance(logprob: float | None) -> float | None:
    """None where the model computed no number, which is null in vLLM's JSON."""
    if logprob is None or math.isnan(logprob):
        return None
    return math.exp(min(0.0, logprob))
