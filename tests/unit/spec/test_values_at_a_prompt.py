"""Fields in the help of a value: at a prompt, whatever the class was made from."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
_TYPED = f"""
import sys
sys.ps1 = ">>> "
from pydantic import create_model
typed = {{"__name__": "__main__"}}
exec({_MINE!r}, typed)
assert typed["Mine"].__doc__ == "Doc." and typed["Mine"](a=2).a == 2
assert "phase: Keep only those" in typed["Capture"].__doc__
made = create_model("Made", __base__=typed["Value"], __doc__="Doc.", a=(int, 0))
assert made(a=1).model_dump() == {{"a": 1}}
above = create_model("Above", __base__=typed["CaptureSpec"], __doc__="Doc.")
assert "Attributes:" in above.__doc__
"""
_READ = """
import importlib.util, os, sys
sys.ps1 = ">>> "
kind, file = sys.argv[1:]
if kind == "zip":
    sys.path.insert(0, "a.zip")
    import mine as module
else:
    spec = importlib.util.spec_from_file_location("mine", file)
    module = sys.modules["mine"] = importlib.util.module_from_spec(spec)
    code = compile(open(file, "rb").read(), file, "exec")
    if kind == "gone":
        os.unlink(file)
    exec(code, vars(module))
assert module.Mine.__doc__.startswith("Doc.") and module.Mine(a=2).a == 2
"""


def test_classes_without_a_file_have_the_lines_of_those_above_them() -> None:
    subprocess.run([sys.executable, "-c", _TYPED], check=True)


@pytest.mark.parametrize("kind", ["zip", "gone", "latin"])
def test_a_class_is_made_whatever_its_source_is(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    coding = "utf-8" if kind == "zip" else "latin-1"
    file.write_text(f"# coding: {coding}\n# \u00e9\n{_MINE}", encoding=coding)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(file, file.name)
    subprocess.run([sys.executable, "-c", _READ, kind, str(file)], check=True, cwd=tmp_path)
