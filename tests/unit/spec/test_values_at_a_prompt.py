"""Fields in the help of a value: at a prompt, whatever the class was made from."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

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
sys.path.insert(0, "a.zip")
for kind in ("zip", "gone", "latin"):
    if kind == "zip":
        module = importlib.import_module("of_zip")
    else:
        spec = importlib.util.spec_from_file_location(kind, f"{kind}.py")
        module = sys.modules[kind] = importlib.util.module_from_spec(spec)
        code = compile(open(f"{kind}.py", "rb").read(), f"{kind}.py", "exec")
        if kind == "gone":
            os.unlink("gone.py")
        exec(code, vars(module))
    assert module.Mine.__doc__.startswith("Doc.") and module.Mine(a=2).a == 2, kind
"""


def test_classes_without_a_file_have_the_lines_of_those_above_them() -> None:
    subprocess.run([sys.executable, "-c", _TYPED], check=True)


def test_a_class_is_made_whatever_its_source_is(tmp_path: Path) -> None:
    for kind, coding in (("of_zip", "utf-8"), ("gone", "latin-1"), ("latin", "latin-1")):
        text = f"# coding: {coding}\n# \u00e9\n{_MINE}"
        (tmp_path / f"{kind}.py").write_text(text, encoding=coding)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(tmp_path / "of_zip.py", "of_zip.py")
    subprocess.run([sys.executable, "-c", _READ], check=True, cwd=tmp_path)
