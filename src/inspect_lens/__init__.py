"""White-box evaluation at serving speed: capture, steer and probe inside vLLM, from Inspect.

Importing this package loads neither torch nor vllm nor inspect_ai.
"""

from . import errors
from ._base.published import PublishedSetting, published_settings
from .spec import CaptureSpec, Hook, LensRequest, Receipt, SteeringVector

__version__ = "0.1.0"

__all__ = [
    "CaptureSpec",
    "Hook",
    "LensRequest",
    "PublishedSetting",
    "Receipt",
    "SteeringVector",
    "__version__",
    "errors",
    "published_settings",
]
