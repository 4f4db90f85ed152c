"""What a decoder layer returns, read from its source: which pairs are a sum, and which are not.

Some of vLLM's layers return `(hidden, residual)` whose sum is the stream; others return the
whole stream beside a residual that nobody adds. The tensors look alike, so the code is asked.

The forward is run symbolically: a tensor is the set of terms that it is a sum of. A sum joins
sets, a norm with two arguments adds them and returns the sum as its second value, a view keeps
the set, and everything else is a new term. Of a returned pair the stream is the sum when the sets
are disjoint (`fused`), and `hidden` alone when it already holds every term of `residual`
(`stale`): adding those would count them twice.

What this cannot tell is `unknown`, and such pairs are refused: values that come out of loops,
`with` and `try`, comprehensions, tuples built elsewhere; sets that overlap in part; layouts that
differ between the paths of one forward. Whether a call changes a tensor in place is not seen.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Layout = Literal["fused", "plain", "pair_with_none", "stale", "unknown"]
Form = frozenset[str]
Value = Form | tuple["Value", ...] | None
"""A tensor as the terms of its sum, a tuple, or Python's None."""

_VIEWS = {"view", "reshape", "contiguous", "to", "flatten", "squeeze", "unsqueeze", "type_as"}
_MAX_PATHS = 256


def layout_of(layer: type) -> Layout:
    """Read what a layer's class returns."""
    forward = forward_of(layer)
    return "unknown" if forward is None else layout_of_forward(forward)


