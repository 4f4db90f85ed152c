"""From a request's parameters to what the workers read: judging it, and sealing it.

What is wrong with a request is found out before an HTTP response has begun, while a server still
has its status to choose. What was compiled then is known where the request is sealed.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import replace
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from typing import Any, Final

from inspect_lens._engine.hooks.runner import EAGER_KEY
from inspect_lens._engine.protocol.messages import CACHED_KEY, Envelope, Packed, seal
from inspect_lens._engine.protocol.processes import ends_process
from inspect_lens._vllm.cache_salt import salted
from inspect_lens._vllm.compat.cpu_lora import CpuAdapters
from inspect_lens._vllm.compat.features import not_served, require
from inspect_lens._vllm.compat.monkeypatches import monkeypatch, wrap
from inspect_lens._vllm.http.bodies import SERVED, pattern_budget, payloads
from inspect_lens._vllm.http.server import install_when_serving, is_serving
from inspect_lens._vllm.registered.contents import TIERS_KEY
from inspect_lens._vllm.registered.persistent_hooks import HookBook, seal_eager
from inspect_lens._vllm.registered.probe_scores import Reading
from inspect_lens._vllm.registered.rows import RowCache, with_known_rows
from inspect_lens._vllm.sinks.process import SINK_KEY, Rule
from inspect_lens._vllm.sinks.sink import Exchange
from inspect_lens._vllm.telemetry import CALLER, requested, tiers_acted
from inspect_lens.errors import LensError, SpecError, UnsupportedError
from inspect_lens.spec import (
    ENVELOPE_KEY,
    LENS_KEYS,
    NATIVE_KEY,
    NO_REQUEST,
    EngineFacts,
    LensRequest,
    PatternBudget,
    Positions,
    SinkUse,
    TensorLimits,
    TokenMatch,
    check_lens,
    forget_parsed,
    judging,
    parse_extra_args,
    sampled_match,
    shown,
)

from .state import Compiled, FrontEnd, front_end


def needs_prompt(request: LensRequest) -> bool:
    """Whether a request names tokens of its prompt by what they are."""
    capture = request.capture
    if capture is not None and isinstance(capture.positions, TokenMatch):
        return True
    edits = request.edits
    return bool(edits) and any(_in_prompt(edit.positions) is not None for edit in edits)


def _in_prompt(positions: Positions) -> TokenMatch | None:
    """What is to be found in the prompt; sampled tokens are found in the step that feeds them."""
    if isinstance(positions, TokenMatch) and sampled_match(positions) is None:
        return positions
    return None


def with_positions(request: LensRequest, ids: Sequence[int] | None, processor: Any) -> LensRequest:
    """Put positions in the place of what tokens match."""
    if not needs_prompt(request):
        return request
    if ids is None:
        raise UnsupportedError("prompt embeddings: the lens needs a prompt of tokens")
    budget, key = pattern_budget(), tuple(ids)
    if (prompt := budget.prompts.get(key)) is None:
        prompt = budget.prompts[key] = _Prompt(ids, processor.tokenizer, budget)
    changed: dict[str, Any] = {}
    capture = request.capture
    if capture is not None and isinstance(capture.positions, TokenMatch):
        found = prompt.find(capture.positions, "capture.positions")
        changed["capture"] = capture.model_copy(update={"positions": found})
    changed["edits"] = tuple(
        edit.model_copy(update={"positions": prompt.find(match, f"edits[{i}].positions")})
        if (match := _in_prompt(edit.positions)) is not None
        else edit
        for i, edit in enumerate(request.edits)
    )
    return request.model_copy(update=changed)


class _Prompt:
    """A prompt, read when a pattern needs its text."""

    def __init__(self, ids: Sequence[int], tokenizer: Any, budget: PatternBudget) -> None:
        self._ids, self._tokenizer = list(ids), tokenizer
        self._text = ""
        self._budget = budget
        self._found: dict[str, list[list[int]]] = {}
        self._spans: list[tuple[int, int]] | None = None

    def find(self, match: TokenMatch, field: str) -> tuple[int, ...]:
        """Positions that a match means."""
        if match.token_ids is not None:
            wanted = frozenset(match.token_ids)
            found = [[i] for i, token in enumerate(self._ids) if token in wanted]
        else:
            assert match.pattern is not None
            if match.pattern not in self._found:
                self._found[match.pattern] = self._matching(match.pattern, field)
            found = self._found[match.pattern]
        return tuple(match.choose(found, len(self._ids), field=field))

    def _matching(self, pattern: str, field: str) -> list[list[int]]:
        if self._tokenizer is None:
            raise UnsupportedError(
                f"{field}.pattern: this engine was started without a tokenizer; give token_ids"
            )
        if self._spans is None:
            with judging(field):
                self._text, self._spans = spans_of(self._ids, self._tokenizer)
        found, first = [], 0
        for start, stop in self._budget.spans(pattern, self._text, field=field):
            while first < len(self._spans) and self._spans[first][1] <= start:
                first += 1
            tokens = []
            for i in range(first, len(self._spans)):
                if self._spans[i][0] >= stop:
                    break
                if self._spans[i][1] > start:
                    tokens.append(i)
            if tokens:
                found.append(tokens)
        return found


def spans_of(ids: Sequence[int], tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """The text of some tokens, and where in it each token lies.

    Tokens that are parts of one character lie where the character lies.
    """
    tokens = [int(token) for token in ids]
    if getattr(tokenizer, "is_fast", False):
        text = tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        again = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if again["input_ids"] == tokens:
            return text, [(start, stop) for start, stop in again["offset_mapping"]]
    if len(tokens) > _MOST_TOKENS:
        raise SpecError(
            f"a pattern for a prompt of {len(tokens)} tokens, which its tokenizer would make in "
            f"another way from its text: {_MOST_TOKENS} at most; give token_ids, or positions"
        )
    return _read_one_by_one(tokens, tokenizer)


def _read_one_by_one(tokens: list[int], tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    text = ""
    spans: list[tuple[int, int]] = []
    before: list[int] = []
    group: list[int] = []
    for i, token in enumerate(tokens):
        group.append(token)
        # Some tokenizers leave out a space at the beginning, so each is read behind another one.
        known = tokenizer.decode(before, skip_special_tokens=False) if before else ""
        piece = tokenizer.decode(before + group, skip_special_tokens=False)[len(known) :]
        is_open = piece.endswith("\N{REPLACEMENT CHARACTER}") and len(group) < _MOST_PARTS
        if is_open and i + 1 < len(tokens):
            continue
        spans += [(len(text), len(text) + len(piece))] * len(group)
        text += piece
        before, group = group, []
    return text, spans


_MOST_PARTS: Final = 4
"""Tokens of one character in UTF-8."""
_MOST_TOKENS: Final = 1 << 14
"""Read one by one: some tenths of a second."""


def with_token_ids(request: LensRequest, processor: Any, facts: EngineFacts) -> LensRequest:
    """Put ids in the place of texts."""
    lens = request.lens
    if lens is None or not lens.texts:
        return request
    tokenizer = processor.tokenizer
    if tokenizer is None:
        raise UnsupportedError(
            "lens.tokens: this engine was started without a tokenizer; give ids instead of texts"
        )
    with judging("lens.tokens"):
        ids = [_id_of(t, tokenizer) if isinstance(t, str) else t for t in lens.tokens]
    if len(set(ids)) != len(ids):
        raise SpecError(f"lens.tokens: {shown(lens.tokens)} are the ids {ids}; name each once")
    named = lens.model_copy(update={"tokens": tuple(ids)})
    check_lens(named, facts)
    return request.model_copy(update={"lens": named})


def _id_of(text: str, tokenizer: Any) -> int:
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    if len(ids) != 1:
        raise SpecError(
            f"lens.tokens: {shown(text)} is {len(ids)} tokens of this model, {shown(ids)}; give a "
            "text that is one token (most words need the space in front), or ids"
        )
    return int(ids[0])


def compiled_of(processor: Any, params: Any) -> Compiled | None:
    """What a request asks of an engine, judged as far as its parameters tell."""
    adapters: CpuAdapters | None = getattr(processor, "inspect_lens_adapters", None)
    if adapters is not None:
        adapters.check(params)
    facts: EngineFacts | None = processor.inspect_lens_facts
    request = None
    if extra := getattr(params, "extra_args", None):
        asked = extra.get(NATIVE_KEY) if len(extra) == 1 and facts is not None else None
        # Each request is compiled twice, and a batch asks for one thing a thousand times.
        if (known := front_end().compiled(asked, facts)) is not None:
            return known
        limits = None if facts is None else TensorLimits(facts)
        request = parse_extra_args(extra, limits=limits)
    if request is None and acts_on_all(processor) and hasattr(params, "n"):
        # It may fail now, and is kept apart.
        request = NO_REQUEST
        if facts is not None and facts.no_steering and has_hooks(processor):
            raise UnsupportedError(f"persistent hooks of the engine: {facts.no_steering}")
    if request is None:
        return None
    if facts is None:
        raise not_served(processor.inspect_lens_refusal)
    if is_serving():
        require("http")
    compiled = front_end().compile(request, facts)
    named = with_token_ids(compiled.request, processor, facts)
    return compiled if named is compiled.request else replace(compiled, request=named)


def rule_of(processor: Any, request_id: str, params: Any, resumable: object) -> Rule | None:
    """The rule that records a request which asks nothing of the lens; None where none does."""
    facts: EngineFacts | None = getattr(processor, "inspect_lens_facts", None)
    if facts is None or resumable or not hasattr(params, "n"):
        return None
    return front_end().sinks.rule_for(facts, request_id)


def seal_recorded(core: Any, processor: Any, rule: Rule) -> bool:
    """Have a request recorded that asks nothing of the lens; a fault leaves it as it is.

    What acts on all requests acts on it, too. Returns whether it is recorded.
    """
    try:
        compiled = front_end().compile(rule.request, processor.inspect_lens_facts)
        seal_for(core, compiled, processor, rule)
    except BaseException as error:
        if ends_process(error):
            raise
        front_end().sinks.failed(rule, error)
        return False
    return True


def seal_for(core: Any, compiled: Compiled, processor: Any, rule: Rule | None = None) -> None:
    """Seal a request with what its engine has: persistent hooks, and rows of earlier prompts."""
    _, ids = prompt_tokens(core)
    check_media(processor, compiled, ids, core)
    compiled = with_positions_of(compiled, ids, processor)
    book = getattr(processor, "inspect_lens_book", None)
    seal_core(core, compiled, book, getattr(processor, "inspect_lens_rows", None), rule)


def has_lens_keys(params: Any, keys: Collection[str] = (*LENS_KEYS, ENVELOPE_KEY)) -> bool:
    """Whether parameters ask for anything of ours, however badly."""
    extra = getattr(params, "extra_args", None)
    return isinstance(extra, dict) and not extra.keys().isdisjoint(keys)


def has_hooks(processor: Any) -> bool:
    book = getattr(processor, "inspect_lens_book", None)
    return book is not None and bool(book.hooks)


def acts_on_all(processor: Any) -> bool:
    """Whether something acts on every request: persistent hooks, or the server's tier."""
    return has_hooks(processor) or front_end().registry.server is not None


