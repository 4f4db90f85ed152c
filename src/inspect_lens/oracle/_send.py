"""One prompt of an oracle: the activations that it shows, rendered and answered by the server."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import numpy as np
from inspect_ai.model import ChatMessage, GenerateConfig, Model, ModelOutput
from numpy.typing import NDArray

from inspect_lens._base.arguments import one_or_several
from inspect_lens._base.concurrency import together
from inspect_lens.errors import ArtifactError, CaptureError, SpecError, UnsupportedError
from inspect_lens.model import Activations, activations_for, lens_config, recapture, receipt
from inspect_lens.model._request import role_advice
from inspect_lens.model._scope import instrument_message, outside_scopes
from inspect_lens.reading import Source
from inspect_lens.reading._follow_up import TOP_TOKENS
from inspect_lens.reading._rows import in_thread, pick_rows, select_positions, take_captured
from inspect_lens.spec import (
    Add,
    Cache,
    LensRequest,
    Positions,
    check_word,
    parse_positions,
    to_extra_args,
)

from ._load import Oracle, OracleConfig

__all__ = ["CONTROLS"]

InputKind = Literal["tokens", "segment", "full_seq"]
"""`segment`: the chosen tokens together; `tokens`: each of them alone, one question for each;
`full_seq`: every token of prompt and completion together."""

LayerChoice: TypeAlias = int | float | Sequence[int] | None
"""A layer; a share of the depth such as 0.5, which is layer int(n_layers * 0.5); one of the
oracle's sets of several layers; or None for the middle one of its sets."""


class Shown(NamedTuple):
    """Rows that one prompt shows."""

    rows: NDArray[np.float32]
    """(layers times positions, hidden), layer by layer."""
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    """Absolute positions over prompt and completion."""


def parse_inputs(
    inputs: str, positions: object, last: int | None
) -> tuple[InputKind, Positions, int | None]:
    """Judge what a user asked to show."""
    check_word("inputs", inputs, InputKind)
    if last is not None and (isinstance(last, bool) or not isinstance(last, int) or last < 1):
        raise SpecError(f"last={last!r}; allowed are a positive number of tokens, and None for all")
    kind: InputKind = "tokens" if inputs == "tokens" else "segment"
    if inputs == "full_seq":
        return "full_seq", "all", None
    return kind, parse_positions(positions, field="positions"), last


