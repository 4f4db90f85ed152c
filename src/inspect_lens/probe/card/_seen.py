"""The samples that a probe was made of, compactly, so that nobody judges it on them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import warnings
from collections.abc import Iterable, Sequence
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, field_validator

SEEN_ROLES: Final = ("training", "selection", "control", "calibration")
"""What a sample can have done: fitted the direction, chosen the layer, set the threshold, fitted
the probabilities."""

_BYTES: Final = 6  # of 100,000 samples and 10,000 others, one in 280,000 times two collide


class SeenSamples(BaseModel):
    """Hashes of the samples that took part in making a probe.

    A hash is the first 6 bytes of the SHA-256 of what a sample is; the hashes of a role are
    sorted, put together and written in base64: 8 characters per sample.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    by: Literal["content", "activations"]
    """What was hashed: what the model was shown, or the rows that it gave."""
    training: str = ""
    selection: str = ""
    control: str | None = None
    """None where the control set was not known by what was hashed for the others."""
    calibration: str | None = None
    """Of another set than the selection set; None where there is none, or it was not known by what
    was hashed for the others."""

    @field_validator(*SEEN_ROLES)
    @classmethod
    def _hashes(cls, value: str | None) -> str | None:
        try:
            if len(base64.b64decode(value or "", validate=True)) % _BYTES:
                raise ValueError(f"is no multiple of {_BYTES} bytes")
        except binascii.Error as error:
            raise ValueError(f"is not base64 ({error})") from None
        return value

    @classmethod
    def of(
        cls,
        by: Literal["content", "activations"],
        *,
        training: Iterable[bytes],
        selection: Iterable[bytes] = (),
        control: Iterable[bytes] | None = None,
        calibration: Iterable[bytes] | None = None,
    ) -> Self:
        """Hash the samples that took part in making a probe.

        Args:
            by: what the bytes are.
            training: of each sample that the direction was fitted on.
            selection: of each sample that the layer was chosen on.
            control: of each sample that the threshold was set on; None where that is not known.
            calibration: of each sample that probabilities were fitted on, beside those above.

        Returns:
            The record.
        """
        return cls(
            by=by,
            training=_write(training),
            selection=_write(selection),
            control=None if control is None else _write(control),
            calibration=None if calibration is None else _write(calibration),
        )

    def with_control(self, control: Iterable[bytes] | None, *, added: bool = False) -> Self:
        """The record with another control set, or with one more.

        Args:
            control: as `of` takes it.
            added: keep what the record has, as thresholds that were set on it stay.

        Returns:
            The record.

        Warns:
            UserWarning: nothing is known of the set that is added, so its samples are not listed.
        """
        if control is None and added:
            warnings.warn(
                f"control: samples of this set are not known by their {self.by}, as those of the "
                "card are, so the card cannot list them, and nobody is kept from judging the probe "
                "on them",
                UserWarning,
                stacklevel=2,
            )
            return self
        if control is None:
            return self.model_copy(update={"control": None})
        known = _read(self.control or "") if added else set()
        return self.model_copy(update={"control": _encode(known | {_hash(s) for s in control})})

    def with_calibration(self, samples: Iterable[bytes] | None) -> Self:
        """The record with another calibration set, as `of` takes it."""
        return self.model_copy(update={"calibration": None if samples is None else _write(samples)})

    def count(self, role: str) -> int:
        """Samples of a role, each content once."""
        return len(getattr(self, role) or "") * 3 // 4 // _BYTES

    def find(self, samples: Sequence[bytes]) -> dict[str, list[int]]:
        """Find the samples that took part in making the probe.

        Args:
            samples: what `by` says, of each sample.

        Returns:
            By role, the indices of the samples that had it; roles without any are left out.
        """
        hashes = [_hash(sample) for sample in samples]
        made = {}
        for role in SEEN_ROLES:
            known = _read(getattr(self, role) or "")
            if found := [i for i, digest in enumerate(hashes) if digest in known]:
                made[role] = found
        return made


def _hash(sample: bytes) -> bytes:
    return hashlib.sha256(sample).digest()[:_BYTES]


def _write(samples: Iterable[bytes]) -> str:
    return _encode({_hash(s) for s in samples})


def _encode(hashes: set[bytes]) -> str:
    return base64.b64encode(b"".join(sorted(hashes))).decode()


def _read(text: str) -> set[bytes]:
    content = base64.b64decode(text)
    return {content[i : i + _BYTES] for i in range(0, len(content), _BYTES)}
