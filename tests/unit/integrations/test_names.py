"""Optional rooms: names that Inspect and its companions find, and errors without a package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from inspect_ai._util.registry import registry_create, registry_info, registry_lookup
from inspect_ai.tool import ToolDef

import inspect_lens._registry  # noqa: F401 - as the entry point does
from inspect_lens.agents._ask import choose_ask
from inspect_lens.agents._extras import require
from inspect_lens.errors import SpecError
from inspect_lens.model._host import PrerequisiteError
from tests.kit.repository import ROOT

PROBE = str(ROOT / "probes/organism/deception-lr")


@pytest.mark.parametrize(
    ("room", "package", "extra"),
    [
        ("petri", "inspect_petri", "petri"),
        ("control", "control_arena", "control"),
        ("sentinel", "inspect_sentinel", "sentinel"),
        ("scout", "inspect_scout", "scout"),
    ],
)
def test_without_the_package_the_error_names_the_extra(
    room: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else real(name, *a)
    )
    for name in [n for n in sys.modules if n.startswith(f"inspect_lens.agents.{room}")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(PrerequisiteError, match=rf"'{extra}' brings it: pip install"):
        importlib.import_module(f"inspect_lens.agents.{room}")


def test_require_is_silent_where_the_package_is_there() -> None:
    require("inspect_ai", module="x", extra="y")


@pytest.mark.parametrize(
    ("kind", "name", "params"),
    [
        ("tool", "read_probe", {"probe": PROBE}),
        ("tool", "steer_target", {}),
        ("agent", "lens_target_agent", {"capture": [1]}),
        ("approver", "eval_awareness_approver", {"probe": PROBE, "threshold": 0.5}),
        ("scanner", "probe_scanner", {"probe": PROBE}),
        ("scanner", "audit_probe_scanner", {"probe": PROBE}),
    ],
)
def test_inspect_makes_them_by_name(kind: Any, name: str, params: dict[str, Any]) -> None:
    made = registry_create(kind, f"inspect_lens/{name}", **params)
    assert callable(made)
    # What a log holds finds the same again.
    assert registry_info(made).name.startswith("inspect_lens/")


@pytest.mark.parametrize("name", ["probe_monitor", "oracle_monitor"])
def test_sentinel_finds_the_monitors(name: str) -> None:
    factory = registry_lookup("monitor", f"inspect_lens/{name}")
    info = registry_info(factory)
    assert info.metadata["version"] == 1
    assert info.metadata["portable"] is False


def test_control_arena_finds_the_monitors() -> None:
    from control_arena._control_agent import ControlAgent

    from inspect_lens.agents.control import probe_monitor_builder

    assert ControlAgent.get("probe_monitor") is probe_monitor_builder
    made = probe_monitor_builder(probe=PROBE, on_missing="skip")
    assert made.model_dump()["probe"] == PROBE


def test_tools_describe_themselves_to_the_auditor() -> None:
    from inspect_lens.agents.petri import ask_activation_oracle, read_probe, steer_target

    async def ask(acts: Any, question: str) -> str:
        return ""

    for made, wanted in (
        (read_probe(PROBE), {"message_id"}),
        (ask_activation_oracle(ask=ask), {"question", "message_id"}),
        (steer_target(), {"vector", "scale"}),
    ):
        definition = ToolDef(made)
        assert set(definition.parameters.properties) == wanted
        assert definition.description


def test_an_oracle_is_asked_through_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def OraclePlan(question: str, oracle: str, *, layers: int) -> Any:
        async def ask(about: Any, model: Any) -> list[Any]:
            answer = f"{oracle}: {about} at {layers}, {question}"
            return [SimpleNamespace(answer=answer, controls={"random": "nothing"})]

        return SimpleNamespace(oracle=f"loaded {oracle}", ask=ask)

    monkeypatch.setattr("inspect_lens.agents._ask.OraclePlan", OraclePlan)
    monkeypatch.setattr("inspect_lens.agents._ask.get_model", lambda **_: None)
    acts: Any = "acts"
    said = anyio.run(choose_ask(None, "name", layers=4), acts, "why?").text()
    assert said.startswith("loaded name: acts at 4, why?\n")
    assert "random: 'nothing'" in said


def test_exactly_one_of_oracle_and_function() -> None:
    async def ask(acts: Any, question: str) -> str:
        return ""

    for given in ((None, None), (ask, "name")):
        with pytest.raises(SpecError, match="give one of them"):
            choose_ask(*given)
