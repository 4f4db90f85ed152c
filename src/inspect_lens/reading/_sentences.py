"""Where sentences end in a call, for the pool that has to know: texts of its tokens are needed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inspect_lens.errors import ArtifactError
from inspect_lens.probe import SENTENCE_POOL, sentence_ends

from ._call_texts import CallTexts
from ._rows import Rows
from ._scored import ScoredTokens

__all__ = ["Sentences"]


class Sentences:
    """Finds sentence ends with the tokenizer of the model that wrote the call.

    Args:
        texts: of the calls' tokens.
    """

    def __init__(self, texts: CallTexts) -> None:
        self._texts = texts

    def ends(self, rows: Rows | ScoredTokens, model_name: str | None = None) -> NDArray[np.bool_]:
        """Tell with which of the tokens that were read a sentence ends.

        Args:
            rows: that were read.
            model_name: of the model that wrote them.

        Returns:
            (tokens,) bool.

        Raises:
            ArtifactError: there is no tokenizer, or the call's token ids are not known.
        """
        handle = rows.handle
        ids = () if handle is None else (*handle.prompt_token_ids, *handle.token_ids)
        if not ids:
            raise ArtifactError(
                f"pool={SENTENCE_POOL!r}: the call has no token ids to tell sentences by; read "
                "activations that the vllm-lens provider captured"
            )
        texts = self._texts.of(model_name, what=f"pool={SENTENCE_POOL!r}")
        # Of all tokens: where a sentence ends shows at the token behind it.
        return sentence_ends(texts.texts(ids))[list(rows.positions)]