def is_plain(processor: Any, params: Any) -> bool:
    """Whether a request asks for nothing of ours, and nothing acts on it: most of a server's."""
    return (
        not getattr(params, "extra_args", None)
        and getattr(processor, "inspect_lens_adapters", None) is None
        and not acts_on_all(processor)
    )


def judge_early(processor: Any, prompt: Any, params: Any) -> int:
    """Judge all that can be judged before the engine is asked, where the prompt is known.

    An HTTP response that streams has said 200 by the time a request is processed. Returns how
    many choices are to have results.
    """
    sealed = (getattr(params, "extra_args", None) or {}).get(ENVELOPE_KEY)
    if isinstance(sealed, Packed) or (sealed is not None and hasattr(prompt, "sampling_params")):
        return 0
    compiled = compiled_of(processor, params)
    if compiled is None:
        return 0
    if isinstance(prompt, AsyncGenerator):
        raise resumable()
    is_known, ids = prompt_tokens(prompt)
    if is_known:
        check_media(processor, compiled, ids, prompt)
        n_prompt = None if ids is None else len(ids)
        most = _most_tokens(params, n_prompt or 0, processor.model_config.max_model_len)
        compiled = with_positions_of(compiled, ids, processor)
        packed = _placed(compiled, params, n_prompt=n_prompt, max_tokens=most)
        capture = packed.envelope.capture
        if capture is not None and capture.transport == "binary" and is_serving():
            least = _least_tokens(params, most, may_stop=compiled.reads is not None)
            payloads.admit(params.n * capture.n_bytes((n_prompt or 0) + least - 1))
    # One that asks for nothing may have persistent hooks alone.
    return 0 if compiled.asked is NO_REQUEST and not compiled.tiers.acts else int(params.n)


