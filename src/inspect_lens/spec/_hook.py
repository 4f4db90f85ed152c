"""Custom hooks: a function of the client that runs on rows of one request inside the engine.

A function travels as bytes of cloudpickle, in the form of vllm-lens. This module makes and names
such bytes and never reads them: reading runs code, which a worker does that was started for it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, cast

from pydantic import (
    InstanceOf,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_serializer,
)

from inspect_lens.errors import SpecError

from ._tensor import WireModel, is_wire
from ._values import Flag, Value, layer_numbers, read_as, several, shown

__all__ = ["HOOK_REFERENCE", "FunctionCode", "Hook", "HookReceipt", "code_python", "parse_hooks"]

HOOK_REFERENCE = "hook/1"
"""`$lens` of the short form in which a hook stands in logs."""

_PYTHON = re.compile(r"[0-9]{1,2}\.[0-9]{1,3}")
_PART = r"(?:[^\W\d]\w*|<(?:locals|lambda|genexpr|listcomp|setcomp|dictcomp|module)>)"
_NAME = re.compile(rf"{_PART}(?:\.{_PART})*")
_LONGEST_NAME = 256


def _is_name(name: object) -> bool:
    """Whether Python calls a function so in `__qualname__`, and it is short enough to travel."""
    return isinstance(name, str) and len(name) <= _LONGEST_NAME and bool(_NAME.fullmatch(name))


def code_python() -> str:
    """Version of Python whose functions this process can make and read, such as `3.11`."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


@dataclass(frozen=True, eq=False)
class FunctionCode:
    """A function as bytes of cloudpickle; they are code, and only a worker reads them."""

    data: bytes = field(repr=False)
    name: str = ""
    """What the function is called, for messages."""
    python: str | None = None
    """Version of Python that made the bytes; vllm-lens does not say."""

    @cached_property
    def sha256(self) -> str:
        """Hash of the bytes, as lower-case hex."""
        return hashlib.sha256(self.data).hexdigest()

    def __deepcopy__(self, memo: object) -> FunctionCode:
        """Immutable, so a deep copy (Inspect and vLLM make many) is the same object."""
        return self

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionCode:
        """Make the bytes of a function, with the module that defines it unless it is installed.

        Raises:
            SpecError: cloudpickle is missing, or the function holds what cannot be pickled.
        """
        name = getattr(function, "__qualname__", type(function).__qualname__)
        try:
            # Writing only: the client's own function, which runs nothing here.
            import cloudpickle  # type: ignore[import-untyped,unused-ignore]  # noqa: TID251
        except ImportError:
            raise SpecError(
                "hooks travel as bytes of cloudpickle, which is not installed here; install it"
            ) from None
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        if module is not None and not _is_own(module):
            module = None
        if module is not None and module.__name__ in cloudpickle.list_registry_pickle_by_value():
            module = None
        if module is not None:
            cloudpickle.register_pickle_by_value(module)
        try:
            data = cast("bytes", cloudpickle.dumps(function))
        except Exception as error:
            raise SpecError(
                f"hooks: {name} cannot be pickled ({type(error).__name__}: {error}); let it refer "
                "to plain values, tensors and modules that the server has"
            ) from error
        finally:
            if module is not None:
                cloudpickle.unregister_pickle_by_value(module)
        return cls(data, name if _is_name(name) else "", code_python())

    def wire(self) -> dict[str, str]:
        """JSON form of the function; vllm-lens reads the field `cloudpickle`."""
        form = {"cloudpickle": base64.b64encode(self.data).decode("ascii")}
        return form | {k: v for k, v in (("name", self.name), ("python", self.python)) if v}


def _is_own(module: ModuleType) -> bool:
    """Whether a module is the user's own, and not of an installed package or of Python."""
    if module.__name__ == "__main__":
        return False  # cloudpickle takes it along anyway
    file = getattr(module, "__file__", None)
    if not file:
        # Made by hand, as notebooks do; Python's own without a file have a spec.
        return getattr(module, "__spec__", None) is None
    return not any(part in file for part in ("site-packages", "dist-packages", sys.base_prefix))


