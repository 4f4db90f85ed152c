"""Texts of a call's tokens, by the tokenizer of the model that wrote it."""

from __future__ import annotations

from inspect_lens._base.token_texts import TokenTexts
from inspect_lens.errors import ArtifactError

__all__ = ["CallTexts"]


class CallTexts:
    """Finds the tokenizer of a call's model, once per model."""

    def __init__(self, tokenizer: str | None = None, *, card_model: str = "") -> None:
        self._card_model = card_model
        self._given = tokenizer
        self._texts: dict[str | None, TokenTexts] = {}

    def of(self, model_name: str | None, *, what: str) -> TokenTexts:
        """The texts of a model's tokens."""
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