def seal_core(
    core: Any,
    compiled: Compiled,
    book: HookBook | None,
    known: RowCache | None,
    rule: Rule | None = None,
) -> None:
    """Put the sealed request where the worker finds it, and keep its cache blocks apart."""
    sampling, request = core.sampling_params, compiled.request
    _, ids = prompt_tokens(core)
    n_prompt = None if ids is None else len(ids)
    packed = _placed(compiled, sampling, n_prompt=n_prompt, max_tokens=sampling.max_tokens)
    envelope = packed.envelope
    if (eager := seal_eager(request, book)) is not None:
        packed = packed.beside(EAGER_KEY, eager)
        sampling.skip_reading_prefix_cache = True
        # What a hook edits is not known; no other request reads these blocks.
        core.cache_salt = f"{core.cache_salt or ''}|inspect_lens_hooks:{eager['hash']}"
    if envelope.steer_hash is not None:
        # Equal steering of one tenant shares blocks, and its receipt tells of how many tokens;
        # nobody else reads them, from the first edited token on.
        own = f"{CALLER.get().tenant}:{envelope.steer_hash}"
        core.cache_salt = salted(core.cache_salt, envelope.edited_from, own)
    if request.skip_reading_prefix_cache:
        sampling.skip_reading_prefix_cache = True
    if _needs_whole_prompt(envelope):
        if known is not None and eager is None and not request.skip_reading_prefix_cache:
            packed = with_known_rows(packed, core, known)
        if CACHED_KEY not in packed:
            sampling.skip_reading_prefix_cache = True
    if request.sink is not None:
        key = front_end().sinks.key_of(request.sink, compiled.facts)
        packed = packed.beside(SINK_KEY, (key, request.sink.model_dump()))
    elif rule is not None:
        # With an answer that has a receipt in any case, the receipt tells of the sink, too.
        use = SinkUse(name=rule.name, wait=False).model_dump() if compiled.tiers.acts else None
        packed = packed.beside(SINK_KEY, (rule.key, use))
    if compiled.tiers.receipts:
        packed = packed.beside(TIERS_KEY, compiled.tiers.packed)
        tiers_acted(compiled.tiers.receipts)
    sampling.extra_args = {**(sampling.extra_args or {}), ENVELOPE_KEY: packed}
    if rule is None or compiled.tiers.acts:
        requested(request, eager is not None)


