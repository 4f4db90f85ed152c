"""The types of requests and answers: captures, edits, probes and receipts.

The Inspect process and the vLLM processes share them. A file's `__all__` is what it gives to other
folders; of these names users have all but `_SHARED`. Read `_request.py` first.
"""

from inspect_lens import _names

from ._capture import *
from ._check import *
from ._config import *
from ._edit import *
from ._edits import *
from ._engine import *
from ._gate import *
from ._hook import *
from ._instruction import *
from ._latents import *
from ._lens import *
from ._pool import *
from ._positions import *
from ._probe import *
from ._receipt import *
from ._request import *
from ._tensor import *
from ._values import *
from ._vllm_lens import *

_SHARED = frozenset(
    {
        "BodyParts",
        "CAPTURE_KEY",
        "Cache",
        "WEIGHTS",
        "NO_REQUEST",
        "Chosen",
        "PatternBudget",
        "QK_NAMES",
        "RequestPart",
        "SPLICE_MODES",
        "STEER_KEY",
        "TensorLimits",
        "Value",
        "as_array",
        "as_indices",
        "check_counts",
        "check_edits",
        "check_engine_autoencoder",
        "check_engine_lens",
        "check_hooks",
        "check_layers_of",
        "check_lens",
        "check_name",
        "check_probe",
        "check_request",
        "check_size",
        "check_word",
        "chosen_numbers",
        "code_python",
        "decode_saved",
        "encode_frame",
        "encode_saved",
        "explain",
        "forget_parsed",
        "in_phase",
        "in_site_order",
        "is_gate_key",
        "is_mask",
        "judging",
        "lens_args",
        "names_heads",
        "parse_hooks",
        "parse_positions",
        "phase_range",
        "plain_number",
        "read_as",
        "read_transport",
        "refuse_misspelled",
        "refuse_own_words",
        "resolve_positions",
        "result_name",
        "rows_for",
        "sampled_match",
        "shown",
        "split_body",
        "split_options",
        "tap_order",
        "tap_point",
        "tap_points",
        "to_extra_args",
        "token_gate",
        "token_gate_key",
    }
)
"""What the Inspect process and the vLLM processes share, and no user needs."""

if not _names.TYPE_CHECKING:
    __all__ = _names.public(globals(), _SHARED)
