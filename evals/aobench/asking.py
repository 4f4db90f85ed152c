"""Reading the contexts of a sample, and asking an oracle about each."""

from __future__ import annotations

import logging
from typing import Any, Final

from inspect_ai.model import Model, ModelOutput, get_model
from inspect_ai.solver import Generate, Solver, TaskState, solver

from evals.aobench.dataset import Context, Item
from inspect_lens.model import recapture
from inspect_lens.oracle import OracleAnswer
from inspect_lens.oracle._ask import OraclePlan

__all__ = ["ANSWERS", "ask_of_contexts", "context_tokens"]

logger = logging.getLogger(__name__)

ANSWERS: Final = "activation_oracle"
"""Where the answers are in a sample's store, as those of the solver of this name."""
_CLOSED, _OPEN = "<think>\n\n</think>\n\n", "<think>\n"


@solver
def ask_of_contexts(
    oracle: str,
    layers: int | float | list[int] | None = None,
    controls: bool | list[str] = True,
    seed: int = 0,
    served_as: str | None = None,
    subject: str = "",
) -> Solver:
    """Feed the contexts of an `Item`, and ask the oracle about the tokens that it shows.

    Args:
        oracle: name below `oracles/`, path or `hf://` address.
        layers: whose activations it sees.
        controls: true for all, false for none, or some by name.
        seed: of the controls.
        served_as: name under which the server has the oracle's adapter already.
        subject: model that the data are about.

    Returns:
        The solver. The answers are in the sample's store under `activation_oracle`, one for each
        context, so that a log can be scored again without a server.
    """
    warned = False

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        nonlocal warned
        item = Item.model_validate(state.metadata)
        if item.rule == "judge":
            get_model(role="grader", required=True)  # before anything is computed for it
        model = get_model()
        if subject and subject.lower() not in str(model).lower() and not warned:
            warned = True
            logger.warning(
                "aobench: the recorded answers are those of %s, and %s is evaluated; where these "
                "are two models, what counts as right is wrong", subject, model,
            )  # fmt: skip
        answers: list[OracleAnswer] = []
        for context in item.contexts:
            ids, positions = await context_tokens(model, context)
            if not positions:
                continue
            plan = OraclePlan(
                item.question, oracle, layers=layers, positions=positions, last=None,
                controls=controls, seed=seed, max_tokens=item.max_tokens, served_as=served_as,
                log_odds=item.rule == "log_odds",
            )  # fmt: skip
            # Only these rows travel. The one sampled token is not fed, so any stands for it.
            handle = await recapture(
                model, prompt_token_ids=ids, token_ids=ids[:1], layers=await plan.layers_of(model),
                positions=tuple(positions), adapter=_adapter(context.adapter),
            )  # fmt: skip
            answers += await plan.ask(handle, model)
        state.store.set(ANSWERS, [answer.model_dump() for answer in answers])
        said = "\n\n".join(answer.answer for answer in answers)
        state.output = ModelOutput.from_content(model=str(model), content=said)
        return state

    return solve


async def context_tokens(model: Model, context: Context) -> tuple[list[int], list[int]]:
    """Tokens of a context, as the server's template and tokenizer make them, and those shown.

    Args:
        model: a `vllm-lens/` model.
        context: what is read.

    Returns:
        Token ids, and positions among them.
    """
    api: Any = model.api

    async def tokenize(body: dict[str, Any]) -> list[int]:
        answer = await api.post("/tokenize", {"add_special_tokens": False, **body})
        return [int(token) for token in answer["tokens"]]

    async def chat(messages: tuple[tuple[str, str], ...], **how: bool) -> list[int]:
        turns = [{"role": role, "content": text} for role, text in messages]
        return await tokenize(
            {"messages": turns, "chat_template_kwargs": {"enable_thinking": False}, **how}
        )

    goes_on = context.form != "ask"
    ids = await chat(
        context.messages, add_generation_prompt=not goes_on, continue_final_message=goes_on
    )
    if context.form == "thinking":
        # Templates of reasoning models put closed, empty reasoning before a given answer, and
        # this text is reasoning that is not closed yet.
        text = str((await api.post("/detokenize", {"tokens": ids}))["prompt"])
        if _CLOSED in text:
            ids = await tokenize({"prompt": text.replace(_CLOSED, _OPEN, 1)})
    n, start, stop = len(ids), context.start, context.stop
    if start == "behind system":
        start = len(await chat(context.messages[:1], add_generation_prompt=False))
    first = max(0, n + start if start < 0 else start)
    return ids, list(range(first, min(n, n + stop if stop <= 0 else stop)))


def _adapter(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    return {"lora_name": path.rstrip("/").rpartition("/")[2], "lora_int_id": 1, "lora_path": path}
