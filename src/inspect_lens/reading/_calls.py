"""The calls of a sample in order: which of them are read, and which of their tokens.

The one place for roles, `over`, selections and sentences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, TypeVar

import numpy as np
from inspect_ai.event import (
    Event,
    InfoEvent,
    ModelEvent,
    SampleLimitEvent,
    SpanBeginEvent,
    SpanEndEvent,
)
from inspect_ai.log import EvalSample, transcript
from inspect_ai.model import ChatMessage, Model, ModelOutput, model_roles
from inspect_ai.solver import TaskState
from numpy.typing import NDArray

from inspect_lens._base.arguments import judged_arguments
from inspect_lens._base.token_texts import TokenTexts
from inspect_lens.errors import ArtifactError, NotCapturedError, SpecError
from inspect_lens.model import activations, probe_scores
from inspect_lens.model._read import events_of, given_output, message_ids
from inspect_lens.model._scope import is_instrument_call
from inspect_lens.probe import (
    SENTENCE_POOL,
    TokenText,
    parse_head_pool,
    select_tokens,
    sentence_ends,
)
from inspect_lens.spec import Positions

from ._rows import WITHHELD, Rows, Source, has_nothing_to_read, is_withheld, read_token_ids

if TYPE_CHECKING:
    from ._reader import ScoredTokens

__all__ = ["CallSelection", "Calls", "OnMissing", "Over", "Turn", "read_turns"]

_SPANS: Final = frozenset({"steering_cell", "contrastive", "attempt"})
"""Types of the spans in which solvers of this package generate several answers to choose from."""
_SOURCE: Final = "inspect_lens/standing"
_KEY: Final = "message_ids"


def record_standing(message_ids: Iterable[str]) -> None:
    """Note in the transcript which of the answers that were compared stand.

    A sample that ends before this note was made has none that does.
    """
    transcript().info({_KEY: list(message_ids)}, source=_SOURCE)


def ids_of(messages: Iterable[ChatMessage]) -> list[str]:
    return [m.id for m in messages if m.role == "assistant" and m.id is not None]


@dataclass(frozen=True)
class ComparedAnswers:
    """Which calls of a sample were made to be compared, and do not stand."""

    parents: dict[str, str | None]
    """Of each span."""
    spans: frozenset[str]
    """In which answers are compared."""
    standing: frozenset[str]
    """Ids of the messages that stand all the same."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """Read the spans and notes of a sample."""
        parents: dict[str, str | None] = {}
        spans: set[str] = set()
        standing: set[str] = set()
        for event in events:
            if isinstance(event, SpanBeginEvent):
                parents[event.id] = event.parent_id
                if event.type in _SPANS:
                    spans.add(event.id)
            elif isinstance(event, InfoEvent) and event.source == _SOURCE:
                ids = event.data.get(_KEY) if isinstance(event.data, dict) else None
                standing |= {str(one) for one in ids} if isinstance(ids, list) else set()
        return cls(parents, frozenset(spans), frozenset(standing))

    def has(self, event: Event, message_id: str | None) -> bool:
        """Whether a call was made to be compared, and what it wrote does not stand."""
        if not self.spans or message_id in self.standing:
            return False
        span = event.span_id
        while span is not None:
            if span in self.spans:
                return True
            span = self.parents.get(span)
        return False


Over = Literal["last", "all"]
"""Which calls of a sample are read: that of its answer, or every one of its model."""
OnMissing = Literal["error", "skip"]
"""What happens where the activations of a call are not there: the sample fails, or the call is
treated as one without a token to read."""

_PROVIDERS: Final = frozenset({"vllm-lens", "lens"})


class Turn(NamedTuple):
    """One call that wrote an assistant message."""

    number: int
    """0-based, in the order of the calls."""
    message_id: str | None
    output: ModelOutput
    role: str | None
    """Model role of the call; None for the model of the eval."""
    model: str
    """That made the call, as Inspect names it, such as `vllm-lens/organism/checkpoint`."""
    choice: int = 0
    """0-based, where a call has several answers and each is read by itself."""
    input: Sequence[ChatMessage] = ()
    """Messages that the model was given; none for what `read_given` read."""

    @property
    def bare_model(self) -> str:
        """The model's name without its provider."""
        return self.model.partition("/")[2]

    def prompt(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """The messages that the model was given.

        Args:
            messages: of the sample's conversation; they count where the answer stands in them.
        """
        ids = [message.id for message in messages]
        if self.message_id is not None and self.message_id in ids:
            return list(messages[: ids.index(self.message_id)])
        return list(self.input or messages)

    @property
    def has_lens(self) -> bool:
        """Whether a model of this package made the call, or something was captured in it."""
        if self.model.partition("/")[0] in _PROVIDERS:
            return True
        return activations(self.output) is not None or probe_scores(self.output) is not None


class Calls(NamedTuple):
    """The calls of a sample that are to be read."""

    turns: list[Turn]
    """In their order; each has one choice."""
    n_turns: int = 0
    """Calls of the same model or roles, read or not."""
    roles: tuple[str, ...] = ()
    """Model roles of these calls; empty for the model of the eval."""
    ended_by: str | None = None
    """`probe_gate`, or the type of the limit that ended the sample before it had an answer, such
    as `operator` for a monitor's; its last call is read then. None for a sample with an answer."""


@dataclass(frozen=True)
class CallSelection:
    """Which calls of a sample are read.

    Without `roles` these are the calls of the eval's model. Where none of them has a lens and
    those of one role do, as with `--model-role target=vllm-lens/…`, the calls of that role are
    read; with several such roles one has to be named.
    """

    over: Over = "last"
    roles: tuple[str, ...] | None = None
    on_missing: OnMissing = "error"

    @classmethod
    @judged_arguments
    def of(
        cls,
        *,
        over: Over = "last",
        roles: Sequence[str] | None = None,
        on_missing: OnMissing = "error",
    ) -> Self:
        """Check the choices of a user.

        Args:
            over: `last` reads the call of the sample's answer, or the last one of `roles`; `all`
                reads every call, each choice by itself.
            roles: model roles whose calls are read instead of those of the eval's model.
            on_missing: `error`, or `skip` for calls whose activations are not there.

        Raises:
            SpecError: one of them does not exist.
        """
        if roles is not None and not roles:
            raise SpecError(f"roles={roles!r}; allowed is a list of model roles, or nothing")
        return cls(over, None if roles is None else tuple(roles), on_missing)

    def of_state(self, state: TaskState) -> Calls:
        """The calls of the sample that is being scored; its transcript is that of this task.

        Args:
            state: of the sample.

        Returns:
            The calls; none where the model made no call. A sample that a monitor, a gate or another
            limit ended has no answer of its own, and its last call stands for one.

        Raises:
            NotCapturedError: nothing was captured in any call.
            SpecError: several roles have a lens and none was named, `roles` that no model of the
                eval has and that made no call, or several choices with `over="last"`.
        """
        known = tuple(model_roles())
        return self.select(transcript().events, state.output, str(state.model), known=known)

    def of_sample(self, sample: EvalSample, model: str | None = None) -> Calls:
        """The calls of a sample out of a log; otherwise as `of_state`.

        Args:
            sample: with its events.
            model: of the eval, as the log names it; by default the one that wrote the answer.

        Raises:
            NotCapturedError: as for `of_state`.
            SpecError: as for `of_state`.
        """
        return self.select(sample.events, sample.output, model)

    def select(
        self,
        events: Sequence[Event],
        output: ModelOutput | None,
        model: str | None,
        *,
        known: Sequence[str] = (),
    ) -> Calls:
        """The calls among events.

        Args:
            events: of a sample.
            output: the sample's answer; None where it has none.
            model: the eval's model; None, and one that made no call, takes the one that wrote the
                answer, if it was called in no role.
            known: roles that have a model, beside those that made calls.
        """
        turns = read_turns(events)
        ended = answer = None
        if output is not None and has_nothing_to_read(output):
            ended = _ended_by(output, events)
        elif output is not None:
            answer = _answer(output, turns, model)
            called = {turn.model for turn in turns if turn.role is None}
            is_own = answer.role is None and answer.model in called
            if is_own and model not in called and (model is None or answer.has_lens):
                model = answer.model
        try:
            found = self._chosen(turns, answer, model, known)
        except NotCapturedError:
            if self.on_missing == "error":
                raise
            return Calls([], ended_by=ended)
        if self.over == "last" and found:
            stopped = (output.metadata or {}).get(WITHHELD) if output is not None else None
            wanted = answer.message_id if answer is not None else stopped
            last = next((turn for turn in found if turn.message_id == wanted), found[-1])
            _require_one_choice(last)
            return Calls([last], len(found), _roles_of(found), ended)
        one_by_one = [one for turn in found for one in _each_choice(turn)]
        return Calls(one_by_one, len(found), _roles_of(found), ended)

    def _chosen(
        self, turns: list[Turn], answer: Turn | None, model: str | None, known: Sequence[str]
    ) -> list[Turn]:
        """Every call of the model or the roles that are read, numbered anew."""
        if answer is not None:
            turns = [answer if one.message_id == answer.message_id else one for one in turns]
        if self.roles is not None:
            found = [turn for turn in turns if turn.role in self.roles]
            if not found and turns:
                require_roles(self.roles, turns, known, model)
            return _numbered(found)
        own = [turn for turn in turns if _is_own(turn, model)]
        is_call = answer is not None and answer.message_id in {turn.message_id for turn in turns}
        if self.over == "last" and answer is not None and is_call and answer.has_lens:
            return _numbered(turn for turn in turns if _is_like(turn, answer))
        others = dict.fromkeys(turn.role for turn in turns if turn.has_lens and turn not in own)
        if len(others) == 1 and None not in others and not any(turn.has_lens for turn in own):
            return _numbered(turn for turn in turns if turn.role in others)
        if answer is not None and not is_call and (self.over == "last" or not turns):
            return _numbered([*own, answer])  # nobody called a model for it
        if others and not any(turn.has_lens for turn in own):
            raise SpecError(f"roles: {_who(turns, model)}; pass roles= with those to read")
        if turns and not own:
            raise NotCapturedError(
                f"activations: {_who(turns, model)}, and nothing was captured in any of them; run "
                "the model to read as vllm-lens/… with -M capture=…, or in its role"
            )
        return _numbered(own)


def read_turns(events: Iterable[Event]) -> list[Turn]:
    """List the calls that wrote an assistant message; those of scorers and oracles are left out.

    Calls that failed, and were tried again, wrote none. What `read_given` read is a turn as well,
    of the model that read it. Generations that were only compared are no turns: steered cells of
    a sweep, the other sides of `contrastive_pairs`, and attempts that a gate did not keep.

    Args:
        events: of a sample, live (`transcript().events`) or out of a log.

    Example:
        ```python
        from inspect_ai.log import read_eval_log

        from inspect_lens.reading import read_turns

        sample = read_eval_log("logs/honesty.eval").samples[0]
        (turn,) = read_turns(sample.events)
        assert turn.output.completion == sample.output.completion
        ```
    """
    found: list[Turn] = []
    scorers: set[str] = set()
    events = list(events)
    compared = ComparedAnswers.of(events)
    for event in events:
        if isinstance(event, SpanBeginEvent) and event.type in ("scorer", "scorers"):
            scorers.add(event.id)
        elif isinstance(event, SpanEndEvent):
            scorers.discard(event.id)
        elif scorers:
            continue
        elif isinstance(event, ModelEvent):
            output = event.output
            if event.error is not None or not output.choices or is_instrument_call(event.input):
                continue
            message_id = output.message.id
            if not compared.has(event, message_id):
                found.append(Turn(0, message_id, output, event.role, event.model, 0, event.input))
        elif (given := given_output(event)) is not None:
            # Read by the model that reads; it plays no role.
            found.append(Turn(0, given.message.id, given, None, given.model))
    return _numbered(found)


def require_roles(
    wanted: Sequence[str], turns: Sequence[Turn], known: Sequence[str], model: str | None = None
) -> None:
    """Refuse roles that no model has and in which no call was made."""
    if set(wanted).isdisjoint({*known, *(turn.role for turn in turns)}):
        raise SpecError(
            f"roles={list(wanted)}: no call of this sample has that role; {_who(turns, model)}; "
            "name a role that made calls, leave it out to read the model of the eval, or give it a "
            "model with --model-role when the eval runs"
        )


def find_event(message_id: str | None) -> ModelEvent | None:
    """The latest call that wrote a message; None where none is known."""
    found = [] if message_id is None else events_of(message_id)
    return next((event for event in reversed(found) if isinstance(event, ModelEvent)), None)


def find_turn(message_id: str | None) -> Turn | None:
    """The same as a turn."""
    event = find_event(message_id)
    if event is None:
        return None
    index = message_ids(event).index(message_id)
    return Turn(0, message_id, event.output, event.role, event.model, index, event.input)


def model_of(turn: Turn) -> Model | None:
    """The model of the turn's role, if it is the one that made the call; None without a role."""
    found = model_roles().get(turn.role) if turn.role else None
    models = found if isinstance(found, list) else [found]
    return next((model for model in models if str(model) == turn.model), None)


def _is_own(turn: Turn, model: str | None) -> bool:
    return turn.role is None and model in (None, turn.model)


def _is_like(turn: Turn, answer: Turn) -> bool:
    """Whether two calls are of one role, or of one model without a role."""
    return turn.role == answer.role and (turn.role is not None or turn.model == answer.model)


def _numbered(turns: Iterable[Turn]) -> list[Turn]:
    return [turn._replace(number=number) for number, turn in enumerate(turns)]


def _roles_of(turns: Iterable[Turn]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(turn.role for turn in turns if turn.role is not None))


def _who(turns: Sequence[Turn], model: str | None) -> str:
    """Who made the calls of a sample, in words."""
    made = dict.fromkeys(
        f"{turn.model} in the role {turn.role!r}" if turn.role else turn.model for turn in turns
    )
    whose = "the model of this eval" if model is None else f"{model}, the model of this eval,"
    own = any(_is_own(turn, model) for turn in turns)
    made_none = "" if own else f"{whose} made no call of this sample; "
    return f"{made_none}its calls were made by {', '.join(made)}"


def _answer(output: ModelOutput, turns: Sequence[Turn], model: str | None) -> Turn:
    """The call of the sample's answer; one that is in no event is the eval's model's."""
    message_id = output.message.id if output.choices else None
    known = next((turn for turn in turns if turn.message_id == message_id), None)
    if known is not None:
        # What stands in the state may know more, as a log has no token ids, or nothing at all.
        knows = activations(output) is not None or read_token_ids(output) is not None
        return known._replace(output=output) if knows or not known.has_lens else known
    return Turn(len(turns), message_id, output, None, model or output.model)


def _require_one_choice(turn: Turn) -> None:
    if len(turn.output.choices) > 1:
        raise SpecError(
            f"num_choices={len(turn.output.choices)}: the call has several answers, and "
            "over='last' would read the first alone; allowed is over='all', which reads each "
            "choice and says which has the largest value, or num_choices=1"
        )


def _ended_by(output: ModelOutput, events: Sequence[Event]) -> str | None:
    if is_withheld(output):
        return "probe_gate"
    limits = [event.type for event in events if isinstance(event, SampleLimitEvent)]
    return limits[-1] if limits else None


def _each_choice(turn: Turn) -> list[Turn]:
    """Each choice of a call as an output of its own."""
    output = turn.output
    if len(output.choices) < 2:
        return [turn]
    made = [turn._replace(output=output.model_copy(update={"choices": output.choices[:1]}))]
    shared: dict[str, Any] = {
        key: value
        for key, value in (output.metadata or {}).items()
        if key not in ("activations", "token_ids")
    }
    for index, choice in enumerate(output.choices[1:], 1):
        handle = activations(choice.message.metadata)
        own = {} if handle is None else {"activations": handle}
        only = output.model_copy(update={"choices": [choice], "metadata": shared | own})
        made.append(turn._replace(message_id=choice.message.id, output=only, choice=index))
    return made


_WHOLE: Final = frozenset({"prompt", "all", "assistant", "user"})
"""Selections that take tokens of the prompt too."""

Read = TypeVar("Read", "Rows", "ScoredTokens")


def positions_for(selection: str) -> Positions:
    """Positions that hold every token of a selection; refuses what is none."""
    select_tokens(TokenText(pieces=(), n_prompt=0), selection)
    return "all" if selection.partition(":")[0] in _WHOLE else "completion"


class CallTexts:
    """Finds the tokenizer of a call's model, once per model."""

    def __init__(self, tokenizer: str | None = None, *, card_model: str = "") -> None:
        self._card_model = card_model
        self._given = tokenizer
        self._texts: dict[str | None, TokenTexts] = {}

    def of(self, model_name: str | None, *, what: str) -> TokenTexts:
        if model_name not in self._texts:
            self._texts[model_name] = self._find(model_name, what)
        return self._texts[model_name]

    def _find(self, model_name: str | None, what: str) -> TokenTexts:
        if self._given is not None:
            return TokenTexts.of("", tokenizer=self._given)
        names = [(model_name or "").partition(":")[0], self._card_model]
        why: list[str] = []
        for name in filter(None, names):
            try:
                return TokenTexts.of("", tokenizer=name)
            except ArtifactError as error:
                why.append(str(error).partition("; ")[0])
        raise ArtifactError(
            f"{what}: told by the texts of tokens, and no tokenizer of "
            f"{' or '.join(filter(None, names)) or 'the model'} is on this machine "
            f"({'; '.join(why) or 'no model is named'}); allowed is tokenizer= with the folder of "
            "a checkpoint or a name that the hub's cache has"
        )


def _ids(rows: Rows | ScoredTokens, what: str) -> tuple[Sequence[int], Sequence[int]]:
    """Token ids of prompt and completion of the call that was read."""
    handle = rows.handle
    if handle is None or not (handle.prompt_token_ids or handle.token_ids):
        raise ArtifactError(
            f"{what}: the call has no token ids to tell its tokens by; read activations that the "
            "vllm-lens provider captured"
        )
    return handle.prompt_token_ids, handle.token_ids


@dataclass(frozen=True, kw_only=True)
class CallReader:
    """Which calls are read, which of their tokens, from where, and how these become one number."""

    positions: Positions
    pool: str
    source: Source
    selection: str = ""
    """Tokens among `positions` that are read, as `select_tokens` takes it; empty means all."""
    tokenizer: str | None = None
    """Tells sentences and selections; None is that of the model."""
    calls: CallSelection = field(default_factory=CallSelection)
    """Which calls of a sample are read."""

    @property
    def _card_model(self) -> str:
        """Whose tokenizer tells sentences where that of the call's model is not known."""
        return ""

    @cached_property
    def _texts(self) -> CallTexts:
        return CallTexts(self.tokenizer, card_model=self._card_model)

    def select(self, rows: Read, model_name: str | None) -> Read | None:
        """Keep the tokens of the selection; None where there is none of them."""
        if not self.selection:
            return rows
        at = self._selected(rows, model_name)
        if not at.size:
            return None
        kept: dict[str, Any] = {
            "positions": tuple(rows.positions[i] for i in at),
            "token_ids": tuple(rows.token_ids[i] for i in at) if rows.token_ids else (),
        }
        if isinstance(rows, Rows):
            return rows._replace(acts=rows.acts[:, at], **kept)
        return rows._replace(scores=rows.scores[at], **kept)

    def _selected(self, rows: Rows | ScoredTokens, model_name: str | None) -> NDArray[np.int64]:
        what = f"selection={self.selection!r}"
        prompt, completion = _ids(rows, what)
        ids = (*prompt, *completion[:-1])
        texts = self._texts.of(model_name, what=what)
        tokens = TokenText(
            pieces=tuple(texts.texts(ids)), n_prompt=len(prompt), special=tuple(texts.special(ids))
        )
        return np.flatnonzero(select_tokens(tokens, self.selection)[list(rows.positions)])

    def sentence_ends(
        self, rows: Rows | ScoredTokens, model_name: str | None = None, pool: str | None = None
    ) -> NDArray[np.bool_] | None:
        """(tokens,) with which a sentence ends; None for a pool that does not go by sentences."""
        if parse_head_pool(pool or self.pool).name != SENTENCE_POOL:
            return None
        what = f"pool={SENTENCE_POOL!r}"
        prompt, completion = _ids(rows, what)
        texts = self._texts.of(model_name, what=what)
        # Of all tokens: where a sentence ends shows at the token behind it.
        return sentence_ends(texts.texts((*prompt, *completion)))[list(rows.positions)]
