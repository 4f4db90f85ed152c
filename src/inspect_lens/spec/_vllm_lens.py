"""The spellings of vllm-lens: its keys of `extra_args`, and its class for a steering vector.

Source:
    vllm-lens 1.3.0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from inspect_lens.errors import SpecError

from ._capture import Transport
from ._edit import EditBase
from ._edits import Add
from ._engine import RESID_POST, Site, TensorLimits
from ._hook import parse_hooks
from ._positions import Phase, is_mask
from ._tensor import as_tensor_data, encode_tensor
from ._values import (
    LENS_KEYS,
    PEER_NAMES,
    STEER_KEY,
    check_counts,
    explain,
    integers,
    read_as,
    several,
    shown,
)

if TYPE_CHECKING:
    from ._request import LensRequest

__all__ = ["SteeringVector", "read_transport"]

_NAMES = {"activations": "vector", "layer_indices": "layers", "position_indices": "positions"}


class SteeringVector:
    """Makes an `Add`, the edit that adds a vector, from the arguments that vllm-lens has.

    Example:
        ```python
        import numpy as np

        from inspect_lens import SteeringVector

        vector = SteeringVector(
            activations=np.random.default_rng(0).standard_normal((2, 256)),  # (layers, hidden)
            layer_indices=[3, 4],
            scale=4.0,
            phase="decode",
        )
        assert (vector.op, vector.layers) == ("add", (3, 4))
        # extra_args={"apply_steering_vectors": [vector]}
        ```
    """

    def __new__(  # type: ignore[misc]
        cls,
        activations: Any,
        layer_indices: Sequence[int],
        scale: float = 1.0,
        norm_match: bool = False,
        position_indices: Sequence[int] | None = None,
        *,
        site: Site = RESID_POST,
        phase: Phase = "both",
    ) -> Add:
        """Make the edit.

        Args:
            activations: (layers, hidden), one vector per layer, or (layers, positions, hidden),
                one per layer and position: a torch tensor, a numpy array, lists, or the JSON form
                of a tensor.
            layer_indices: layer of each row of `activations`, 0-based.
            scale: factor on the vector.
            norm_match: whether each vector is scaled to the norm of the stream of its token.
            position_indices: absolute positions; negative ones count from the end of the prompt.
                None is every token for (layers, hidden), and positions 0, 1, … for (layers,
                positions, hidden).
            site: where in those layers.
            phase: only those of the positions that are `prefill` or `decode` tokens.
        """
        return read_as(Add, _spelled(dict(
            activations=activations, layer_indices=layer_indices, scale=scale,
            norm_match=norm_match, position_indices=position_indices, site=site, phase=phase,
        )))  # fmt: skip

    @staticmethod
    def model_validate(value: Any) -> Add:
        """Read a vector in the JSON form of vllm-lens, or in that of `Add`, or an `Add`."""
        return read_as(Add, _spelled(value) if isinstance(value, Mapping) else value)


def _spelled(value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a vector of vllm-lens, by the names that `Add` has."""
    if "op" in value or not set(value) & PEER_NAMES:
        return dict(value)
    if mixed := sorted(set(value) & set(_NAMES.values())):
        raise SpecError(
            f"{', '.join(mixed)} beside {', '.join(sorted(set(value) & PEER_NAMES))}; give the "
            f"names of vllm-lens ({', '.join(_NAMES)}) or those of Add "
            f"({', '.join(_NAMES.values())}), not both"
        )
    if missing := [name for name in ("activations", "layer_indices") if name not in value]:
        raise SpecError(
            f"{missing[0]} is missing; a vector has activations, which are (layers, hidden), and "
            "layer_indices, which name the layer of each row"
        )
    fields = {_NAMES.get(key, key): item for key, item in value.items()}
    if fields.get("positions") is None:
        fields.pop("positions", None)
        shape = fields["vector"].get("shape") if isinstance(fields["vector"], Mapping) else None
        if shape is None:
            fields["vector"] = as_tensor_data(fields["vector"], field="activations")
            shape = fields["vector"].shape
        if isinstance(shape, list | tuple) and len(shape) == 3 and type(shape[1]) is int:
            fields["positions"] = range(min(max(shape[1], 1), 1 << 20))
        return fields
    try:
        listed = integers(fields["positions"])
    except ValueError as error:
        raise SpecError(
            f"position_indices: {error}; give the positions themselves, as in [0, 2]"
        ) from None
    if not isinstance(listed, tuple):
        raise SpecError(f"position_indices={shown(listed)}; it has to be a list of integers")
    fields["positions"] = listed
    return fields


