"""Natural-language autoencoders: a model that was trained to put one row into words.

A checkpoint has `nla_meta.yaml`, which says everything that is special: the prompt, the character
whose embedding the row replaces, with its neighbours as token ids, and the length that rows get.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from inspect_ai.model import Model, ModelOutput, get_model
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from inspect_lens._base.artifact import download
from inspect_lens._base.concurrency import together
from inspect_lens._base.untrusted import parse_yaml, parsing, read_regular
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import Activations
from inspect_lens.model._scope import instrument_message
from inspect_lens.reading._rows import has_nothing_to_read, parse_source
from inspect_lens.reading._shared import shared_parameters
from inspect_lens.spec import LensRequest, Replace

from ._ask import OracleAnswer
from ._send import (
    Prompt,
    Shown,
    answer_edited,
    ask_arms,
    draw_of,
    find_activations,
    parse_controls,
    parse_inputs,
    select_rows,
    server_of,
    tokenize_chat,
)

__all__ = ["Verbaliser", "read_verbaliser", "verbalise"]

META: Final = "nla_meta.yaml"
_BYTES: Final = 1 << 16
Made = TypeVar("Made")
_EXPLANATION: Final = re.compile(r"<explanation>\s*(.*?)\s*(?:</explanation>|\Z)", re.DOTALL)


class Verbaliser(BaseModel):
    """What `nla_meta.yaml` says of a checkpoint that puts rows into words."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(description="Folder or address that it was read from.")
    hidden: int = Field(gt=0, description="Width of the rows.")
    layer: int | None = Field(
        default=None, ge=0, description="Block whose output it was trained on; None: not stated."
    )
    base_model: str = Field(default="", description="Model whose rows it was trained on.")
    scale: float = Field(
        gt=0, allow_inf_nan=False, description="Length that each row gets before it is put in."
    )
    prompt: str = Field(description="Message of the user; `{injection_char}` is the place.")
    char: str = Field(min_length=1, description="Character that stands at the place.")
    token_id: int = Field(description="Its token.")
    left_id: int = Field(description="Token before it.")
    right_id: int = Field(description="Token behind it.")


def read_verbaliser(path: str | Path) -> Verbaliser:
    """Read `nla_meta.yaml` of a verbaliser.

    Args:
        path: the file, the checkpoint's folder, or `hf://owner/repository[@revision]`.

    Raises:
        ArtifactError: missing, no such file, or that of a reconstructor.

    Source:
        kitft/natural_language_autoencoders (2026).

    Example:
        ```python
        from inspect_lens.oracle import read_verbaliser

        assert read_verbaliser("nla/av").scale == 9.0
        ```
    """

    def parse(meta: Any) -> Verbaliser:
        if meta["kind"] != "nla_model" or meta.get("role", "av") not in ("av", "actor"):
            kind, role = reprlib.repr(meta["kind"]), reprlib.repr(meta.get("role"))
            raise ValueError(f"kind {kind}, role {role}")
        extraction, tokens, prompts = meta["extraction"], meta["tokens"], meta["prompt_templates"]
        hidden, scale = meta["d_model"], extraction["injection_scale"]
        return Verbaliser(
            name=str(path), hidden=hidden, layer=layer_of(meta),
            base_model=extraction.get("base_model") or "",
            scale=math.sqrt(hidden) if scale == "sqrt_d_model" else scale,
            prompt=one_place(prompts.get("av") or prompts["actor"], "{injection_char}"),
            char=tokens["injection_char"], token_id=tokens["injection_token_id"],
            left_id=tokens["injection_left_neighbor_id"],
            right_id=tokens["injection_right_neighbor_id"],
        )  # fmt: skip

    is_remote = str(path).startswith("hf://")
    file = download("nla", str(path), (META,)) if is_remote else Path(path).expanduser()
    return read_meta(file, parse, what="a verbaliser", role="av")


def read_meta(path: Path, parse: Callable[[Any], Made], *, what: str, role: str) -> Made:
    """What `parse` makes of a `nla_meta.yaml`, or the file as the reason why it cannot."""
    file = path / META if path.is_dir() else path
    allowed = f"allowed are those of kind nla_model with the role {role}"
    with parsing(file, f"the {META} of {what}", allowed):
        return parse(parse_yaml(read_regular(file, most=_BYTES).decode("utf-8")))


def layer_of(meta: Any) -> int | None:
    """The block whose output rows are taken from, wherever a release of the format states it."""
    half = meta.get("ar") or meta.get("critic") or {}
    stated = (
        meta.get("extraction_layer_index"),
        (meta.get("extraction") or {}).get("layer_index"),
        half.get("extraction_layer_index"),
        # Its first version calls the index so, though a checkpoint has one layer more.
        half.get("num_hidden_layers"),
    )
    found: int | None = next((layer for layer in stated if layer is not None), None)
    return found


def one_place(prompt: str, place: str) -> str:
    """A prompt that says once where something goes."""
    if prompt.count(place) != 1:
        raise ValueError(f"its prompt has no or several places {place}")
    return prompt