def choose_layers(
    config: OracleConfig, layers: LayerChoice, n_layers: int | None
) -> tuple[int, ...]:
    """Find the layers to show, among those that the oracle learned to read."""
    known = config.act_layer_combinations
    if layers is None:
        return known[len(known) // 2]
    if isinstance(layers, bool) or not isinstance(layers, int | float | Sequence):
        raise SpecError(f"layers={layers!r}; allowed are a layer, a share of the depth, or None")
    wanted: tuple[int, ...]
    if isinstance(layers, float):
        if not 0.0 < layers < 1.0 or n_layers is None:
            raise SpecError(
                f"layers={layers!r}; a share of the depth is between 0 and 1, as 0.5 for the middle"
            )
        wanted = (int(n_layers * layers),)
    else:
        wanted = (layers,) if isinstance(layers, int) else tuple(layers)
    if wanted not in known:
        asked = f"layers={layers!r}" + (
            f" (layer {wanted[0]})" if isinstance(layers, float) else ""
        )
        raise SpecError(
            f"{asked}; this oracle learned to read {', '.join(map(str, map(list, known)))} "
            "(act_layer_combinations of its ao_config.json), and answers about others would mean "
            "nothing"
        )
    return wanted


async def find_activations(
    about: Activations | ModelOutput | ChatMessage,
    *,
    layers: tuple[int, ...],
    source: Source,
    model: Model,
) -> tuple[Activations, str]:
    """The activations of a generation, and whether they were captured or fed again."""
    if isinstance(about, Activations):
        return about, "captured"
    if not isinstance(about, ModelOutput):
        handle = activations_for(about)
        if handle is None:
            raise ArtifactError(
                f"oracle: no activations are known for message {about.id!r}; the call that made it "
                "has to capture: -M capture=…, with_capture(…) or lens_config(capture=…); in a "
                f"role {role_advice()}"
            )
        return handle, "captured"

    def take(handle: Activations, origin: str) -> tuple[Activations, str]:
        pick_rows(handle, layers, wanted=())  # reads the file, which may be gone
        return handle, "captured" if origin == "rows" else origin

    return await take_captured(
        about, take, layers=layers, source=source, model=model, reader="oracle"
    )


async def select_rows(
    handle: Activations,
    *,
    layers: tuple[int, ...],
    inputs: InputKind,
    positions: Positions,
    last: int | None = None,
) -> list[Shown]:
    """Cut out what each prompt shows; the last sampled token was not read and is never shown."""
    read: Positions = "all" if inputs == "full_seq" else positions
    found = tuple(select_positions(read, handle.n_prompt, handle.n_completion) or ())
    wanted = found if last is None else found[-last:]
    captured = (await in_thread(lambda: pick_rows(handle, layers, wanted=wanted))).acts
    if not wanted:
        return []
    if inputs == "tokens":
        return [Shown(captured[:, i].copy(), layers, (p,)) for i, p in enumerate(wanted)]
    return [Shown(captured.reshape(-1, captured.shape[-1]), layers, wanted)]


T = TypeVar("T")
Control = Literal["text_only", "shuffled", "random"]
"""`text_only`: the same prompt and no vector. `shuffled`: the rows with their dimensions
permuted. `random`: Gaussian rows of the same norms."""

CONTROLS: Final[tuple[Control, ...]] = get_args(Control)
"""Names of the controls that can be asked beside an oracle."""


def injection(config: OracleConfig, rows: NDArray[np.float32], positions: tuple[int, ...]) -> Add:
    """Make the edits that add rows at placeholders: `h + coefficient * ||h|| * v / ||v||`."""
    if rows.ndim != 2 or rows.shape[0] != len(positions):
        raise SpecError(
            f"oracle: rows have shape {rows.shape} for {len(positions)} placeholders; needed is "
            "(placeholders, hidden)"
        )
    norms = np.linalg.norm(rows.astype(np.float64), axis=-1)
    if not np.isfinite(norms).all() or not norms.all():
        at = int(np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))[0])
        raise SpecError(f"oracle: row {at} of the activations is zero or not finite")
    return Add(
        vector=rows[np.newaxis],
        layers=(config.hook_onto_layer,),
        scale=config.steering_coefficient,
        norm_match=True,
        positions=positions,
    )


def shuffled_rows(rows: NDArray[np.float32], *, seed: int | tuple[int, ...]) -> NDArray[np.float32]:
    """Permute the dimensions of all rows in the same way, as a control."""
    order = np.random.default_rng(seed).permutation(rows.shape[-1])
    return np.ascontiguousarray(rows[..., order], dtype=np.float32)


def random_rows(rows: NDArray[np.float32], *, seed: int | tuple[int, ...]) -> NDArray[np.float32]:
    """Draw Gaussian rows with the norms of the given rows, as a control."""
    drawn = np.random.default_rng(seed).standard_normal(rows.shape)
    norms = np.linalg.norm(rows.astype(np.float64), axis=-1, keepdims=True)
    scaled = drawn / np.linalg.norm(drawn, axis=-1, keepdims=True) * norms
    return np.asarray(scaled, dtype=np.float32)


def draw_of(seed: int, handle: Activations) -> tuple[int, ...]:
    """Seed of the controls: it differs between generations, and stays for each of them."""
    ids = np.asarray((*handle.prompt_token_ids, *handle.token_ids), dtype=np.int64)
    return seed, zlib.crc32(ids.tobytes())


async def ask_arms(
    controls: Sequence[Control],
    rows: NDArray[np.float32],
    draw: tuple[int, ...],
    ask: Callable[[NDArray[np.float32] | None], Awaitable[T]],
) -> tuple[T, dict[Control, T]]:
    """What is said when the rows are put in, and what is said for each control."""
    made: list[NDArray[np.float32] | None] = [rows]
    for control in controls:
        change = {"shuffled": shuffled_rows, "random": random_rows}.get(control)
        made.append(None if change is None else change(rows, seed=draw))
    answer, *others = await together(*map(ask, made))
    return answer, dict(zip(controls, others, strict=True))