def from_vllm_lens(extra_args: Mapping[str, Any], limits: TensorLimits | None) -> dict[str, Any]:
    """Fields of a `LensRequest` that the keys of vllm-lens ask for."""
    values: dict[str, Any] = {}
    check_counts({key: extra_args[key] for key in LENS_KEYS if key in extra_args})
    transport = read_transport(extra_args.get("activations_transport"))
    for key, name in (("output_residual_stream", "capture"), ("output_qk", "qk")):
        layers = _asked_layers(key, load_json(key, extra_args.get(key)))
        if layers is not None:
            values[name] = {"layers": layers, "transport": transport}
    hooks = load_json("apply_hooks", extra_args.get("apply_hooks"))
    if hooks is not None:
        values["hooks"] = parse_hooks(hooks)
    steer = load_json(STEER_KEY, extra_args.get(STEER_KEY))
    if steer is not None:
        values["edits"] = [
            _vector(item, f"{STEER_KEY}[{i}]", limits) for i, item in enumerate(several(steer))
        ]
    skip = load_json("skip_reading_prefix_cache", extra_args.get("skip_reading_prefix_cache"))
    if skip is not None:
        # vLLM makes 1 and 0 of true and false in `vllm_xargs`.
        if type(skip) not in (bool, int) or skip not in (0, 1):
            raise SpecError(f"skip_reading_prefix_cache={shown(skip)}; allowed are true and false")
        values["skip_reading_prefix_cache"] = bool(skip)
    return values


def _vector(value: Any, field: str, limits: TensorLimits | None) -> Add:
    value = load_json(field, value)
    if isinstance(value, Add):
        return value
    if not isinstance(value, Mapping):
        raise SpecError(f"{field}={shown(value)}; it has to be a SteeringVector or its JSON form")
    context = None if limits is None else limits.context
    try:
        return Add.model_validate(_spelled(value), context=context)
    except ValidationError as error:
        names = (
            " (vector, layers and positions are what activations, layer_indices and "
            "position_indices give)"
        )
        raise SpecError(
            explain(error, at=field) + (names if "activations" in value else "")
        ) from None
    except ValueError as error:
        raise SpecError(f"{field}: {error}") from None


def _asked_layers(key: str, value: Any) -> Any:
    """Layers as the keys of vllm-lens spell them; None where nothing is asked for."""
    if value is None or value is False:
        return None
    if value is True or isinstance(value, list | tuple):
        return value
    raise SpecError(
        f"{key}={shown(value)}; allowed are true (all layers), false, and a list of layers such as "
        '[2]; inside vllm_xargs as text, "true" or "[2]", since vLLM makes 1 of a true there'
    )


_TRANSPORTS: Mapping[str, Transport] = {
    "base64": "inline", "binary": "binary", "inline": "inline", "auto": "auto",
}  # fmt: skip
"""By the words of vllm-lens, and ours; the first that means one is what vllm-lens is told."""


def read_transport(value: object) -> Transport:
    """The key of vllm-lens as `Transport` says it."""
    if value is None:
        return "auto"
    if isinstance(value, str) and value in _TRANSPORTS:
        return _TRANSPORTS[value]
    raise SpecError(f"activations_transport={shown(value)}; allowed are {', '.join(_TRANSPORTS)}")


def load_json(field: str, value: Any) -> Any:
    """Parse text as JSON: HTTP's `vllm_xargs` cannot nest, so objects come as strings."""
    if not isinstance(value, str):
        return value
    try:
        loaded = json.loads(value)
    except (ValueError, RecursionError):
        raise SpecError(f"{field}: {shown(value)} is not JSON, or nested too deep") from None
    check_counts(loaded, field=field)
    return loaded


_THEIRS = {"capture", "edits", "hooks", "qk", "skip_reading_prefix_cache"}
"""Fields of a request that the keys of vllm-lens may say."""


def to_vllm_lens(request: LensRequest) -> dict[str, Any] | None:
    """The request by the keys of vllm-lens, which either server reads; None where they cannot."""
    capture, qk = request.capture, request.qk
    if (
        not all(is_plain(edit) for edit in request.edits)
        or (capture is not None and not capture.is_plain)
        or (qk is not None and qk.heads is not None)
        or request.skip_reading_prefix_cache is False
        or not _THEIRS.issuperset(request.asked)
    ):
        return None
    args: dict[str, Any] = {}
    for key, asked in (("output_residual_stream", capture), ("output_qk", qk)):
        if asked is not None:
            args[key] = True if asked.layers == "all" else list(asked.layers)
            if asked.transport != "auto":  # without the key the response has the tensors
                words = (word for word, meant in _TRANSPORTS.items() if meant == asked.transport)
                args["activations_transport"] = next(words)
    if request.edits:
        args[STEER_KEY] = list(request.edits)
    if request.hooks:
        args["apply_hooks"] = list(request.hooks)
    if request.skip_reading_prefix_cache:
        args["skip_reading_prefix_cache"] = True
    return args


def is_plain(edit: EditBase) -> bool:
    """Whether it is a vector as vllm-lens has them."""
    return (
        isinstance(edit, Add)
        and len(edit.vector.shape) > 1
        and edit.site == RESID_POST
        and edit.phase == "both"
        and edit.when is None
        and edit.schedule is None
        and (edit.positions == "all" or isinstance(edit.positions, tuple))
        and not is_mask(edit.positions)
    )


def vector_form(edit: Add) -> dict[str, Any]:
    """The JSON form that vllm-lens has of a vector that its key can say."""
    positions = None if edit.positions == "all" else list(edit.positions)
    return {
        "activations": encode_tensor(edit.vector),
        "layer_indices": list(edit.layers),
        "scale": edit.scale,
        "norm_match": edit.norm_match,
        "position_indices": positions,
    }