@shared_parameters
async def verbalise(
    about: Activations | ModelOutput,
    verbaliser: str | Path | Verbaliser,
    *,
    model: Model,
    layer: int | None = None,
    subject: Model | None = None,
    positions: str | Sequence[int] = "completion",
    last: int | None = 1,
    controls: bool | str | Sequence[str] = True,
    seed: int = 0,
    max_tokens: int = 200,
    source: str = "auto",
) -> list[OracleAnswer]:
    """Let a natural-language autoencoder put rows of a generation into words.

    Each row, brought to the length of the verbaliser's training, takes the place of the embedding
    of the marked token in its prompt: `Replace` at the stream before the first block. Decoding is
    greedy.

    Args:
        about: the generation of the model under study: its output, or its activations.
        verbaliser: checkpoint folder, `nla_meta.yaml`, address, or what `read_verbaliser` read.
        model: a `vllm-lens/` model that serves the verbaliser's checkpoint.
        layer: whose rows are put into words; that of its training by default.
        subject: the model that made the generation, to feed it again; the active one by default.
        positions: tokens to choose from; the completion by default.

    Returns:
        An answer for each token, with its controls; none where the generation has no such token.

    Raises:
        SpecError: an argument is wrong, or the layer is known from nowhere.
        ArtifactError: the file, the activations or the tokenizer do not fit.
        UnsupportedError: the model's provider cannot edit.
        CaptureError: the server did not do what it was asked.

    Source:
        kitft/natural_language_autoencoders (2026).

    Example:
        <!-- test: server -->
        ```python
        from functools import partial

        import anyio
        from inspect_ai.log import read_eval_log
        from inspect_ai.model import get_model

        from inspect_lens.oracle import verbalise

        output = read_eval_log("logs/honesty.eval").samples[0].output
        model = get_model("vllm-lens/organism/checkpoint")  # nobody trained it to describe rows
        say = partial(verbalise, output, "nla/av", model=model, subject=model, max_tokens=8)
        (answer,) = anyio.run(say)
        print(answer.answer, answer.controls)
        ```
    """
    plan = VerbalisePlan(
        verbaliser, layer=layer, positions=positions, last=last, controls=controls, seed=seed,
        max_tokens=max_tokens, source=source,
    )  # fmt: skip
    return [answer for answer, _ in await plan.ask(about, model, subject)]


class VerbalisePlan:
    """The arguments of `verbalise`, checked before a model runs."""

    def __init__(
        self,
        verbaliser: str | Path | Verbaliser,
        *,
        layer: int | None,
        positions: str | Sequence[int],
        last: int | None,
        controls: bool | str | Sequence[str],
        seed: int,
        max_tokens: int,
        source: str,
    ) -> None:
        found = verbaliser if isinstance(verbaliser, Verbaliser) else read_verbaliser(verbaliser)
        at = found.layer if layer is None else layer
        if at is None:
            raise SpecError(f"layer: {found.name} states none; pass that of its training")
        _, self.positions, self.last = parse_inputs("tokens", positions, last)
        self.controls, self.source = parse_controls(controls), parse_source(source)
        self.verbaliser, self.layer = found, at
        self.seed, self.max_tokens = seed, max_tokens

    async def ask(
        self, about: Activations | ModelOutput, model: Model, subject: Model | None = None
    ) -> list[tuple[OracleAnswer, NDArray[np.float32]]]:
        """An answer for each row, with the row (hidden,)."""
        found, served = self.verbaliser, server_of(model, "a natural-language autoencoder")
        if isinstance(about, ModelOutput):
            if has_nothing_to_read(about):
                return []
            handle, origin = await find_activations(
                about, layers=(self.layer,), source=self.source, model=subject or get_model()
            )
        else:
            handle, origin = about, "captured"
        shown = await select_rows(
            handle, layers=(self.layer,), inputs="tokens", positions=self.positions, last=self.last
        )
        if shown and shown[0].rows.shape[1] != found.hidden:
            raise ArtifactError(
                f"{found.name}: reads rows of width {found.hidden}, and these have "
                f"{shown[0].rows.shape[1]}; it belongs to {found.base_model or 'another model'}"
            )
        prompt = await _render(found, served)
        draw = draw_of(self.seed, handle)

        async def one(row: Shown) -> OracleAnswer:
            ask = partial(_answer, found, served, prompt, self.max_tokens)
            answer, said = await ask_arms(self.controls, row.rows, draw, ask)
            return OracleAnswer(
                question=found.prompt, answer=answer, controls=dict(said), layers=row.layers,
                inputs="tokens", positions=row.positions, source=origin,
                facts={"verbaliser": found.name, "scale": found.scale, "seed": self.seed},
            )  # fmt: skip

        answers = await together(*(one(row) for row in shown))
        return [(answer, row.rows[0]) for answer, row in zip(answers, shown, strict=True)]


async def _answer(
    found: Verbaliser, model: Model, prompt: Prompt, most: int, row: NDArray[np.float32] | None
) -> str:
    edits: tuple[Replace, ...] = ()
    if row is not None:
        wide = row.astype(np.float64)
        length = float(np.linalg.norm(wide))
        if not np.isfinite(length) or not length:
            raise SpecError("nla: a row of the activations is zero or not finite")
        rows = (wide * (found.scale / length)).astype(np.float32)[np.newaxis]
        edits = (Replace(rows=rows, layers=(0,), site="resid_pre", positions=prompt.places),)
    output = await answer_edited(
        model, [instrument_message(prompt.text, name="nla")], prompt, LensRequest(edits=edits),
        max_tokens=most,
    )  # fmt: skip
    explained = _EXPLANATION.search(output.completion)
    return explained[1] if explained else output.completion.strip()


async def _render(found: Verbaliser, model: Model) -> Prompt:
    """The prompt in tokens, and the place of the row: by its token and both neighbours."""
    text = found.prompt.replace("{injection_char}", found.char)
    ids, _ = await tokenize_chat(model, [{"role": "user", "content": text}], found.char)
    wanted = (found.left_id, found.token_id, found.right_id)
    places = [i for i in range(1, len(ids) - 1) if ids[i - 1 : i + 2] == wanted]
    if len(places) != 1:
        raise ArtifactError(
            f"{found.name}: its rendered prompt has {len(places)} places with the tokens {wanted}, "
            "and one is needed; the model that is served has another tokenizer or chat template"
        )
    return Prompt(text, ids, (places[0],))
