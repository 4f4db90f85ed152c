"""Every error of inspect_lens.

```text
LensError
├─ SpecError (ValueError)         400  the request is wrong; front-end, before any GPU work
├─ UnsupportedError (ValueError)  400  this model or engine cannot; front-end
├─ CapacityError                  429  rows, ring or bytes are full; a retry may help
├─ CaptureError                   500  a result is incomplete; the request fails as a whole
│  └─ HookError                   500  a hook of the request raised; the message is its traceback
├─ CompatError (RuntimeError)     -    vLLM is not the one we know; the lens is off
└─ ArtifactError (ValueError)     -    a probe, log or sidecar is wrong; at load time
   └─ NotCapturedError            -    what is to be read was not captured
```

A message says which field, what came, what is allowed and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ArtifactError",
    "CapacityError",
    "CaptureError",
    "CompatError",
    "HookError",
    "LensError",
    "NotCapturedError",
    "SpecError",
    "UnsupportedError",
    "did_you_mean",
]


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them.

    Args:
        given: what somebody typed.
        known: what would have been read.

    Returns:
        `did you mean 'capture'?`, or `allowed are …` where nothing is like it.

    Example:
        ```python
        from inspect_lens.errors import did_you_mean

        assert did_you_mean("captur", ["capture", "probes"]) == "did you mean 'capture'?"
        assert did_you_mean("x", ["capture", "probes"]) == "allowed are capture, probes"
        ```
    """
    words = sorted(known)
    near = difflib.get_close_matches(given, words, n=1)
    return f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(words)}"


class LensError(Exception):
    """Base class of every error that inspect_lens raises on purpose.

    Example:
        ```python
        from inspect_lens.errors import LensError
        from inspect_lens.spec import parse_extra_args

        try:
            parse_extra_args({"output_residual_steam": True})
        except LensError as error:
            print(error)  # names the field, what was asked and what is possible
            assert "did you mean 'output_residual_stream'" in str(error)
        ```
    """

    status: int = 500
    """HTTP status that a server answers with when this error ends a request."""

    def __init__(self, *said: object) -> None:
        super().__init__(*(_short(one) if isinstance(one, str) else one for one in said))


def _short(text: str) -> str:
    """A message as it is, or its ends: what came may be a file's, and what to do stands last."""
    return text if len(text) <= 8000 else f"{text[:3998]} … {text[-3998:]}"


class SpecError(LensError, ValueError):
    """The request is wrong: unknown key, wrong shape, NaN, layer out of range."""

    status = 400


class UnsupportedError(LensError, ValueError):
    """The request is well formed, and this model, engine or version cannot do it."""

    status = 400


class CapacityError(LensError):
    """A fixed-size buffer of the engine is full; trying again later may help."""

    status = 429


class CompatError(LensError, RuntimeError):
    """The vLLM that is installed is not one that this release knows how to extend."""


class CaptureError(LensError):
    """A result did not arrive whole. The request fails; there is no partial success."""


class HookError(CaptureError):
    """A custom hook raised. Its own request fails, with the hook's traceback."""


class ArtifactError(LensError, ValueError):
    """A probe file, card, log or sidecar is missing, damaged or made for another model."""


class NotCapturedError(ArtifactError):
    """The activations that are to be read were not captured; `on_missing="skip"` goes on."""
