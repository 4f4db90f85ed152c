"""Every place where a loop of many requests enters our code is guarded."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.kit.repository import ROOT

SOURCE = ROOT / "src" / "inspect_lens"
INSIDE = (
    "_engine.collect.collector:Notifier.tell",
    "_engine.hooks.runner:HookRunner.run",
    "_vllm.compat.features:guarded",
    "_vllm.compat.features:idle.run",
    "_vllm.engine_core:GuardedConnector._marked",
    "_vllm.engine_core:_faults_logged",
    "_vllm.engine_core:_within",
    "_vllm.engine_core:_with_room",
    "_vllm.results.attach:faults_told",
    "_vllm.frontend.wrappers:carry_now",
    "_vllm.http.bodies:LensBodies.__call__",
    "_vllm.http.bodies:LensBodies._serve",
    "_vllm.http.bodies:Answer._send_whole",
    "_vllm.worker.runners:_Runner._ask",
    "_vllm.worker.runners:_Runner._prepared",
    "_vllm.worker.runners:_Runner._run",
    "_vllm.worker.runners:LayerHooks._after",
    "_vllm.worker.runners:LayerHooks._before",
)
"""What is entered by way of others, and guarded for them; and what guards them."""
GUARDS = {"guarded", "contained", "_faults_logged", "self._ask", "self._prepared", "self._run"}
"""Names of the shared ones."""

FINE = {
    "_vllm.cache_salt:_block_keys.generate_block_hash_extra_keys": "matches a string; a block "
    "without its key would be found by other requests",
    "_vllm.worker.worker:wrap_load_model.load_model": "start: refuses what it cannot serve",
    "_vllm.worker.worker:add_tap.before": "traced by the compiler, which takes no handler",
    "_vllm.worker.worker:add_tap.after": "as above",
    "_vllm.compat.fused_norms:undo_fusion.drop": "as above",
    "_vllm.compat.fused_norms:undo_fusion.begin": "as above",
    "_vllm.compat.fused_norms:undo_fusion.complete": "as above",
    "_vllm.worker.runners:_forward_context.create_forward_context": "sets one attribute",
    "_vllm.worker.runners:_dispatch_v1.determine": "sets one argument",
    "_vllm.worker.runners:_dispatch_v2.dispatch": "asks `_Runner._ask`, which is guarded",
    "_vllm.frontend.wrappers:_input_processor_init.init": "start",
    "_vllm.engine_core:_schedule.schedule": "chooses one of two that are guarded",
    "_vllm.engine_core:_scheduler_init.init": "start",
    "_vllm.engine_core:GuardedConnector.update_state_after_alloc": "looks in a set",
    "_vllm.engine_core:GuardedConnector.build_connector_meta": "a fault ends the "
    "engine: else steered blocks were stored as those of others",
    "_vllm.engine_core:GuardedConnector.request_finished": "calls `_marked`",
    "_vllm.engine_core:GuardedConnector.request_finished_all_groups": "as above",
    "_vllm.engine_core:GuardedConnector.register_finished_partial_tail": "looks in a set",
    "_vllm.frontend.wrappers:_run_engine.run_engine": "a call of the user's own process",
    "_vllm.frontend.wrappers:_beam_search.beam_search": "a call of the user's own process",
    "_vllm.frontend.state:_call_utility.call_utility": "a call of the operator's own",
    "_vllm.frontend.state:_call_utility_async.call_utility": "as above",
    "_vllm.http.sweep_route:Sweeps._lines.end": "cancels futures, and forgets a key",
    "_vllm.worker.worker:refusal_here": "reads a field; vLLM tells its caller what it raises",
    "_vllm.worker.worker:stats": "reads numbers; vLLM tells its caller what it raises",
    "_vllm.worker.worker:exported_taps": "reads names, as above",
    "_vllm.results.attach:Running._end_if_gone": "looks up two tables and puts errors in queues",
    "_vllm.results.event_loop:Arrivals._tell": "called by `Notifier.tell`, which is guarded",
}
"""What is entered and needs no guard, with the reason."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def functions(path: Path) -> dict[str, ast.AST]:
    """Functions of a file by their path inside it."""
    found: dict[str, ast.AST] = {}

    def walk(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                name = f"{inside}.{child.name}" if inside else child.name
                if isinstance(child, FUNCTIONS):
                    found[name] = child
                walk(child, name)
            else:
                walk(child, inside)

    walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def entered(path: Path) -> Iterator[str]:
    """Functions of a file that are given to somebody else to call: by their path, or their name."""
    known = functions(path)
    module = module_of(path)
    for inside, node in [("", ast.parse(path.read_text(encoding="utf-8"))), *known.items()]:
        own = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == inside}
        for part in ast.walk(node):
            given: ast.expr | None = None
            if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Attribute):
                owner = ast.unparse(part.targets[0].value)
                if owner.rpartition(".")[2] in (
                    "runner",
                    "_runner",
                    "state",
                    "worker",
                    "detokenizer",
                    "connector",
                ):
                    given = part.value
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
                if part.func.attr in (
                    "register_forward_hook",
                    "register_forward_pre_hook",
                    "call_soon",
                    "call_soon_threadsafe",
                    "watch",
                ):
                    given = part.args[0]
                elif part.func.attr == "call_later":
                    given = part.args[1]
                elif part.func.attr == "Thread":
                    given = next(k.value for k in part.keywords if k.arg == "target")
            if isinstance(given, ast.Name) and given.id in own:
                yield f"{module}:{own[given.id]}"
            elif isinstance(given, ast.Attribute) and ast.unparse(given.value) == "self":
                methods = [n for n in known if n.count(".") == 1]
                yield from (f"{module}:{n}" for n in methods if n.endswith(f".{given.attr}"))


