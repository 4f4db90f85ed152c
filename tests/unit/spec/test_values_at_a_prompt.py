"""Fields in the help of a value: at a prompt, whatever the class was made from."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest
from pydantic import create_model

from inspect_lens.spec import CaptureSpec
from inspect_lens.spec._values import Value

_MINE = '''
from inspect_lens.spec import CaptureSpec
from inspect_lens.spec._values import Value

class Mine(Value):
    """Doc."""

    a: int = 0
    """The first."""

class Capture(CaptureSpec):
    """A capture."""
'''


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)


def test_a_class_that_was_typed_has_the_lines_of_those_above_it() -> None:
    typed: dict[str, object] = {"__name__": "__main__"}
    exec(_MINE, typed)
    assert typed["Mine"].__doc__ == "Doc."
    assert "phase: Keep only those" in str(typed["Capture"].__doc__)


def test_a_class_that_a_function_made_is_one() -> None:
    made = create_model("Made", __base__=Value, __doc__="Doc.", a=(int, 0))
    assert made(a=1).model_dump() == {"a": 1}
    above = create_model("Above", __base__=CaptureSpec, __doc__="Doc.")
    assert "Attributes:" in str(above.__doc__)


@pytest.mark.parametrize("kind", ["zip", "gone", "latin"])
def test_a_source_that_cannot_be_read_says_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"mine_{kind}"
    file = tmp_path / f"{name}.py"
    file.write_text(f"# coding: latin-1\n# \u00e9\n{_MINE}", encoding="latin-1")
    if kind == "zip":
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            archive.write(file, file.name)
        monkeypatch.syspath_prepend(str(tmp_path / "a.zip"))
        module = __import__(name)
    else:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        code = compile(file.read_bytes(), str(file), "exec")
        if kind == "gone":
            file.unlink()
        exec(code, vars(module))
    assert module.Mine.__doc__ == "Doc."
    assert module.Mine(a=2).a == 2