class Hook(WireModel):
    """A function that runs on the rows of a request at chosen layers, in each of its steps.

    `fn(ctx, h)` gets a context and the request's rows of this step, (tokens, hidden): the whole
    residual stream after the layer, or before it with `pre`. It returns None, or rows of the same
    shape that take their place. What it writes into `ctx.saved` comes back with the response.

    The function is run by the server, which has to be started with `INSPECT_LENS_ALLOW_CODE=1`.
    On several tensor-parallel ranks it runs on each and has to do the same everywhere.

    Source:
        The fields are those of vllm-lens 1.3.0.

    Example:
        ```python
        from inspect_lens import Hook


        def halve(ctx, h):  # (tokens, hidden); what it returns takes their place
            ctx.saved["layer"] = ctx.layer_idx
            return h / 2


        hook = Hook(fn=halve, layer_indices=[3])  # extra_args={"apply_hooks": [hook]}
        assert hook.layer_indices == (3,)
        ```
    """

    fn: InstanceOf[FunctionCode]
    """The function. Give a callable, or the form `{"cloudpickle": base64}`."""

    layer_indices: tuple[int, ...]
    """Layers it runs at, 0-based."""

    pre: Flag = False
    """Run on what goes into the layers instead of what comes out."""

    @field_validator("fn", mode="before")
    @classmethod
    def _fn(cls, value: Any) -> FunctionCode:
        if isinstance(value, FunctionCode):
            return value
        if isinstance(value, bytes | bytearray):
            return FunctionCode(bytes(value))
        if isinstance(value, Mapping):
            return _from_wire(cast("Mapping[str, Any]", value))
        if callable(value):
            return FunctionCode.of(value)
        raise ValueError(
            f'is {type(value).__name__}; give a function, or {{"cloudpickle": base64}}'
        )

    @field_validator("layer_indices", mode="before")
    @classmethod
    def _layers(cls, value: Any) -> Any:
        return layer_numbers(value)

    @field_serializer("fn")
    def _dump_fn(self, value: FunctionCode) -> dict[str, str]:
        return value.wire()

    @model_serializer(mode="wrap")
    def _dump(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        return handler(self) if is_wire(info) else self.reference()

    def reference(self) -> dict[str, Any]:
        """The short form for logs: everything but the code, which its hash stands for."""
        return {
            "$lens": HOOK_REFERENCE,
            "name": self.fn.name,
            "sha256": self.fn.sha256,
            "layer_indices": list(self.layer_indices),
            "pre": self.pre,
        }

    @property
    def content(self) -> str:
        """Names code, layers and side."""
        return f"{self.fn.sha256}:{self.layer_indices}:{self.pre}"


def _from_wire(value: Mapping[str, Any]) -> FunctionCode:
    if value.get("$lens") == HOOK_REFERENCE or "cloudpickle" not in value:
        raise ValueError(
            f'has the keys {shown(sorted(map(str, value)))}; wanted is {{"cloudpickle": base64}}'
        )
    if unknown := sorted(map(str, set(value) - {"cloudpickle", "name", "python"})):
        raise ValueError(f"has the unknown keys {shown(unknown)}")
    try:
        data = base64.b64decode(value["cloudpickle"], validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise ValueError(f"cloudpickle is not base64 ({error})") from None
    python = value.get("python")
    if python is not None and not (isinstance(python, str) and _PYTHON.fullmatch(python)):
        raise ValueError(f"python={shown(python)}; allowed is a version such as '3.12'")
    name = value.get("name")
    if name not in (None, "") and not _is_name(name):
        raise SpecError(
            f"name={shown(name)}; allowed is a function's name in Python, as in module.function, "
            f"of at most {_LONGEST_NAME} characters; leave it out"
        )
    return FunctionCode(data, name or "", python)


def parse_hooks(value: Any, *, where: str = "apply_hooks") -> tuple[Hook, ...]:
    """Read hooks as users and clients spell them."""
    return tuple(_one(item, f"{where}[{i}]") for i, item in enumerate(several(value)))


def _one(value: Any, where: str) -> Hook:
    if isinstance(value, Hook):
        return value
    if isinstance(value, Mapping) and value.get("$lens") == HOOK_REFERENCE:
        raise SpecError(
            f"{where}: is a hook as a log holds it, by its hash; a log does not keep code. Give "
            "the function again"
        )
    if not isinstance(value, Mapping):
        names = ("fn", "layer_indices", "pre")
        if not all(hasattr(value, name) for name in names):
            raise SpecError(f"{where}: {type(value).__name__}; give a Hook or its JSON form")
        value = {name: getattr(value, name) for name in names}
    return read_as(Hook, value, at=where)


class HookReceipt(Value):
    """Part of the receipt about hooks: which ran, at which layers, on how many tokens."""

    functions: tuple[str, ...]
    """sha256 of the code of each hook of the request, in order."""
    persistent: tuple[str, ...] = ()
    """sha256 of each persistent hook that ran on the request, in order; these ran first."""
    layers: tuple[int, ...]
    """Layers at which any of them ran, ascending."""
    n_tokens: int
    """Tokens that the hooks were shown, from position 0. An engine that schedules ahead may run
    a token past the end of the completion, and hooks see it too."""
    n_edited: int
    """Calls that gave rows back."""
