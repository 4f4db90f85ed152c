"""Arguments of public functions, judged by their annotations when they are given."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from types import FunctionType, NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin

from inspect_lens.errors import SpecError, did_you_mean
from inspect_lens.spec import check_word, plain_number, several, shown


def one_or_several(given: str | Iterable[str]) -> tuple[str, ...]:
    """The texts that were given: one alone is a text, and not a sequence of letters."""
    return (given,) if isinstance(given, str) else tuple(given)


def refuse_idle(function: Callable[..., Any], why: str, **given: Any) -> None:
    """Refuse arguments of a function that nothing reads, as they say something else than usual."""
    usual = inspect.signature(function).parameters
    idle = [f"{name}={shown(one)}" for name, one in given.items()
            if one is not usual[name].default and one != usual[name].default]  # fmt: skip
    if idle:
        raise SpecError(f"{', '.join(idle)}: no effect {why}; leave it out")


def warn_caller(text: str, kind: type[Warning] = UserWarning) -> None:
    """Warn at the line that called this package, however deep in it this is found."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_globals.get("__name__", "").startswith("inspect_lens."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, kind, stacklevel=level)


F = TypeVar("F", bound=Callable[..., Any])

_WORDS: Final[Mapping[Any, tuple[str, str]]] = {
    bool: ("true or false", "flags"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
    Path: ("a path", "paths"),
    NoneType: ("None", "None"),
}
"""What a user may give, and what a list has."""

_LEAST: Final = {
    "control_draws": 0, "controls": 0, "draws": 1, "early": 1, "latent": 0, "layer": 0, "layers": 0,
    "limit": 1, "max_tokens": 1, "max_turns": 1, "n_bins": 1, "n_layers": 1, "n_positions": 1,
    "per_task": 1, "repeat": 1, "seed": 0, "target": 0, "tries": 1, "window": 1,
}  # fmt: skip
"""Of integers, by the name that they have everywhere."""
_NEEDED: Final = frozenset({"layers"})
"""Lists that have to name something."""
_BY_PLACE: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def judged_arguments(function: F) -> F:
    """Refuse arguments of another kind than the annotation says, before they cost anything.

    Python would take "no" for true, and NaN for a threshold that nothing exceeds. Put this
    decorator on your own task, solver or scorer, and its arguments are judged as those of this
    package are: flags, numbers, texts, paths, words of a `Literal`, lists of these, and objects
    that Inspect makes. What else an annotation names is left to the function.

    Numbers of numpy and of torch become Python's, as do those that a command line has as texts;
    where several may be given, one alone or another iterable becomes a list.

    Args:
        function: what is to get judged arguments; it may be a coroutine function. `@task`,
            `@solver` and `@scorer` go above this decorator.

    Returns:
        The function with its name, docstring and signature. Called with an argument of another
            kind, it raises `SpecError`, which names the argument and what is allowed; so it does
            for an integer such as `layer`, `limit` or `seed` that is too small to mean anything,
            and, as a `TypeError` too, for an argument that it does not have.

    Example:
        ```python
        from typing import Literal

        from inspect_ai import Task, task

        from inspect_lens import errors, judged_arguments
        from inspect_lens.scorer import probe_score


        @task
        @judged_arguments
        def my_eval(layer: int | None = None, pool: Literal["mean", "max"] = "mean") -> Task:
            return Task(scorer=probe_score("organism/deception-lr", layer=layer, pool=pool))


        try:
            my_eval(pool="maximum")
        except errors.SpecError as error:
            assert "allowed are mean, max; did you mean 'max'?" in str(error)
        ```
    """
    parameters = inspect.signature(function).parameters
    names = [p.name for p in parameters.values() if p.kind in _BY_PLACE]

    @cache
    def members(name: str) -> tuple[Any, ...]:
        kind = parameters[name].annotation if name in parameters else Any
        try:
            kind = eval(kind, function.__globals__) if isinstance(kind, str) else kind
        except Exception:  # noqa: BLE001 - of a package that is imported later, or no annotation
            return ()
        found = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        found = tuple(NoneType if one is None else one for one in found)
        # Who gives a number for the name of a threshold is told by the function where numbers go.
        is_name = name == "threshold" and float not in found
        return found if all(map(_is_known, found)) and not is_name else ()

    def read(name: str, value: Any) -> Any:
        return judged_value(name, value, *kinds) if (kinds := members(name)) else value

    def call(args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        given = [read(name, value) for name, value in zip(names, args, strict=False)]
        options = {name: read(name, value) for name, value in options.items()}
        try:
            return function(*given, *args[len(given) :], **options)
        except TypeError:
            check_call(function, args, options)
            raise

    def now(*args: Any, **options: Any) -> Any:
        return call(args, options)

    async def later(*args: Any, **options: Any) -> Any:
        return await call(args, options)

    made: Any = later if inspect.iscoroutinefunction(function) else now
    # Inspect and Scout look annotations up in the globals of what they decorate.
    made = FunctionType(made.__code__, function.__globals__, None, None, made.__closure__)
    return cast("F", wraps(function)(made))


class ArgumentError(SpecError, TypeError):
    """A TypeError, as Python has it of such a call, that names the nearest argument."""


def check_call(
    function: Callable[..., Any], args: Sequence[Any], options: Iterable[str], *, flag: str = ""
) -> None:
    """Refuse a call with an argument that a function does not take, or without one it needs."""
    signature = inspect.signature(function)
    names = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    takes_any = len(names) < len(signature.parameters)
    names = [name for name in names if name not in ("self", "cls")]
    if unknown := [] if takes_any else [name for name in options if name not in names]:
        hint = did_you_mean(unknown[0], names) if names else "it takes no argument"
        said = f"takes no {flag}{unknown[0]}=…; {hint}"
    else:
        try:
            signature.bind(*args, **dict.fromkeys(options))
        except TypeError as error:
            said = f"{error}; it takes {', '.join(names) or 'no argument'}"
        else:
            return
    name = function.__qualname__.rpartition("<locals>.")[2].removesuffix(".__init__")
    raise ArgumentError(f"{name}: {said}")


def _is_known(kind: Any) -> bool:
    origin = get_origin(kind)
    if origin in (Sequence, list, tuple):
        of = {one for one in get_args(kind) if one is not Ellipsis}
        return len(of) == 1 and all(
            one in (int, float, str) or get_origin(one) is Literal for one in of
        )
    is_inspects = getattr(kind, "__module__", "").partition(".")[0] == "inspect_ai"
    # Python refuses to say whether something is an instance of a TypedDict.
    is_class = isinstance(kind, type) and dict not in kind.__mro__
    return kind in _WORDS or origin is Literal or (is_class and is_inspects)


class _Unfit(Exception):
    pass


def judged_value(name: str, value: Any, *members: Any) -> Any:
    """A value of one of these kinds."""
    value = plain_number(value)
    for kind in members:
        try:
            return _as(name, value, kind, is_text=str in members)
        except _Unfit:
            continue
    if get_origin(members[0]) is Literal and set(members[1:]) <= {NoneType}:
        check_word(name, value, members[0])
    *most, last = dict.fromkeys(_said(one, members) for one in members)
    allowed = f"{', '.join(most)} or {last}" if most else last
    if str in members and isinstance(value, list):
        allowed += "; a command line splits a text at its commas, and --task-config reads a file"
    raise SpecError(f"{name}={shown(value)}; allowed is {allowed}")


def _number(text: str, kind: type[int | float]) -> Any:
    """`-S layers=3,5` reaches us as ["3", "5"], and `-S noise=1e-3` as a text."""
    try:
        return kind(text)
    except ValueError:
        return text


def _as(name: str, value: Any, kind: Any, *, is_text: bool = False) -> Any:
    """A value as one kind has it."""
    origin = get_origin(kind)
    if origin is Literal:
        words = get_args(kind)
        if isinstance(value, bool) and value not in words:  # YAML has no text `off` and `no`
            bare = ("on", "yes") if value else ("off", "no")
            value = next((word for word in bare if word in words), value)
        fits = isinstance(value, str | int) and value in words
    elif origin is not None:
        return _list(name, value, kind)
    elif kind in (int, float):
        value = _number(value, kind) if isinstance(value, str) and not is_text else value
        fits = not isinstance(value, bool) and isinstance(value, int | kind)
        fits = fits and not (isinstance(value, float) and math.isnan(value))
        if fits and kind is int and value < (least := _LEAST.get(name, value)):
            raise SpecError(f"{name}={shown(value)}; allowed are integers of {least} or more")
    elif getattr(kind, "_is_protocol", False):
        fits = callable(value)
    else:
        fits = isinstance(value, kind)
    if not fits:
        raise _Unfit
    return value


def _list(name: str, value: Any, kind: Any) -> Any:
    of = get_args(kind)
    items = several(value)
    if not items and name in _NEEDED:
        raise SpecError(f"{name}=[]; allowed is a list that names at least one")
    if get_origin(kind) is tuple and Ellipsis not in of and len(of) != len(items):
        raise _Unfit
    if name not in _LEAST and {*map(type, items)} == {of[0]} == {int}:  # tokens may be 100,000
        return value if isinstance(value, tuple) else items
    found = [_as(name, plain_number(one), of[0]) for one in items]
    return tuple(found) if isinstance(value, tuple) else found


def _said(kind: Any, beside: tuple[Any, ...] = ()) -> str:
    origin, of = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(map(repr, of))
    if origin is not None:
        n = f"{len(of)} " if origin is tuple and Ellipsis not in of else ""
        other = "these" if of[0] in beside else _said(of[0])
        return f"a list of {n}{_WORDS[of[0]][1] if of[0] in _WORDS else other}"
    return _WORDS[kind][0] if kind in _WORDS else f"an Inspect {kind.__name__}"
