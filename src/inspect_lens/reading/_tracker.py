"""`TrackerReader`: the focus score of Attention Tracker on model calls, and its calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from inspect_ai.log import EvalLog
from inspect_ai.model import ChatMessage, ModelOutput
from numpy.typing import NDArray

from inspect_lens.attention import (
    AttentionHeads,
    Head,
    QueriesKeys,
    Span,
    find_tracker_heads,
    instruction_shares,
    load_heads,
)
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.model import know_log

from ._queries_keys import (
    bare_name,
    check_model_of,
    find_texts,
    messages_before,
    prompt_pieces,
    read_queries_keys,
    require_span,
)
from ._threads import in_thread

__all__ = ["FocusReading", "TrackerReader", "calibrate_tracker"]

_ROLES: Final = ("system", "user", "assistant", "tool")
_METADATA: Final = "metadata:"


@dataclass(frozen=True)
class FocusReading:
    """Focus score of one call, with the attention of each head."""

    shares: NDArray[np.float64]
    """(heads,) share of the attention to instruction and data that goes to the instruction."""
    instruction: tuple[Span, ...]
    data: tuple[Span, ...]

    @property
    def focus(self) -> float:
        """Focus score: the mean of the shares, in [0, 1]; low where the data draw attention."""
        return float(self.shares.mean())

    @property
    def distraction(self) -> float:
        """1 minus the focus score: larger means more like an injection."""
        return 1.0 - self.focus


@dataclass(frozen=True)
class TrackerReader:
    """Reads the focus score of a call from its queries and keys.

    Make one with `TrackerReader.of`, which checks everything before any sample runs.

    Example:
        ```python
        from inspect_lens.reading import TrackerReader

        reader = TrackerReader.of("organism/attention-tracker", data="tool")
        assert reader.heads.layers
        ```
    """

    heads: AttentionHeads | None
    """None reads every head that was captured."""
    instruction: str
    data: str
    tokenizer: str | None = None
    check_model: bool = True
    """Refuse a model of another name than that of the list."""

    @classmethod
    def of(
        cls,
        heads: str | AttentionHeads | None,
        *,
        instruction: str = "system",
        data: str = "user",
        tokenizer: str | None = None,
        check_model: bool = True,
    ) -> TrackerReader:
        """Load heads and settle what is instruction and what is data.

        Args:
            heads: name below `heads/`, path, or a list; None reads every captured head.
            instruction: role of the messages that instruct, or `metadata:KEY` for a text that
                the sample's metadata has.
            data: the same of the messages that bring data.
            tokenizer: folder or name of the tokenizer; by default that of the model that is read.
            check_model: refuse a model of another name than that of the list.

        Returns:
            The reader.

        Raises:
            ArtifactError: no such list of heads.
            SpecError: an argument is wrong.
        """
        for field, value in (("instruction", instruction), ("data", data)):
            if value not in _ROLES and not value.removeprefix(_METADATA) != value:
                raise SpecError(
                    f"{field}={value!r}; allowed are the roles {', '.join(_ROLES)}, and "
                    "metadata:KEY for a text in the sample's metadata"
                )
        if instruction == data:
            raise SpecError(f"data={data!r}: instruction and data have to be different texts")
        loaded = None if heads is None else load_heads(heads)
        return cls(loaded, instruction, data, tokenizer, check_model)

    async def read(
        self,
        output: ModelOutput,
        messages: Sequence[ChatMessage],
        *,
        metadata: Mapping[str, Any] | None = None,
        model_name: str | None = None,
    ) -> FocusReading:
        """Read one call, in a thread; otherwise as `read_captured`.

        Args:
            output: as for `read_captured`.
            messages: as for `read_captured`.
            metadata: as for `read_captured`.
            model_name: as for `read_captured`.

        Returns:
            The reading.

        Raises:
            ArtifactError: as for `read_captured`.
            SpecError: as for `read_captured`.
        """
        return await in_thread(
            lambda: self.read_captured(output, messages, metadata=metadata, model_name=model_name)
        )

    def read_captured(
        self,
        output: ModelOutput,
        messages: Sequence[ChatMessage],
        *,
        metadata: Mapping[str, Any] | None = None,
        model_name: str | None = None,
    ) -> FocusReading:
        """Read one call; it reads files and multiplies rows, so not in an event loop.

        Args:
            output: of the call, with queries and keys.
            messages: of the conversation; those before the answer are the prompt.
            metadata: of the sample.
            model_name: of the model, with its provider: its tokenizer tells the texts of tokens.

        Returns:
            The reading, at the last token of the prompt.

        Raises:
            ArtifactError: the call captured no queries and keys, the model is not that of the
                list, there is no tokenizer on this machine, or a text does not stand in the prompt.
            SpecError: a head was not captured.
        """
        if self.check_model and self.heads is not None and model_name is not None:
            check_model_of(self.heads, model_name)
        captured = read_queries_keys(output)
        pieces = prompt_pieces(output, model_name, self.tokenizer, "attention tracker")
        prompt = messages_before(output, messages)
        instruction = self._spans(self.instruction, "instruction", pieces, prompt, metadata)
        data = self._spans(self.data, "data", pieces, prompt, metadata)
        shares = instruction_shares(
            captured, self._heads(captured), instruction, data, query=len(pieces) - 1
        )
        return FocusReading(shares, instruction, data)

    def _heads(self, captured: QueriesKeys) -> Sequence[Head]:
        return captured.all_heads() if self.heads is None else self.heads.heads

    def _spans(
        self,
        kind: str,
        field: str,
        pieces: Sequence[str],
        prompt: Sequence[ChatMessage],
        metadata: Mapping[str, Any] | None,
    ) -> tuple[Span, ...]:
        what = f"{field}={kind!r}"
        if kind in _ROLES:
            # All messages, in their order, so that one that quotes another is not taken for it.
            found = find_texts(pieces, [message.text for message in prompt])
            pairs = zip(prompt, found, strict=True)
            spans = [
                require_span(span, what)
                for message, span in pairs
                if message.role == kind and message.text.strip()
            ]
        else:
            text = (metadata or {}).get(kind.removeprefix(_METADATA))
            wanted = [text] if isinstance(text, str) else []
            spans = [require_span(span, what) for span in find_texts(pieces, wanted)]
        if not spans:
            raise ArtifactError(
                f"{what}: this sample has no such text; name the role of its messages, or a key of "
                "its metadata with metadata:KEY"
            )
        return tuple(spans)


def calibrate_tracker(
    log: EvalLog,
    *,
    label: str = "label",
    n_std: float = 4.0,
    instruction: str = "system",
    data: str = "user",
    tokenizer: str | None = None,
) -> AttentionHeads:
    """Find the important heads of a model in a log of a handful of normal and attacked prompts.

    Args:
        log: whose samples captured queries and keys of the layers that may hold them, such as
            all: `config=lens_config(qk=True, max_tokens=1)`.
        label: key of the sample metadata that is 1 or true for an attacked prompt.
        n_std: as for `find_tracker_heads`.
        instruction: as for `TrackerReader.of`.
        data: as for `TrackerReader.of`.
        tokenizer: as for `TrackerReader.of`.

    Returns:
        The heads, without a threshold; set one on other normal prompts, with the values of the
        scorer `attention_tracker` and `inspect_lens.train.fit_threshold`.

    Raises:
        ArtifactError: a sample captured nothing, or as for `TrackerReader.read`.
        SpecError: a sample without label, layers that differ, too few prompts of a kind, or no
            head that falls by more than it varies.

    Source:
        Hung et al. 2024, arXiv:2411.00348.

    Example:
        <!-- test: server -->
        ```python
        from inspect_ai import Task, eval
        from inspect_ai.solver import generate

        from evals.prompt_injection import injection_dataset
        from inspect_lens.model import lens_config
        from inspect_lens.reading import calibrate_tracker

        plain_and_injected = injection_dataset(part="calibration", conditions=["plain", "injected"])
        task = Task(
            dataset=plain_and_injected, solver=generate(), config=lens_config(qk=True, max_tokens=1)
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint")
        heads = calibrate_tracker(log, n_std=1.0)
        heads.save("heads/mine.json")
        assert heads.found.n_samples == {"normal": 30, "attack": 30}
        ```
    """
    if log.location:
        know_log(log.location)
    reader = TrackerReader.of(None, instruction=instruction, data=data, tokenizer=tokenizer)
    shares: dict[bool, list[NDArray[np.float64]]] = {False: [], True: []}
    heads: tuple[Head, ...] | None = None
    for sample in log.samples or []:
        mark = sample.metadata.get(label)
        if not isinstance(mark, bool | int) or mark not in (0, 1):
            raise SpecError(
                f"label={label!r}: sample {sample.id} has {mark!r} there; allowed are true, false, "
                "1 and 0"
            )
        own = read_queries_keys(sample.output).all_heads()
        if heads is not None and own != heads:
            raise SpecError(
                f"log: sample {sample.id} captured other layers than those before it; capture the "
                "same in all"
            )
        heads = own
        reading = reader.read_captured(
            sample.output, sample.messages, metadata=sample.metadata, model_name=log.eval.model
        )
        shares[bool(mark)].append(reading.shares)
    empty = np.empty((0, len(heads or ())))
    normal, attack = (np.stack(rows) if rows else empty for rows in (shares[False], shares[True]))
    return find_tracker_heads(
        normal, attack, heads or (), n_std=n_std, model=bare_name(log.eval.model),
        data=log.eval.dataset.name or log.eval.task,
    )  # fmt: skip