def parse_controls(controls: bool | str | Sequence[str]) -> tuple[Control, ...]:
    """Read controls as a user writes them: true for all, false for none, or names."""
    if isinstance(controls, bool):
        return CONTROLS if controls else ()
    names = one_or_several(controls)
    if unknown := [name for name in names if name not in CONTROLS]:
        raise SpecError(
            f"controls={controls!r}: {unknown[0]!r} is none; allowed are {', '.join(CONTROLS)}, "
            "true for all of them and false for none"
        )
    return tuple(name for name in CONTROLS if name in names)


def oracle_message(
    config: OracleConfig, question: str, *, layers: tuple[int, ...], count: int
) -> str:
    r"""The user message of the published format, `"Layer: 18\n ? ? ? \nIs it a lie?"`."""
    if count < 1 or not layers:
        raise SpecError(f"oracle: {count} vectors of layers {list(layers)}; at least one is needed")
    if not question.strip():
        raise SpecError("oracle: the question is empty; ask something")
    if config.special_token in question:
        raise SpecError(
            f"oracle: the question {question!r} holds the placeholder {config.special_token!r}, "
            "which marks where activations go; leave it out"
        )
    return config.prefix(layers, count) + question


def placeholder_id(token_ids: Sequence[int], placeholder: str) -> int:
    if len(token_ids) != 1:
        raise ArtifactError(
            f"the placeholder {placeholder!r} is {len(token_ids)} tokens {list(token_ids)} of this "
            "model, and has to be one; an oracle with this special_token belongs to another model"
        )
    return token_ids[0]


def find_placeholders(
    prompt_token_ids: Sequence[int], placeholder: int, *, n_layers: int, count: int
) -> tuple[int, ...]:
    found = [i for i, token in enumerate(prompt_token_ids) if token == placeholder]
    wanted = n_layers * count
    if len(found) != wanted:
        raise ArtifactError(
            f"oracle: the rendered prompt has {len(found)} placeholder tokens (id {placeholder}) "
            f"and {wanted} were written; the chat template or the tokenizer changes them, so "
            "this oracle cannot be asked through this model"
        )
    for begin in range(0, wanted, count):
        block = found[begin : begin + count]
        if block[-1] - block[0] != count - 1:
            raise ArtifactError(
                f"oracle: the placeholders at {block} are not consecutive; the chat template or "
                "the tokenizer puts something between them"
            )
    return tuple(found)


_KWARGS: Final = {"enable_thinking": False}
"""Templates that know no such switch ignore it."""
_REMEMBERED: Final = 4096


class Prompt(NamedTuple):
    """One rendered prompt."""

    text: str
    ids: tuple[int, ...]
    places: tuple[int, ...]
    """Positions of the placeholders."""


_prompts: Final[Cache[tuple[str, ...], Prompt]] = Cache(_REMEMBERED)
_norms: Final[Cache[tuple[str, ...], tuple[float, ...]]] = Cache(_REMEMBERED)


async def render_prompt(oracle: Oracle, model: Model, question: str, shown: Shown) -> Prompt:
    """Spell a question, let the server tokenise it, and find the placeholders."""
    n_layers, count = len(shown.layers), len(shown.positions)
    text = oracle_message(oracle.config, question, layers=shown.layers, count=count)
    key = (*_address(model), oracle.config.special_token, text)
    if (known := _prompts.get(key)) is not None:
        return known
    ids, alone = await tokenize_chat(
        model, [{"role": "user", "content": text}], oracle.config.special_token
    )
    token = placeholder_id(alone, oracle.config.special_token)
    places = find_placeholders(ids, token, n_layers=n_layers, count=count)
    _prompts.keep(key, prompt := Prompt(text, ids, places))
    return prompt


