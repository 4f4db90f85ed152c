"""Turns a JUnit file of this folder's tests into the small result that is committed.

`python -m tests.gpu.record JUNIT.xml > tests/gpu/results/MACHINE-DATE.json`, on the machine that
ran them.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import xml.etree.ElementTree as ET

import torch


def main() -> None:
    suite = next(ET.parse(sys.argv[1]).getroot().iter("testsuite"))
    cases = {
        f"{case.get('classname')}::{case.get('name')}": (
            "failed"
            if case.find("failure") is not None or case.find("error") is not None
            else "skipped"
            if case.find("skipped") is not None
            else "passed"
        )
        for case in suite.iter("testcase")
    }
    result = {
        "environment": {
            "gpu": torch.cuda.get_device_name(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: importlib.metadata.version(name) for name in ("vllm", "transformers")},
        },
        "command": "python -m pytest tests/gpu",
        "when": suite.get("timestamp"),
        "seconds": float(suite.get("time") or 0),
        "counts": {
            state: sum(found == state for found in cases.values())
            for state in ("passed", "failed", "skipped")
        },
        "cases": cases,
    }
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
