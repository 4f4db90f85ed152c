"""`output.metadata` of a lens call: reads like vllm-lens', and stays small in the log."""

from __future__ import annotations

from typing import Any

__all__ = ["LensMetadata"]

TOKEN_KEYS = ("prompt_token_ids", "token_ids")


class LensMetadata(dict[str, Any]):
    """A dict that also answers for the token ids, which it does not store as items.

    vllm-lens puts `prompt_token_ids` and `token_ids` into the metadata, and so into every log,
    twice. Code written for it finds them here too; a log holds only the real items.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]

    def __init__(self, prompt_token_ids: list[int], token_ids: list[int]) -> None:
        super().__init__()
        self.prompt_token_ids = prompt_token_ids
        self.token_ids = token_ids

    def __missing__(self, key: str) -> Any:
        if key in TOKEN_KEYS:
            return getattr(self, key)
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The item, or token ids, or `default`."""
        return getattr(self, key) if key in TOKEN_KEYS else super().get(key, default)

    def __bool__(self) -> bool:
        """True also without items: `output.metadata or {}` must not lose the token ids."""
        return bool(len(self) or self.prompt_token_ids)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in TOKEN_KEYS

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.prompt_token_ids, self.token_ids, dict(self.items()))


def _rebuild(prompt: list[int], completion: list[int], items: dict[str, Any]) -> LensMetadata:
    metadata = LensMetadata(prompt, completion)
    metadata.update(items)
    return metadata