def forward_of(layer: type) -> ast.FunctionDef | None:
    """Syntax tree of a layer's forward, or None where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(layer.forward)))  # type: ignore[attr-defined]
        forward = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return forward if isinstance(forward, ast.FunctionDef) else None


def terms_of(
    forward: ast.FunctionDef, body: list[ast.stmt], values: list[ast.expr]
) -> list[Form] | None:
    """The terms of the sum of some values, on each path, behind a part of a forward."""
    arguments: dict[str, Value] = {a.arg: frozenset({f"<{a.arg}>"}) for a in forward.args.args}
    end = ast.Return(value=ast.Tuple(elts=values, ctx=ast.Load()))
    try:
        paths = list(itertools.islice(_run([*body, end], arguments), _MAX_PATHS))
    except _UnknownError:
        return None
    found = []
    for path in paths:
        assert isinstance(path, tuple)
        if not all(value is None or isinstance(value, frozenset) for value in path):
            return None
        terms = [value for value in path if isinstance(value, frozenset)]
        found.append(frozenset[str]().union(*terms))
    return found


def layout_of_forward(forward: ast.FunctionDef) -> Layout:
    arguments: dict[str, Value] = {a.arg: frozenset({f"<{a.arg}>"}) for a in forward.args.args}
    try:
        layouts = {
            _layout(value) for value in itertools.islice(_run(forward.body, arguments), _MAX_PATHS)
        }
    except _UnknownError:
        return "unknown"
    return layouts.pop() if len(layouts) == 1 else "unknown"


class _UnknownError(Exception):
    """The analysis cannot follow the code."""


@dataclass(frozen=True)
class _Returned:
    value: Value


def _layout(value: Value) -> Layout:
    if isinstance(value, frozenset):
        return "plain"
    if isinstance(value, tuple) and len(value) == 2:
        hidden, residual = value
        if isinstance(hidden, frozenset) and residual is None:
            return "pair_with_none"
        if isinstance(hidden, frozenset) and isinstance(residual, frozenset):
            if not hidden & residual:
                return "fused"
            if residual <= hidden:
                return "stale"
    return "unknown"


def _run(body: list[ast.stmt], names: dict[str, Value]) -> Iterator[Value]:
    """What a function returns, on each path through its branches."""
    for done in _paths(body, dict(names)):
        if not isinstance(done, _Returned):
            raise _UnknownError
        yield done.value


def _paths(body: list[ast.stmt], names: dict[str, Value]) -> Iterator[dict[str, Value] | _Returned]:
    if not body:
        yield names
        return
    first, rest = body[0], body[1:]
    if isinstance(first, ast.Return):
        if _may_be_a_pair(first.value, names):
            raise _UnknownError
        yield _Returned(None if first.value is None else _evaluate(first.value, names))
        return
    if isinstance(first, ast.Raise):
        return
    if isinstance(first, ast.If):
        for branch in _branches(first, names):
            for done in _paths(branch, dict(names)):
                yield from [done] if isinstance(done, _Returned) else _paths(rest, done)
        return
    _execute(first, names)
    yield from _paths(rest, names)


def _may_be_a_pair(value: ast.expr | None, names: dict[str, Value]) -> bool:
    """Whether what is returned comes from a method of the layer, or from what a variable holds."""
    function = value.func if isinstance(value, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr.startswith("_")
    return isinstance(function, ast.Name) and function.id in names


def _branches(node: ast.If, names: dict[str, Value]) -> list[list[ast.stmt]]:
    """The branches of an `if`; a test for None is decided where the value is known."""
    test = node.test
    if (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and isinstance(test.ops[0], ast.Is | ast.IsNot)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
        and test.left.id in names
        and not _is_argument(names[test.left.id])
    ):
        is_none = names[test.left.id] is None
        return [node.body if is_none == isinstance(test.ops[0], ast.Is) else node.orelse]
    return [node.body, node.orelse]


def _is_argument(value: Value) -> bool:
    return isinstance(value, frozenset) and len(value) == 1 and next(iter(value))[0] == "<"


def _execute(node: ast.stmt, names: dict[str, Value]) -> None:
    if isinstance(node, ast.Assign):
        value = _evaluate(node.value, names)
        for target in node.targets:
            _assign(target, value, names)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        _assign(node.target, _evaluate(node.value, names), names)
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        name = node.target.id
        added = _evaluate(node.value, names)
        is_sum = isinstance(node.op, ast.Add)
        names[name] = _sum(names.get(name), added) if is_sum else _new(node)
    elif isinstance(node, ast.For | ast.While | ast.Try | ast.With):
        raise _UnknownError


def _assign(target: ast.expr, value: Value, names: dict[str, Value]) -> None:
    if isinstance(target, ast.Name):
        names[target.id] = value
    elif isinstance(target, ast.Tuple):
        for i, part in enumerate(target.elts):
            is_pair = isinstance(value, tuple) and i < len(value)
            item = value[i] if is_pair and isinstance(value, tuple) else _new(target, i)
            _assign(part, item, names)


def _evaluate(node: ast.expr, names: dict[str, Value]) -> Value:
    if isinstance(node, ast.Name):
        return names.get(node.id, _new(node))
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.Tuple):
        return tuple(_evaluate(item, names) for item in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _sum(_evaluate(node.left, names), _evaluate(node.right, names))
    if isinstance(node, ast.IfExp):
        either = {_evaluate(node.body, names), _evaluate(node.orelse, names)}
        return either.pop() if len(either) == 1 else _new(node)
    if isinstance(node, ast.Call):
        return _call(node, names)
    return _new(node)


def _call(node: ast.Call, names: dict[str, Value]) -> Value:
    function = node.func
    if isinstance(function, ast.Attribute):
        if function.attr in _VIEWS:
            return _evaluate(function.value, names)
        is_norm = "norm" in function.attr.lower() or "ln" in function.attr.lower().split("_")
        arguments = [*node.args, *(k.value for k in node.keywords)]
        if is_norm and len(arguments) == 2:
            terms = [_evaluate(argument, names) for argument in arguments]
            return (_new(node), _sum(*terms))
    return _new(node)


def _sum(a: Value, b: Value) -> Value:
    if not isinstance(a, frozenset) or not isinstance(b, frozenset):
        raise _UnknownError
    return a | b


def _new(node: ast.AST, index: int = 0) -> Form:
    """A term that nothing else has: it is named by its place in the source."""
    line, column = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
    return frozenset({f"{line}:{column}:{index}"})
