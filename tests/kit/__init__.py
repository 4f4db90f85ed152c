"""Builders and checks that several tiers of tests share.

A script here reads the tree that it lies in, also in an environment that was made for another.
"""

import importlib.util
import os
import sys
from pathlib import Path


def _read_own_tree() -> None:
    """Put this tree first, for this process and its children, where another would be imported."""
    if "inspect_lens" in sys.modules:
        return
    root = Path(__file__).resolve().parents[2]
    found = importlib.util.find_spec("inspect_lens")
    if found is None or not Path(str(found.origin)).is_relative_to(root / "src"):
        own = [str(root / "src"), str(root)]
        sys.path[:0] = own
        paths = [*own, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)


_read_own_tree()