def without_lens_keys(params: Any) -> Any:
    """A copy of parameters for vLLM: the caller's stay as they are, and vectors travel once."""
    plain = copy.copy(params)
    extra = params.extra_args or {}
    plain.extra_args = {k: v for k, v in extra.items() if k not in LENS_KEYS} or None
    _make_own(plain)
    return plain


_PLAIN = frozenset({int, float, bool, str, type(None)})
_CONTAINERS = frozenset({list, set, dict})


def _make_own(params: Any) -> None:
    """Spare vLLM a deep copy of parameters that are a copy already."""
    # A deep copy is made anew, and so checked and put in order, which a caller who has set a field
    # of the parameters after he made them relies on. That is done here.
    kind: Any = type(params)
    if params.skip_clone:
        return
    values = _values_of(kind)(params)
    odd = set(map(type, values)) - _PLAIN - _CONTAINERS
    if not all(issubclass(one, Enum) for one in odd):
        return
    own: list[tuple[str, Any]] = []
    for name, value in zip(kind.__struct_fields__, values, strict=True):
        if type(value) in _CONTAINERS:
            inside = value.values() if type(value) is dict else value
            if not _PLAIN.issuperset(map(type, inside)):
                return
            own.append((name, value.copy()))
    for name, value in own:
        setattr(params, name, value)
    params.__post_init__()
    params.skip_clone = True


