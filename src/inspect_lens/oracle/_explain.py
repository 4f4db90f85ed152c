"""Self-explanation: the model's own rows put into another prompt, which it answers in words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import anyio.to_thread
import numpy as np
from inspect_ai.model import ChatMessage, ChatMessageAssistant, Model, ModelOutput, get_model
from numpy.typing import NDArray

from inspect_lens._base.concurrency import together
from inspect_lens._base.token_texts import TokenTexts
from inspect_lens.errors import SpecError
from inspect_lens.model import Activations, activations
from inspect_lens.model._scope import instrument_message
from inspect_lens.probe import TokenText, select_tokens
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
    find_placeholders,
    parse_controls,
    parse_inputs,
    placeholder_id,
    select_rows,
    server_of,
    tokenize_chat,
)

__all__ = ["EXPLAIN", "explain_rows"]

EXPLAIN: Final = "Say in one sentence what the word{} means."
"""Default prompt for self-explanation; `{}` is the place of the placeholders.

No punctuation touches them, since tokenizers merge it."""


class ExplainPlan:
    """The arguments of `explain_rows`, checked before a model runs."""

    def __init__(
        self,
        prompt: str = EXPLAIN,
        *,
        start: str = "",
        placeholder: str = " ?",
        repeat: int = 1,
        layers: int | Sequence[int] | None = None,
        into: int | None = None,
        positions: str | Sequence[int] = "completion",
        last: int | None = 1,
        controls: bool | str | Sequence[str] = True,
        seed: int = 0,
        max_tokens: int = 30,
        source: str = "auto",
    ) -> None:
        if prompt.count("{}") != 1:
            raise SpecError(
                f"prompt={prompt!r}; write {{}} once, where the placeholders of the rows go"
            )
        if not placeholder or placeholder in prompt.replace("{}", "") or placeholder in start:
            raise SpecError(
                f"placeholder={placeholder!r}; needed is a text of one token that stands nowhere "
                "else in prompt and start"
            )
        chosen = None if layers is None else (layers,) if isinstance(layers, int) else tuple(layers)
        if chosen is not None and (not chosen or min(chosen) < 0 or len(set(chosen)) < len(chosen)):
            raise SpecError(f"layers={layers!r}; allowed are different layers from 0 on, or None")
        if into is not None and into < 0:
            raise SpecError(
                f"into={into!r}; allowed are layers from 0 on, or None for the row's own"
            )
        _, self.positions, self.last = parse_inputs("tokens", positions, last)
        self.prompt, self.start, self.placeholder = prompt, start, placeholder
        self.repeat, self.layers, self.into = repeat, chosen, into
        self.controls, self.source = parse_controls(controls), parse_source(source)
        self.seed, self.max_tokens = seed, max_tokens

    async def ask(
        self, about: Activations | ModelOutput, model: Model | None = None
    ) -> list[OracleAnswer]:
        served = server_of(model or get_model(), "self-explanation")
        if isinstance(about, ModelOutput) and has_nothing_to_read(about):
            return []
        layers = self._layers_of(about)
        handle, origin = await find_activations(
            about, layers=layers, source=self.source, model=served
        )
        prompt, messages = await self._render(served)
        texts = await anyio.to_thread.run_sync(TokenTexts.of, str(served))
        positions = self.positions
        if positions == "prompt" and texts.is_known:
            positions = _of_user(handle, texts) or positions
        read = partial(select_rows, handle, inputs="tokens", positions=positions, last=self.last)
        shown = [rows for layer in layers for rows in await read(layers=(layer,))]
        ids, draw = (*handle.prompt_token_ids, *handle.token_ids), draw_of(self.seed, handle)

        async def say(into: int, row: NDArray[np.float32] | None) -> str:
            edits: tuple[Replace, ...] = ()
            if row is not None:
                rows = np.repeat(row[np.newaxis], len(prompt.places), axis=1)
                edits = (Replace(rows=rows, layers=(into,), positions=prompt.places),)
            output = await answer_edited(
                served, messages, prompt, LensRequest(edits=edits), max_tokens=self.max_tokens
            )
            return output.completion.removeprefix(self.start).strip()

        # What it says without a row is the same for all of them.
        plain = {"text_only": await say(0, None)} if "text_only" in self.controls else {}

        async def one(rows: Shown) -> OracleAnswer:
            into = rows.layers[0] if self.into is None else self.into
            controls = [name for name in self.controls if name not in plain]
            answer, said = await ask_arms(controls, rows.rows, draw, partial(say, into))
            token = {}
            if texts.is_known:
                token = {"token": texts.texts([ids[at] for at in rows.positions])[0]}
            return OracleAnswer(
                question=self.prompt, answer=answer, layers=rows.layers, inputs="tokens",
                controls={name: (plain | said)[name] for name in self.controls},
                positions=rows.positions, source=origin,
                facts={"into": into, "repeat": self.repeat, "seed": self.seed} | token,
            )  # fmt: skip

        return await together(*(one(rows) for rows in shown))

    async def _render(self, model: Model) -> tuple[Prompt, list[ChatMessage]]:
        """The prompt in tokens, where its placeholders are, and its messages."""
        text = self.prompt.replace("{}", self.placeholder * self.repeat)
        messages: list[ChatMessage] = [instrument_message(text, name="self_explain")]
        if self.start:
            messages.append(ChatMessageAssistant(content=self.start))
        turns = [{"role": message.role, "content": message.text} for message in messages]
        ids, alone = await tokenize_chat(model, turns, self.placeholder)
        token = placeholder_id(alone, self.placeholder)
        places = find_placeholders(ids, token, n_layers=1, count=self.repeat)
        return Prompt(text, ids, places), messages

    def _layers_of(self, about: Activations | ModelOutput) -> tuple[int, ...]:
        """Those that were named, or the middle one of those that are known."""
        if self.layers is not None:
            return self.layers
        known = activations(about)
        if known is None or (self.source == "recompute" and isinstance(about, ModelOutput)):
            raise SpecError(
                "layers=None is the middle one of those captured, and nothing was captured or it "
                "is to be recomputed; name a layer"
            )
        return (known.layers[len(known.layers) // 2],)


@shared_parameters
async def explain_rows(
    about: Activations | ModelOutput,
    prompt: str = EXPLAIN,
    *,
    model: Model | None = None,
    start: str = "",
    placeholder: str = " ?",
    repeat: int = 1,
    layers: int | Sequence[int] | None = None,
    into: int | None = None,
    positions: str | Sequence[int] = "completion",
    last: int | None = 1,
    controls: bool | str | Sequence[str] = True,
    seed: int = 0,
    max_tokens: int = 30,
    source: str = "auto",
) -> list[OracleAnswer]:
    """Let a model explain its own activations in words.

    Each row of the generation takes the place of the stream at the placeholders of another
    prompt, and the same model answers that prompt. No adapter is needed. With one placeholder and
    the row's own layer this is a patchscope; with several placeholders and an early layer it is
    SelfIE. Decoding is greedy.

    Args:
        about: the generation: its output, or its activations.
        prompt: the user's message, with `{}` where the placeholders go.
        model: a `vllm-lens/` model; the active one by default.
        layers: whose rows are explained; by default the middle one of those captured.
        positions: tokens to choose from; the completion by default. `prompt` is what the user
            wrote, where the model's tokenizer is on this machine and its chat template is known
            (`select_tokens`): the template ends every prompt with the same tokens.

    Returns:
        An explanation for each layer and token, with its controls; none where the generation has
        no such token. `facts["token"]` is the token's text, where the tokenizer is known. An
        explanation that a control shares says nothing about the row.

    Raises:
        ArtifactError: the activations do not fit, or the placeholder is not one token.
        UnsupportedError: the model's provider cannot edit.
        CaptureError: the server did not do what it was asked.

    Source:
        Patchscopes, arXiv:2401.06102; SelfIE, arXiv:2403.10949.

    Example:
        <!-- test: server -->
        ```python
        from functools import partial

        import anyio
        from inspect_ai.log import read_eval_log
        from inspect_ai.model import get_model

        from inspect_lens.oracle import explain_rows

        output = read_eval_log("logs/honesty.eval").samples[0].output
        model = get_model("vllm-lens/organism/checkpoint")
        explain = partial(explain_rows, output, "Who founded{}?", model=model, layers=4, into=1)
        (answer,) = anyio.run(explain)
        print(answer.answer, answer.controls)
        ```
    """
    plan = ExplainPlan(
        prompt, start=start, placeholder=placeholder, repeat=repeat, layers=layers, into=into,
        positions=positions, last=last, controls=controls, seed=seed, max_tokens=max_tokens,
        source=source,
    )  # fmt: skip
    return await plan.ask(about, model)


def _of_user(handle: Activations, texts: TokenTexts) -> tuple[int, ...]:
    """Positions of what the user wrote: a chat template ends every prompt with the same tokens."""
    ids = handle.prompt_token_ids
    tokens = TokenText(
        pieces=tuple(texts.texts(ids)), n_prompt=len(ids), special=tuple(texts.special(ids))
    )
    return tuple(np.flatnonzero(select_tokens(tokens, "user")).tolist())
