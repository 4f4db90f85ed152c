"""What the words of a text give away: a linear classifier on hashed words, by scikit-learn.

The black-box baseline of an eval's own samples, which keeps hashes in a log and no text.
`inspect_lens.train` has the same on the words themselves, for baselines that are trained on one set
and judged on another.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Hashable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inspect_lens.errors import SpecError

from ._metrics import midranks

__all__ = ["cross_validated_words", "hash_words"]

Floats = NDArray[np.float64]

_WORD: Final = re.compile(r"\w+")
_ASCII_WORD: Final = re.compile(rb"\w+")
_BUCKETS: Final = 1 << 16


def hash_words(text: str) -> NDArray[np.uint16]:
    """The distinct words and pairs of neighbouring words of a text, as hashes.

    Args:
        text: any.

    Returns:
        (n,) uint16, ascending: lower-cased words and pairs, CRC-32 modulo 65536, so that about
        one in a hundred of a thousand different ones collides.

    Example:
        ```python
        from inspect_lens.probe import hash_words

        assert len(hash_words("the town, the founder")) == 6  # three words and three pairs
        ```
    """
    if text.isascii():  # the same words, sooner: each sample of an eval is hashed
        words = _ASCII_WORD.findall(text.lower().encode())
    else:
        words = [found.casefold().encode() for found in _WORD.findall(text)]
    hashed = list(map(zlib.crc32, words))
    hashed += map(zlib.crc32, [b" " + word for word in words[1:]], hashed[:-1])
    made = np.array(hashed, dtype=np.uint32).astype(np.uint16)  # modulo 65536
    made.sort()
    return made[np.flatnonzero(np.diff(made, prepend=~made[:1]))]  # as np.unique, which is slow


def cross_validated_words(
    words: Sequence[ArrayLike],
    labels: ArrayLike,
    *,
    groups: Sequence[Hashable] | None = None,
    folds: int = 5,
    penalty: float = 1.0,
    seed: int = 0,
) -> Floats:
    """How positive each text looks to a classifier that has not seen it or its group.

    Logistic regression on the presence of words, weighted by inverse document frequency, with rows
    of length 1 and an L2 penalty. Folds keep whole groups together and share out both classes.
    Scores of different folds come from different classifiers, so their ranks are returned.

    Args:
        words: (samples,) of `hash_words`.
        labels: (samples,) 0 and 1.
        groups: (samples,) what must not be split, such as the epochs of one sample.
        folds: fewer where a class has fewer groups.
        penalty: of the squared weights; scikit-learn's 1 / C.
        seed: of the folds.

    Returns:
        (samples,) float64 in (0, 1), the mid-rank within the fold over its size; all 0.5 where a
        class has fewer than two groups, since nothing can be learned and judged then.

    Raises:
        SpecError: lengths disagree, or a label is neither 0 nor 1.

    Example:
        ```python
        from inspect_lens.probe import auroc, cross_validated_words, hash_words

        texts = ["it is a lie", "it is the truth"] * 20
        labels = [1, 0] * 20
        scores = cross_validated_words([hash_words(text) for text in texts], labels)
        assert auroc(labels, scores) == 1.0  # the words give the label away
        ```
    """
    y = np.asarray(labels)
    if y.ndim != 1 or len(words) != y.size or not np.isin(y, (0, 1)).all():
        raise SpecError(
            f"words and labels: {len(words)} texts and labels of shape {y.shape}; allowed is one "
            "label, 0 or 1, per text"
        )
    names = list(range(y.size)) if groups is None else list(groups)
    fold = _folds(y.astype(bool), names, folds, np.random.default_rng(seed))
    made = np.full(y.size, 0.5)
    if fold is None:
        return made
    from threadpoolctl import threadpool_limits

    texts = [np.asarray(w, dtype=np.int64) for w in words]
    # The vectors are short: threads of BLAS would wait for each other, ten times as long.
    with threadpool_limits(limits=1):
        for held in np.unique(fold):
            test = fold == held
            seen = [t for t, out in zip(texts, test, strict=True) if not out]
            new = [t for t, out in zip(texts, test, strict=True) if out]
            scores = _score(seen, y[~test].astype(np.float64), new, penalty)
            made[test] = (midranks(scores) - 0.5) / test.sum()
    return made


def _score(
    seen: Sequence[NDArray[np.int64]], y: Floats, new: Sequence[NDArray[np.int64]], penalty: float
) -> Floats:
    """Log odds of new texts by a classifier of the texts that were seen."""
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.linear_model import LogisticRegression

    # Words that no text in the fit has, have no weight and no length.
    known = np.flatnonzero(np.bincount(np.concatenate(seen)))
    known = known if known.size else np.zeros(1, dtype=np.int64)
    weigh = TfidfTransformer()
    fitted = LogisticRegression(C=1.0 / penalty, tol=1e-6, max_iter=1000).fit(
        weigh.fit_transform(_matrix(seen)[:, known]), y
    )
    return np.asarray(fitted.decision_function(weigh.transform(_matrix(new)[:, known])))


def _matrix(texts: Sequence[NDArray[np.int64]]) -> Any:
    """Presence of words: a sparse matrix (texts, buckets)."""
    from scipy.sparse import csr_matrix

    ends = np.cumsum([0, *(t.size for t in texts)])
    columns = np.concatenate([*texts, np.zeros(0, dtype=np.int64)])
    return csr_matrix((np.ones(columns.size), columns, ends), shape=(len(texts), _BUCKETS))


def _folds(
    y: NDArray[np.bool_], names: Sequence[Hashable], folds: int, rng: np.random.Generator
) -> NDArray[np.int64] | None:
    """Fold of each sample: whole groups, so that every classifier sees both classes."""
    # scikit-learn's StratifiedGroupKFold leaves one class out of a training part now and then,
    # where groups are few or hold both. Here groups of negatives, of both and of positives are
    # dealt out in turn, so that those of either class come to two folds at least.
    held: dict[Hashable, set[bool]] = {}
    for name, mark in zip(names, y.tolist(), strict=True):
        held.setdefault(name, set()).add(mark)
    k = min(folds, *(sum(mark in marks for marks in held.values()) for mark in (False, True)))
    if k < 2:
        return None
    kinds = [len(marks) if True in marks and False in marks else 3 * max(marks)
             for marks in held.values()]  # fmt: skip
    order = np.lexsort((rng.random(len(kinds)), np.array(kinds)))
    of = {name: int(place) % k for name, place in zip(held, np.argsort(order), strict=True)}
    return np.array([of[name] for name in names], dtype=np.int64)