@cache
def _values_of(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """What reads all fields of parameters."""
    return attrgetter(*kind.__struct_fields__)


def resumable() -> UnsupportedError:
    return UnsupportedError("streaming input sessions cannot be captured or steered")


def with_positions_of(compiled: Compiled, ids: Sequence[int] | None, processor: Any) -> Compiled:
    """The same with positions of a prompt in the place of what its tokens match."""
    try:
        request = with_positions(compiled.request, ids, processor)
    except LensError as error:
        compiled.tiers.tell(error)
        raise
    return compiled if request is compiled.request else replace(compiled, request=request)


_MOST_LISTED = 1 << 14
"""Positions that are named, and letters of what is asked of probes, of what is kept."""


def _placed(compiled: Compiled, params: Any, *, n_prompt: int | None, max_tokens: int) -> Packed:
    """The packed envelope of a request in a prompt, or why there can be none."""
    if n_prompt is None:
        raise UnsupportedError("prompt embeddings: the lens needs a prompt of tokens")
    front, request, reads = front_end(), compiled.request, compiled.reads
    if compiled.facts.is_speculative and (params.stream_interval or 1) > 1:
        raise UnsupportedError(
            "stream_interval: with speculative decoding it hides where the last step began; leave "
            "it out"
        )
    if request.stream_results:
        _check_streamed(params)
    # The front-end finds stop strings and alarms, while the engine goes on.
    may_overrun = bool(params.stop) or (reads is not None and reads.may_stop)
    is_live = reads is not None and (
        reads.may_stop or (reads.streams_tokens and params.output_kind.name != "FINAL_ONLY")
    )
    key = id(compiled), n_prompt, max_tokens, may_overrun, is_live
    known: tuple[Compiled, Packed] | None = front.known.get(key)
    if known is not None and _is_salted(known[1]):
        return known[1]
    try:
        envelope = seal(
            request,
            compiled.facts,
            reply=front.reply_for(compiled.facts),
            n_prompt=n_prompt,
            max_tokens=max_tokens,
            epoch=front.results.salt,
            probes=None if reads is None else reads.asked,
            may_overrun=may_overrun,
            is_live=is_live,
        )
    except LensError as error:
        forget_parsed(compiled.asked)
        compiled.tiers.tell(error)
        raise
    if request.skip_reading_prefix_cache is False and _needs_whole_prompt(envelope):
        raise SpecError(
            "skip_reading_prefix_cache=false beside a capture, a lens, output_qk, a probe or a "
            "gate of prompt tokens: cached tokens have no rows; leave it out, or ask for "
            "positions='completion', and of a gate for reads='last_prompt'"
        )
    packed = envelope.pack(is_local=front.is_local)
    if reads is not None:
        packed.uses, packed.reads = reads.wire, reads
    n_listed = sum(len(part.positions or ()) for part in envelope.results if part is not None)
    # A capture with a token of its own is told from all others; what was not kept compiled, as it
    # has a prompt's positions or somebody's functions, does not come again.
    is_own = envelope.capture is not None and bool(envelope.capture.token)
    is_kept = front.known.get((id(compiled.asked), id(compiled.facts))) is compiled
    if is_kept and not is_own and n_listed + len(packed.uses or "") <= _MOST_LISTED:
        front.known.keep(key, (compiled, packed), request.tensor_bytes)
    return packed


def _check_streamed(params: Any) -> None:
    """Refuse to send results with tokens where no token is sent before the last one."""
    if params.output_kind.name == "FINAL_ONLY":
        raise SpecError(
            "stream_results: this answer comes as a whole, and its results with it; send "
            "stream=true to a server, or give AsyncLLM output_kind=RequestOutputKind.DELTA; or "
            "leave stream_results out"
        )


def _is_salted(packed: Packed) -> bool:
    """Whether cache blocks of steering are still found by what an envelope says."""
    steer_hash = packed.envelope.steer_hash
    if steer_hash is None:
        return True
    return steer_hash == front_end().results.salt(steer_hash.rpartition(":")[2])


def _needs_whole_prompt(envelope: Envelope) -> bool:
    """Whether rows are wanted of prompt tokens that a cache hit would not compute."""
    # vLLM always computes the last prompt token.
    return any(part is not None and part.lo < envelope.n_prompt - 1 for part in envelope.read)


_MEDIA: Final = ("mm_kwargs", "mm_features", "multi_modal_data")
"""Where images, video and audio of a prompt are: as vLLM has processed them, or not yet."""


def check_media(processor: Any, compiled: Compiled, ids: Sequence[int] | None, prompt: Any) -> None:
    """Refuse the tokens of a prompt whose images are not there: rows would be of another prompt."""
    # Of who asks for nothing, a server's own edits and probes act on the tokens as they are.
    placeholders = processor.inspect_lens_facts.placeholders
    if not placeholders or compiled.asked is NO_REQUEST or ids is None:
        return
    if any(_field(prompt, name) for name in _MEDIA) or placeholders.isdisjoint(ids):
        return
    at = next(i for i, token in enumerate(ids) if token in placeholders)
    raise UnsupportedError(
        f"prompt: token {ids[at]} at position {at} stands for an image, a video or audio, and none "
        "came with it, so the model would not see what that token stands for; send it in the "
        "messages of a chat, and ask for captures, edits and scores in that request: they cannot "
        "be had afterwards from the token ids"
    )


def _field(prompt: Any, name: str) -> Any:
    return prompt.get(name) if isinstance(prompt, dict) else getattr(prompt, name, None)


def prompt_tokens(prompt: Any) -> tuple[bool, Sequence[int] | None]:
    """Whether it is known what a prompt is, and its tokens; None where some of it is no token."""
    if isinstance(prompt, dict) and prompt.get("multi_modal_data"):
        return False, None  # their places are not made yet
    if _field(prompt, "prompt_embeds") is not None:
        # The parts of a chat may be embeddings, for each row of which some token stands.
        return True, None
    # Text has its tokens later; what vLLM has processed before knows them.
    ids = _field(prompt, "prompt_token_ids")
    return ids is not None, ids


def _most_tokens(params: Any, n_prompt: int, max_model_len: int) -> int:
    """Tokens that may be sampled, worked out as vLLM does when it processes the request."""
    room = max_model_len - n_prompt
    most = room if params.max_tokens is None else int(params.max_tokens)
    trace = params.trace_decode_token_ids
    return most if not trace else min(len(trace[: max(room, 1)]), most)


def _least_tokens(params: Any, most: int, *, may_stop: bool) -> int:
    """Tokens that are sure to be sampled."""
    if params.ignore_eos and not (may_stop or params.stop or params.stop_token_ids):
        return max(most, 1)
    return max(1, min(int(params.min_tokens), most))


def expect(
    front: FrontEnd, request: Any, params: Any, packed: dict[str, Any], prompt: Any, parent: Any
) -> Reading | None:
    """Take note of a sealed request; returns what reads its probes."""
    n_prompt = len(request.prompt_token_ids)
    n_max = n_prompt + max(params.max_tokens or 1, 1) - 1
    reading = _reading(front, packed, n_prompt, n_max)
    envelope = Envelope.unpack(packed)
    hashes = () if envelope.probes is None else envelope.probes.names
    if envelope.lens is not None and envelope.lens.lens:
        hashes = (*hashes, envelope.lens.lens)
    hashes = (*hashes, *envelope.edited.autoencoders)
    front.results.expect(
        request.request_id,
        packed,
        n_prompt=n_prompt,
        n_max=n_max,
        reading=reading,
        request=None if parent is None else parent.request_id,
        asked_by=_asked_by(request, prompt) if SINK_KEY in packed or TIERS_KEY in packed else None,
        let_go=front.registry.hold(hashes) if hashes else None,
        is_served=SERVED.get() is not None,
    )
    return reading


def _asked_by(request: Any, prompt: Any) -> Exchange:
    # Choices of one request have ids of their own, made of its.
    key = request.external_req_id or request.request_id
    choice, _, rest = str(request.request_id).partition("_")
    key = f"{key}-{choice}" if rest and choice.isdigit() else key
    text = prompt if isinstance(prompt, str) else ""
    return Exchange(str(key), tuple(request.prompt_token_ids), text)


def _reading(front: FrontEnd, packed: dict[str, Any], n_prompt: int, n_max: int) -> Reading | None:
    """What reads the probes of a sealed request."""
    probes = Envelope.unpack(packed).probes
    if probes is None:
        return None
    return Reading(front.registry.reads_of(packed), lo=probes.lo, n_prompt=n_prompt, n_max=n_max)


def said_by(detokenizer: Any) -> tuple[tuple[int, ...], str]:
    """All that was sampled, whichever part of it an output has."""
    return tuple(detokenizer.output_token_ids), detokenizer.get_next_output_text(True, False)


def refuse_requests(*, own_only: bool = False) -> None:
    """Wrap as little of vLLM as refusing takes, where nothing else of the lens can be installed."""
    keys = (NATIVE_KEY,) if own_only else LENS_KEYS
    install = partial(install_when_serving, keys=keys)
    install()
    # Text comes by the first, and requests that somebody has made by the second alone.
    wrap(monkeypatch("process_inputs"), partial(_refusing, keys, 2))
    wrap(monkeypatch("add_request"), partial(_refusing, keys, 0))
    # Which every front-end calls when its modules are there.
    wrap(monkeypatch("input_processor_init"), partial(_then, install))


def _refusing(
    keys: Collection[str], index: int, original: Callable[..., Any]
) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[index] if len(args) > index else kwargs.get("params", kwargs.get("request"))
        if has_lens_keys(getattr(given, "sampling_params", given), (*keys, ENVELOPE_KEY)):
            require("lens")
        return original(self, *args, **kwargs)

    return run


def _then(further: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        further()

    return init
