"""The vocabulary: sites, positions, what may be asked, what comes back, and its encoding.

Owns every type that the Inspect process and the vLLM processes share.
May import pydantic, numpy, zstandard and `errors`; keeps out torch, vLLM and Inspect.
"""

from ._body import BodyParts, split_body
from ._capture import CaptureSpec, Layers, Reduce, RowDType, SiteChoice
from ._check import check_probe, check_request
from ._eager import check_hooks
from ._encode import to_extra_args, to_wire_args
from ._facts import EngineFacts
from ._hook import HOOK_REFERENCE, FunctionCode, Hook, HookReceipt, code_python, parse_hooks
from ._positions import (
    Phase,
    PositionName,
    Positions,
    in_phase,
    parse_positions,
    phase_range,
    resolve_positions,
)
from ._probe import PROBE_REFERENCE, EngineProbe, ProbeReceipt, ProbeUse
from ._qk import QKReceipt, QKSpec
from ._receipt import CaptureReceipt, EnginePath, Receipt, SteerReceipt
from ._request import (
    ENVELOPE_KEY,
    LENS_KEYS,
    NATIVE_KEY,
    PLACES,
    LensRequest,
    parse_extra_args,
    refuse_misspelled,
)
from ._saved import decode_saved, encode_saved
from ._sites import (
    RESID_POST,
    SITES,
    Site,
    TapPoint,
    in_site_order,
    result_name,
    tap_order,
    tap_point,
    tap_points,
)
from ._steer import STEERING_REFERENCE, SteeringVector, VectorUse
from ._tensor import (
    DType,
    TensorData,
    as_tensor_data,
    decode_tensor,
    encode_frame,
    encode_tensor,
    freeze_tensor,
)

__all__ = [
    "ENVELOPE_KEY",
    "HOOK_REFERENCE",
    "LENS_KEYS",
    "NATIVE_KEY",
    "PLACES",
    "PROBE_REFERENCE",
    "RESID_POST",
    "SITES",
    "STEERING_REFERENCE",
    "BodyParts",
    "CaptureReceipt",
    "CaptureSpec",
    "DType",
    "EngineFacts",
    "EnginePath",
    "EngineProbe",
    "FunctionCode",
    "Hook",
    "HookReceipt",
    "Layers",
    "LensRequest",
    "Phase",
    "PositionName",
    "Positions",
    "ProbeReceipt",
    "ProbeUse",
    "QKReceipt",
    "QKSpec",
    "Receipt",
    "Reduce",
    "RowDType",
    "Site",
    "SiteChoice",
    "SteerReceipt",
    "SteeringVector",
    "TapPoint",
    "TensorData",
    "VectorUse",
    "as_tensor_data",
    "check_hooks",
    "check_probe",
    "check_request",
    "code_python",
    "decode_saved",
    "decode_tensor",
    "encode_frame",
    "encode_saved",
    "encode_tensor",
    "freeze_tensor",
    "in_phase",
    "in_site_order",
    "parse_extra_args",
    "parse_hooks",
    "parse_positions",
    "phase_range",
    "refuse_misspelled",
    "resolve_positions",
    "result_name",
    "split_body",
    "tap_order",
    "tap_point",
    "tap_points",
    "to_extra_args",
    "to_wire_args",
]