def wrappers() -> Iterator[str]:
    """What takes the place of a name of vLLM's."""
    for file in (
        *("frontend.wrappers", "frontend.state", "http.server"),
        *("cache_salt", "engine_core", "worker.runners", "worker.worker"),
    ):
        path = SOURCE / "_vllm" / f"{file.replace('.', '/')}.py"
        for name, node in functions(path).items():
            arguments = getattr(node, "args", None)
            if arguments is not None and [a.arg for a in arguments.args][:1] == ["original"]:
                inner = [n for n in functions(path) if n.startswith(f"{name}.")]
                assert inner, f"{file}:{name} makes nothing"
                yield f"_vllm.{file}:{inner[-1]}"


def worker_calls() -> Iterator[str]:
    """Methods that are added to vLLM's worker."""
    text = (SOURCE / "_vllm" / "plugin.py").read_text(encoding="utf-8")
    assert text.count("add_method(") == 5
    yield from ("_vllm.worker.worker:stats", "_vllm.worker.worker:register")
    yield from ("_vllm.worker.worker:exported_taps", "_vllm.worker.worker:manage_hooks")
    yield "_vllm.worker.worker:refusal_here"


def all_entered() -> set[str]:
    files = [*(SOURCE / "_vllm").rglob("*.py"), *(SOURCE / "_engine").rglob("*.py")]
    return {where for path in files for where in entered(path)} | {*wrappers(), *worker_calls()}


def test_what_is_entered_is_guarded() -> None:
    found = all_entered()
    assert len(found) > 30, "the search finds little"
    assert FINE.keys() <= found, "what is not entered any more"
    for where in sorted(found - FINE.keys()) + list(INSIDE):
        module, _, name = where.partition(":")
        node = functions(SOURCE / f"{module.replace('.', '/')}.py")[name]
        calls = {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
        caught = {
            ast.unparse(n.type)
            for n in ast.walk(node)
            if isinstance(n, ast.ExceptHandler) and n.type is not None
        }
        assert GUARDS & calls or "BaseException" in caught, f"{where} lets faults out"
