"""What others have published for public models: heads, layers and files, with their sources.

Only facts: numbers are all that is copied from a source, and no file of it is passed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from pydantic import Field

from inspect_lens.errors import ArtifactError
from inspect_lens.spec import Value, check_word

Kind = Literal["attention_tracker", "core", "refusal_direction", "verbaliser"]
"""Lists of heads (`attention_tracker`, `core`), a vector with its layer (`refusal_direction`), or a
natural-language autoencoder (`verbaliser`)."""


class PublishedSetting(Value):
    """One setting that was published for one model.

    Example:
        ```python
        from inspect_lens import published_settings

        (heads,) = published_settings("Qwen/Qwen2-1.5B-Instruct")
        assert heads.kind == "attention_tracker" and heads.heads[0] == (10, 6)
        print(heads.source, heads.licence)
        ```
    """

    kind: Kind
    model: str = Field(description="Model on the Hugging Face hub, as the source names it.")
    revision: str | None = Field(
        default=None, description="Revision of the model; None: the source does not say which."
    )
    heads: tuple[tuple[int, int], ...] = Field(
        default=(), description="(layer, head) of each, both from 0, in the order of the source."
    )
    layer: int | None = Field(
        default=None, description="Block that it acts on, from 0; `note` says on which side of it."
    )
    files: tuple[str, ...] = Field(
        default=(), description="Where its files are: `repository:path`, or a name on the hub."
    )
    source: str = Field(
        description="Paper, and the repository with the commit that was read, where it was noted."
    )
    licence: str = Field(description="Of the repository or of its files.")
    note: str = Field(default="", description="What you have to know to use it.")


_TRACKER: Final = (
    "Hung et al. 2024, arXiv:2411.00348; github.com/khhung-906/Attention-Tracker, "
    "configs/model_configs (commit not noted)"
)
_TRACKER_LICENCE: Final = "files CC-BY-NC-4.0, not copied; the indices are facts"
_CORE: Final = (
    "Tran et al. 2025, arXiv:2510.02219; github.com/linhhtran/CoRe-Reranking at 4d62a24601b8"
)
_REFUSAL: Final = (
    "Arditi et al. 2024, arXiv:2406.11717; github.com/andyrdt/refusal_direction at 9d852fae1a91"
)
_NLA: Final = (
    "Fraser-Taliente et al. 2026; github.com/kitft/natural_language_autoencoders at a8c71f0796fa"
)

Pairs = tuple[tuple[int, int], ...]

_HEADS: Final[dict[tuple[Kind, str], Pairs]] = {
    ("attention_tracker", "Qwen/Qwen2-1.5B-Instruct"): (
        (10, 6), (11, 0), (11, 2), (11, 8), (11, 9), (11, 11), (12, 8), (13, 10), (14, 8), (15, 7),
        (15, 11), (17, 0), (18, 9), (19, 7),
    ),
    ("attention_tracker", "google/gemma-2-9b-it"): (
        (10, 11), (11, 6), (11, 9), (11, 13), (13, 1), (14, 4), (14, 15), (15, 11), (16, 5),
        (16, 9), (16, 14), (17, 2), (17, 14), (18, 9), (18, 11), (18, 15), (20, 1), (20, 7),
        (20, 9), (21, 3), (21, 13), (21, 15), (22, 11), (22, 14), (23, 2), (24, 8), (25, 14),
        (27, 8), (27, 9), (30, 13), (32, 13),
    ),
    ("attention_tracker", "ibm-granite/granite-3.1-8b-instruct"): (
        (6, 9), (7, 20), (8, 1), (8, 13), (8, 14), (8, 15), (10, 2), (10, 3), (10, 6), (10, 21),
        (11, 4), (11, 30), (11, 31), (12, 2), (12, 28), (13, 8), (13, 9), (13, 12), (14, 15),
        (14, 16), (14, 19), (14, 27), (15, 6), (15, 7), (15, 20), (15, 23), (16, 12), (16, 14),
        (16, 16), (17, 7), (17, 11), (17, 15), (17, 19), (17, 21), (17, 25), (17, 26), (18, 9),
        (18, 17), (18, 20), (18, 28), (19, 1),
    ),
    ("attention_tracker", "meta-llama/Meta-Llama-3-8B-Instruct"): (
        (5, 18), (7, 12), (9, 29), (17, 2),
    ),
    ("attention_tracker", "microsoft/Phi-3-mini-128k-instruct"): (
        (11, 21), (12, 18), (12, 29), (14, 6), (14, 13), (14, 23), (14, 29), (16, 9), (16, 18),
        (16, 25),
    ),
    ("attention_tracker", "mistralai/Mistral-7B-Instruct-v0.3"): (
        (4, 16), (5, 20), (5, 21), (7, 24), (7, 25), (7, 26), (7, 27), (8, 15), (8, 23), (8, 24),
        (9, 5), (9, 7), (9, 18), (10, 3), (11, 18), (11, 28), (12, 17), (12, 20), (13, 10),
        (13, 23), (14, 9), (14, 20), (14, 27), (15, 4), (15, 28),
    ),
    ("core", "ibm-granite/granite-3.2-8b-instruct"): (
        (19, 1), (17, 20), (19, 19), (34, 28), (17, 25), (17, 7), (19, 4), (19, 31),
    ),
    ("core", "meta-llama/Meta-Llama-3.1-8B-Instruct"): (
        (13, 18), (13, 1), (14, 13), (13, 21), (14, 31), (13, 13), (8, 11), (14, 20),
    ),
    ("core", "microsoft/phi-4"): (
        (17, 1), (23, 1), (19, 5), (19, 29), (19, 34), (19, 0), (18, 6), (19, 7),
    ),
    ("core", "mistralai/Mistral-7B-Instruct-v0.2"): (
        (15, 21), (15, 1), (16, 12), (15, 7), (9, 26), (12, 11), (12, 7), (18, 0),
    ),
}  # fmt: skip

_DIRECTIONS: Final = {
    "google/gemma-2b-it": ("gemma-2b-it", 10, -2),
    "meta-llama/Llama-2-7b-chat-hf": ("llama-2-7b-chat-hf", 14, -1),
    "meta-llama/Meta-Llama-3-8B-Instruct": ("meta-llama-3-8b-instruct", 12, -5),
    "Qwen/Qwen-1_8B-Chat": ("qwen-1_8b-chat", 15, -2),
    "01-ai/Yi-6B-Chat": ("yi-6b-chat", 20, -5),
}
"""Folder below `pipeline/runs`, layer, and the prompt token that the direction was taken at."""

_VERBALISERS: Final = {
    "Qwen/Qwen2.5-7B-Instruct": "kitft/nla-qwen2.5-7b-L20",
    "google/gemma-3-12b-it": "kitft/nla-gemma3-12b-L32",
    "google/gemma-3-27b-it": "kitft/nla-gemma3-27b-L41",
    "meta-llama/Llama-3.3-70B-Instruct": "kitft/Llama-3.3-70B-NLA-L53",
}


def _every() -> Iterator[PublishedSetting]:
    for (kind, model), heads in _HEADS.items():
        is_core = kind == "core"
        yield PublishedSetting(
            kind=kind, model=model, heads=heads, source=_CORE if is_core else _TRACKER,
            licence="no licence file; the indices are facts" if is_core else _TRACKER_LICENCE,
            note=(
                "The eight heads with the authors' best scores; they rank with as many."
                if is_core
                else "It comes without a threshold, so set one on normal prompts of your own."
            ),
        )  # fmt: skip
    for model, (run, layer, position) in _DIRECTIONS.items():
        yield PublishedSetting(
            kind="refusal_direction", model=model, layer=layer,
            files=(f"github.com/andyrdt/refusal_direction:pipeline/runs/{run}/direction.pt",),
            source=_REFUSAL, licence="Apache-2.0",
            note=f"Of the stream before that block (`resid_pre`), at prompt token {position}; "
            "inspect-lens vector import reads the file.",
        )  # fmt: skip
    for model, name in _VERBALISERS.items():
        yield PublishedSetting(
            kind="verbaliser", model=model, files=(f"{name}-av", f"{name}-ar"), source=_NLA,
            licence="Apache-2.0, and that of the base model",
            note="Layer and scale are in its nla_meta.yaml, which verbalise reads.",
        )  # fmt: skip


PUBLISHED: Final[tuple[PublishedSetting, ...]] = tuple(_every())


def settings_of(model: str) -> tuple[PublishedSetting, ...]:
    """All that is known to be published for a model, with or without a provider in its name."""
    asked = model.lower()
    names = (asked, asked.partition("/")[2])
    return tuple(one for one in PUBLISHED if one.model.lower() in names)


def published_settings(model: str, *, kind: Kind | None = None) -> tuple[PublishedSetting, ...]:
    """Find what others have published for a model: heads, layers, vectors, verbalisers.

    These are the authors' own settings. They were read from the sources that each of them names,
    and have not been measured again here.

    Args:
        model: name on the hub, with or without a provider before it, in upper or lower case.
        kind: only these.

    Returns:
        The settings, heads first.

    Raises:
        ArtifactError: there is none for this model; the message lists models.
        SpecError: the kind is unknown.

    Example:
        ```python
        from inspect_lens import published_settings

        for found in published_settings("meta-llama/Meta-Llama-3-8B-Instruct"):
            print(found.kind, found.layer, found.source)
        ```
    """
    if kind is not None:
        check_word("kind", kind, Kind)
    found = tuple(one for one in settings_of(model) if kind in (None, one.kind))
    if not found:
        models = sorted({one.model for one in PUBLISHED if kind in (None, one.kind)})
        what = "no settings" if kind is None else f"no {kind} settings"
        raise ArtifactError(f"model={model!r}: {what} are known; allowed are {', '.join(models)}")
    return found
