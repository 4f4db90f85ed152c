"""Asking: one prompt with vectors put in, and the same prompt once more for each control."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from inspect_ai.model import ChatMessage, Model, ModelOutput, get_model
from pydantic import BaseModel, ConfigDict, model_serializer

from inspect_lens._base.arguments import one_or_several
from inspect_lens._base.artifact import markdown_table
from inspect_lens._base.concurrency import together
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import Activations, recapture
from inspect_lens.reading._follow_up import yes_or_no
from inspect_lens.reading._rows import has_nothing_to_read, parse_source
from inspect_lens.reading._shared import shared_parameters

from ._load import Oracle, load_oracle
from ._send import (
    CONTROLS,
    LayerChoice,
    Shown,
    answer_prompt,
    ask_arms,
    choose_layers,
    draw_of,
    find_activations,
    oracle_message,
    parse_controls,
    parse_inputs,
    placeholder_norms,
    render_prompt,
    select_rows,
    server_of,
)

__all__ = ["OracleAnswer", "answer_table", "ask_oracle"]

SINK_NORM = 300.0
"""Norm of the stream above which a token is an attention sink, and a norm-matched vector far
larger than those that the oracle was trained with."""


class OracleAnswer(BaseModel):
    """One answer, its controls, and the facts behind them."""

    model_config = ConfigDict(frozen=True)

    question: str
    answer: str
    """What the oracle says when it is shown the activations."""
    controls: dict[str, str] = {}
    """What it says without them, by control: an answer that stands there too says nothing."""
    log_odds: dict[str, float | None] = {}
    """log of P(yes) / P(no) in nats, by `oracle` and control, where it was asked for; None where
    neither word was among the likeliest tokens."""
    layers: tuple[int, ...]
    """Layers whose activations were shown."""
    inputs: str
    """Kind of input."""
    positions: tuple[int, ...]
    """Positions that were shown, over prompt and completion of the generation."""
    source: str
    """`captured` or `recomputed`."""
    facts: dict[str, Any] = {}
    """Oracle, hash of its weights, where and how vectors were put in, seed, and the largest norm
    of the stream there; `sinks` has the places where that exceeds 300, and `bounds` the arms whose
    log odds are further from 0, because one of both words was not among the likeliest tokens."""

    @model_serializer(mode="plain")
    def _small(self) -> dict[str, Any]:
        """Plain data for a log; consecutive positions as [start, end)."""
        at = self.positions
        run = len(at) > 2 and at == tuple(range(at[0], at[-1] + 1))
        return {
            "question": self.question,
            "answer": self.answer,
            "controls": dict(self.controls),
            **({"log_odds": dict(self.log_odds)} if self.log_odds else {}),
            "layers": list(self.layers),
            "inputs": self.inputs,
            "n_tokens": len(at),
            "positions": {"start": at[0], "end": at[-1] + 1} if run else list(at),
            "source": self.source,
            "facts": dict(self.facts),
        }


def answer_table(answers: Sequence[OracleAnswer]) -> str:
    """Lay answers out as a Markdown table, a column for each control, with warnings below it.

    Args:
        answers: of one oracle.

    Example:
        ```python
        from inspect_lens.oracle import OracleAnswer, answer_table

        answer = OracleAnswer(
            question="Is the speaker lying?",
            answer="Yes",
            controls={"text_only": "No"},
            layers=(4,),
            inputs="segment",
            positions=(47, 48),
            source="captured",
        )
        print(answer_table([answer]))
        ```
    """
    asked = [name for name in CONTROLS if any(name in a.controls for a in answers)]
    heads = ["question", "answer", *(name.replace("_", " ") for name in asked)]
    per_token = any(a.inputs == "tokens" for a in answers)
    rows = [[a.question, a.answer, *(a.controls.get(n, "") for n in asked)] for a in answers]
    if per_token:
        heads.insert(1, "token")
        for row, a in zip(rows, answers, strict=True):
            row.insert(1, f"{a.positions[0]} {a.facts.get('token', '')}")
    table = markdown_table(heads, rows)
    if any(a.facts.get("sinks") for a in answers):
        table += (
            f"\n\nAt some placeholders the stream is longer than {SINK_NORM:.0f} (an attention "
            "sink): the vectors there are far longer than those the oracle learned from."
        )
    return table


class OraclePlan:
    """The arguments of `ask_oracle`, checked before a model runs."""

    def __init__(
        self,
        questions: str | Sequence[str],
        oracle: str | Path | Oracle,
        *,
        layers: LayerChoice = None,
        inputs: str = "segment",
        positions: str | Sequence[int] = "completion",
        last: int | None = 10,
        controls: bool | str | Sequence[str] = True,
        seed: int = 0,
        max_tokens: int = 40,
        source: str = "auto",
        served_as: str | None = None,
        log_odds: bool = False,
    ) -> None:
        self.oracle = load_oracle(oracle, served_as=served_as)
        self.questions = one_or_several(questions)
        if not self.questions:
            raise SpecError("questions: there is none; ask at least one")
        for question in self.questions:
            oracle_message(self.oracle.config, question, layers=(0,), count=1)
        if not isinstance(layers, float):
            choose_layers(self.oracle.config, layers, None)
        self.inputs, self.positions, self.last = parse_inputs(inputs, positions, last)
        self.controls, self.source = parse_controls(controls), parse_source(source)
        self.layers, self.seed = layers, seed
        self.max_tokens, self.log_odds = max_tokens, log_odds

    async def ask(
        self, about: Activations | ModelOutput | ChatMessage, model: Model | None = None
    ) -> list[OracleAnswer]:
        target = server_of(model or get_model(), "an activation oracle")
        if isinstance(about, ModelOutput) and has_nothing_to_read(about):
            return []
        layers = await self.layers_of(target)
        handle, origin = await find_activations(
            about, layers=layers, source=self.source, model=target
        )
        self._require(layers, handle)
        shown = await select_rows(
            handle, layers=layers, inputs=self.inputs, positions=self.positions, last=self.last
        )
        draw = draw_of(self.seed, handle)
        # The first answer loads the adapter and fills the cache of prompts for the others.
        pairs = [(question, rows) for question in self.questions for rows in shown]
        first = [await self._answer(target, *pair, draw, origin) for pair in pairs[:1]]
        rest = await together(*(self._answer(target, *pair, draw, origin) for pair in pairs[1:]))
        return [*first, *rest]

    async def layers_of(self, model: Model) -> tuple[int, ...]:
        """The layers that are shown, of which a share of the depth asks the server."""
        depth = None
        if isinstance(self.layers, float):
            api: Any = model.api
            said = await api.post("/tokenize", {"prompt": "a a", "add_special_tokens": False})
            ids = said["tokens"][:1]
            whole = await recapture(model, prompt_token_ids=ids, token_ids=ids, layers="all")
            depth = len(whole.layers)
        return choose_layers(self.oracle.config, self.layers, depth)

    async def _answer(
        self, model: Model, question: str, shown: Shown, draw: tuple[int, ...], origin: str
    ) -> OracleAnswer:
        config = self.oracle.config
        prompt = await render_prompt(self.oracle, model, question, shown)
        ask = partial(
            answer_prompt, self.oracle, model, prompt,
            max_tokens=self.max_tokens, log_odds=self.log_odds,
        )  # fmt: skip
        output, others = await ask_arms(self.controls, shown.rows, draw, ask)
        norms = await placeholder_norms(self.oracle, model, prompt)
        facts: dict[str, Any] = {
            "oracle": self.oracle.name,
            "oracle_sha256": self.oracle.sha256[:16],
            "hook_layer": config.hook_onto_layer,
            "coefficient": config.steering_coefficient,
            "seed": self.seed,
            "max_stream_norm": round(max(norms), 3) if norms else None,
        }
        if sinks := [p for p, norm in zip(prompt.places, norms, strict=False) if norm > SINK_NORM]:
            facts["sinks"] = sinks
        if output.stop_reason != "stop":
            facts["stop_reason"] = output.stop_reason
        arms = [("oracle", output), *((str(name), other) for name, other in others.items())]
        odds = {arm: yes_or_no(one) for arm, one in arms if self.log_odds}
        if bounds := [arm for arm, found in odds.items() if found.is_bound]:
            facts["bounds"] = bounds
        return OracleAnswer(
            question=question,
            answer=output.completion.strip(),
            controls={name: other.completion.strip() for name, other in others.items()},
            log_odds={arm: found.log_odds for arm, found in odds.items()},
            layers=shown.layers,
            inputs=self.inputs,
            positions=shown.positions,
            source=origin,
            facts=facts,
        )

    def _require(self, layers: tuple[int, ...], handle: Activations) -> None:
        """Refuse activations of other layers, and say which of them the oracle could read."""
        have = set(handle.layers)
        if set(layers) <= have:
            return
        readable = [list(c) for c in self.oracle.config.act_layer_combinations if set(c) <= have]
        instead = ", or layers=" + " or ".join(map(str, readable)) if readable else ""
        raise ArtifactError(
            f"oracle: it was to read layers {list(layers)}, and the generation captured "
            f"{list(handle.layers)}; pass capture={list(layers)} to what captures{instead} to the "
            "oracle"
        )


@shared_parameters
async def ask_oracle(
    about: Activations | ModelOutput | ChatMessage,
    questions: str | Sequence[str],
    oracle: str | Path | Oracle,
    *,
    model: Model | None = None,
    layers: LayerChoice = None,
    inputs: str = "segment",
    positions: str | Sequence[int] = "completion",
    last: int | None = 10,
    controls: bool | str | Sequence[str] = True,
    seed: int = 0,
    max_tokens: int = 40,
    source: str = "auto",
    log_odds: bool = False,
) -> list[OracleAnswer]:
    """Ask an activation oracle about the activations of one generation.

    The oracle answers on the same server, as a LoRA adapter beside the base model. Its prompt is
    that of the published format; vectors are added at the placeholders, norm-matched, after the
    block that its `ao_config.json` names. Decoding is greedy.

    Args:
        about: the generation: its output, its assistant message, or its activations.
        questions: one question, or several about the same activations.
        oracle: name, path, or an `Oracle`.
        model: a `vllm-lens/` model; the active one by default.
        positions: tokens to choose from; the completion by default.
        log_odds: also read how likely yes and no are, where the answer says one of them, or at its
            first token.

    Returns:
        An answer for each question (for `tokens`, for each question and token); none where the
        generation has no such token, or `probe_gate` withheld it.

    Raises:
        ArtifactError: the oracle, the activations or the tokenizer do not fit.
        UnsupportedError: the model's provider cannot steer.
        CaptureError: the server did not do what it was asked.

    Source:
        arXiv:2512.15674.

    Example:
        <!-- test: server -->
        ```python
        from functools import partial

        import anyio
        from inspect_ai.log import read_eval_log
        from inspect_ai.model import get_model

        from inspect_lens.oracle import ask_oracle

        output = read_eval_log("logs/honesty.eval").samples[0].output
        model = get_model("vllm-lens/organism/checkpoint")
        ask = partial(ask_oracle, output, "Is it a lie?", "organism", model=model, layers=4)
        (answer,) = anyio.run(ask)
        print(answer.answer, answer.controls)
        ```
    """
    plan = OraclePlan(
        questions, oracle, layers=layers, inputs=inputs, positions=positions, last=last,
        controls=controls, seed=seed, max_tokens=max_tokens, source=source, log_odds=log_odds,
    )  # fmt: skip
    return await plan.ask(about, model)