async def placeholder_norms(oracle: Oracle, model: Model, prompt: Prompt) -> tuple[float, ...]:
    """Norms of the stream that vectors are matched to, at the placeholders of one prompt.

    They depend on the prompt alone, so one forward pass serves every sample.
    """
    key = (*_address(model), oracle.adapter, prompt.text)
    if (known := _norms.get(key)) is not None:
        return known
    layer = oracle.config.hook_onto_layer
    seen = await recapture(
        model,
        prompt_token_ids=prompt.ids,
        token_ids=prompt.ids[:1],
        layers=[layer],
        adapter=oracle.adapter,
    )
    rows = seen.numpy()[0][list(prompt.places)].astype(np.float64)
    _norms.keep(key, norms := tuple(map(float, np.linalg.norm(rows, axis=-1))))
    return norms


async def answer_prompt(
    oracle: Oracle,
    model: Model,
    prompt: Prompt,
    rows: NDArray[np.float32] | None,
    *,
    max_tokens: int,
    log_odds: bool = False,
) -> ModelOutput:
    """Answer one prompt greedily, with vectors or without, and see that it was this prompt."""
    edits = () if rows is None else (injection(oracle.config, rows, prompt.places),)
    return await answer_edited(
        model, [instrument_message(prompt.text, name="oracle")], prompt,
        LensRequest(edits=edits), lora=oracle.lora_request, max_tokens=max_tokens,
        likely={"logprobs": True, "top_logprobs": TOP_TOKENS} if log_odds else {},
    )  # fmt: skip


async def answer_edited(
    model: Model,
    messages: list[ChatMessage],
    prompt: Prompt,
    request: LensRequest,
    *,
    lora: dict[str, Any] | None = None,
    max_tokens: int,
    likely: Mapping[str, Any] | None = None,
) -> ModelOutput:
    """Answer one prompt greedily as a request edits it, and see that it was this prompt.

    `likely` has the fields that ask for the likeliest tokens.
    """
    args = to_extra_args(request)
    # A capture that the model is configured with is not for an instrument's own prompts.
    args["output_residual_stream"] = False
    config = lens_config(
        lora=lora,
        # All of it is said here: nothing of the task's own extra_body or system prompt is meant.
        base=GenerateConfig(),
        extra_body={"extra_args": args, "chat_template_kwargs": dict(_KWARGS)},
        system_message="",
        temperature=0.0,
        max_tokens=max_tokens,
        num_choices=1,
        **(likely or {}),
    )
    # Edits that are meant for the model under evaluation are not for its instruments.
    with outside_scopes():
        output = await model.generate(messages, config=config)
    seen = tuple((output.metadata or {}).get("prompt_token_ids") or ())
    if seen != prompt.ids:
        raise CaptureError(
            f"oracle: the prompt was answered as {len(seen)} other tokens than /tokenize made of "
            f"it ({len(prompt.ids)}), so the vectors went to the wrong places; something between "
            "changes messages, such as a system message or a template of the server"
        )
    done = receipt(output)
    if request.edits and done is not None:
        steered = done.steer
        if steered is None or steered.n_tokens + steered.cached_tokens < len(prompt.places):
            raise CaptureError(
                f"oracle: {len(prompt.places)} placeholders were to be steered, and the receipt "
                f"says {steered and steered.n_tokens}"
            )
    return output


async def tokenize_chat(
    model: Model, messages: list[dict[str, str]], placeholder: str
) -> tuple[tuple[int, ...], list[int]]:
    """Tokens of a chat and of the placeholder alone, as the server makes them."""
    api: Any = model.api
    goes_on = messages[-1]["role"] == "assistant"
    alone = await api.post("/tokenize", {"prompt": placeholder, "add_special_tokens": False})
    whole = await api.post(
        "/tokenize",
        {
            "messages": messages,
            "add_generation_prompt": not goes_on,
            "chat_template_kwargs": dict(_KWARGS),
            **({"continue_final_message": True} if goes_on else {}),
        },
    )
    return tuple(whole["tokens"]), list(alone["tokens"])


def server_of(model: Model, what: str) -> Model:
    """The model, if its server can be asked to edit."""
    from inspect_lens.model._provider import LensAPI

    if not isinstance(model.api, LensAPI):
        raise UnsupportedError(
            f"{what} needs a vllm-lens/ model that can steer and load adapters, and the model is "
            f"{model}; pass --model vllm-lens/… or model="
        )
    return model


def _address(model: Model) -> tuple[str, str]:
    return str(model), str(getattr(model.api, "base_url", None))
