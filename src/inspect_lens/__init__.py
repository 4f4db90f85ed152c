"""White-box evaluation at serving speed: capture, steer and probe inside vLLM, from Inspect.

Importing this package loads neither torch nor vllm nor inspect_ai. The names that are used most can
be imported from here, too, and each loads what it needs when it is imported:

```python
from inspect_lens import load_probe, probe_score, with_capture
```
"""

import typing
from importlib import import_module

from . import errors
from ._base.arguments import judged_arguments
from ._base.published import PublishedSetting, published_settings
from .spec import CaptureSpec, Hook, LensRequest, Receipt, SteeringVector

if typing.TYPE_CHECKING:
    from .client import LensClient
    from .probe import load_probe
    from .scorer import deception_probe, probe_score
    from .solver import with_capture, with_lens, with_steering
    from .train import train_probe
    from .vector import load_vector

__version__ = "0.1.0"

__all__ = [
    "CaptureSpec",
    "Hook",
    "LensClient",
    "LensRequest",
    "PublishedSetting",
    "Receipt",
    "SteeringVector",
    "__version__",
    "deception_probe",
    "errors",
    "judged_arguments",
    "load_probe",
    "load_vector",
    "probe_score",
    "published_settings",
    "train_probe",
    "with_capture",
    "with_lens",
    "with_steering",
]

_MODULES = {
    "LensClient": "client",
    "deception_probe": "scorer",
    "load_probe": "probe",
    "load_vector": "vector",
    "probe_score": "scorer",
    "train_probe": "train",
    "with_capture": "solver",
    "with_lens": "solver",
    "with_steering": "solver",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
