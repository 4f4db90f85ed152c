"""Parameters that mean the same on every surface that reads calls, with their one text.

A docstring lists what is its own, and the decorator `shared_parameters` puts the others in, in the
order of the signature. `help()` shows them, and so do the reference pages, for which
`mkdocs_hooks.py` does the same from the source.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from inspect_lens._base.arguments import judged_arguments

SHARED: Final[Mapping[str, str]] = {
    "probe": "name below `probes/`, path, `hf://` address, or a probe. Give a path as a string: of "
    "a `Path` Inspect logs only the last part.",
    "layer": "one of the probe's layers; all of them, averaged, by default.",
    "positions": "tokens to read; those of the card by default.",
    "pool": "how token scores become one: `mean`, `last`, `max`, `top_k_mean:5`, "
    "`rolling_mean_max:10`, `sentence_mean_max`; the card's by default.",
    "selection": "tokens among these positions by what they are: `answer`, `reasoning`, "
    "`tool_calls`, `assistant`, `user`, `prompt`, `last:K` or `regex:PATTERN`; "
    'the card\'s by default, "" for all.',
    "source": "`captured` reads what the generation captured, also from the file beside a finished "
    "log; `recompute` feeds the same token ids to the model again; `auto` does the first where it "
    "can.",
    "check_model": "refuse a model whose fingerprint is not that of the card.",
    "token_scores": "write the score of each token to a file beside the log; "
    "`inspect_lens.reading.read_token_scores` reads it.",
    "tokenizer": "folder or name of the tokenizer that tells sentences and selections; by default "
    "that of the model that is read, else that of the card's model, where it is on this machine.",
    "over": "`last` reads the call of the sample's answer, or the last one of `roles`; `all` reads "
    "every call, each choice by itself.",
    "roles": "model roles whose calls are read instead of those of the eval's model. By default "
    "these are found where the calls of one role alone have a lens.",
    "on_missing": "`error` fails the sample where the activations of a call are not there; `skip` "
    "treats such a call as one without a token to read.",
    "threshold": "operating point of the card that verdict and metrics go by, such as `fpr=0.05`; "
    "its first threshold by default. A number of your own goes to the metrics instead.",
    "name": "under which tables show the score; the probe and the pool by default.",
    "combine": "`max` or `mean` of the calls is the value.",
    "inner": "what to run, such as `react()`; `generate()` by default. It reaches all calls of the "
    "model under evaluation; scorers and other models are left alone.",
    "label": "key of the sample metadata that holds 1 or true for positives.",
    "cluster": "key of the sample metadata that says which samples are not independent, such as "
    "the scenario. An interval then draws whole clusters, or is the exact one for as many samples "
    "as the clusters are worth (`inspect_lens.probe.rate_interval`). Where there are too few "
    "clusters (`inspect_lens.probe.count_groups`), each counts as one sample, or the interval is "
    "NaN.",
    "oracle": "name below `oracles/`, path, `hf://owner/repository`, or an `Oracle`.",
    "layers": "a layer, a share of the depth, or a set of layers; the oracle's middle one by "
    "default.",
    "inputs": "`segment` shows the chosen tokens together, `tokens` each of them alone, `full_seq` "
    "every token of prompt and completion.",
    "last": "only so many of them, from the end; None for all.",
    "controls": "true for `text_only`, `shuffled` and `random`, false for none, or some by name.",
    "seed": "of the controls.",
    "max_tokens": "longest answer.",
    "served_as": "name under which the server has the adapter already.",
    "start": "how the answer begins, such as `Sure, it means`; the model goes on from there.",
    "placeholder": "a text of one token.",
    "repeat": "placeholders that get the same row.",
    "into": "layer at whose output the row is put in; the row's own layer by default.",
}
"""Text by parameter: of calls and tokens, of metrics, of what is asked in words.

Where a surface says something else, its own docstring has it."""

_WIDTH: Final = 100
_ARGUMENT: Final = re.compile(r"( *)\*{0,2}(\w+): ")

F = TypeVar("F", bound=Callable[..., Any])


def shared_parameters(function: F) -> F:
    """Complete the docstring of a function with the text of its shared parameters.

    Its flags, numbers and texts are judged, too, before anything runs.
    """
    if function.__doc__ is not None:  # python -OO has none
        names = list(inspect.signature(function).parameters)
        function.__doc__ = complete_arguments(function.__doc__, names)
    return judged_arguments(function)


def complete_arguments(doc: str, names: Sequence[str]) -> str:
    """A docstring whose section `Args:` has an entry for each name that is shared or its own."""
    lines = doc.splitlines()
    start = next((i for i, line in enumerate(lines) if line.strip() == "Args:"), None)
    if start is None:
        raise TypeError(f"{lines[0]!r} has no section `Args:`, which shared parameters go into")
    indent = " " * (len(lines[start]) - len("Args:") + 4)
    stop = start + 1
    own: dict[str, list[str]] = {}
    while stop < len(lines) and lines[stop].startswith(indent):
        found = _ARGUMENT.match(lines[stop])
        if found and found[1] == indent:
            own[found[2]] = []
        own[list(own)[-1]].append(lines[stop])
        stop += 1
    if unknown := set(own) - set(names):
        raise TypeError(f"Args documents {sorted(unknown)}, and there is no such parameter")
    made: list[str] = []
    for name in names:
        made += own.get(name) or _entry(name, indent)
    return "\n".join([*lines[: start + 1], *made, *lines[stop:]])


def _entry(name: str, indent: str) -> list[str]:
    if name not in SHARED:
        return []
    return textwrap.wrap(
        f"{name}: {SHARED[name]}", width=_WIDTH, initial_indent=indent,
        subsequent_indent=f"{indent}    ", break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
