"""A script: start an engine, answer plain prompts greedily, print what came out as JSON.

`python -m tests.kit.answer_plain FOLDER [--capture] [--option NAME=JSON ...]`; run in a process of
its own, so that the environment decides whether the lens is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    from tests.engine.conftest import start, tokens

    parser = argparse.ArgumentParser(prog="python -m tests.kit.answer_plain")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--capture", action="store_true")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON")
    given = parser.parse_args()
    # A small part of a GPU: other engines may run on it.
    options: dict[str, Any] = {"gpu_memory_utilization": 0.2}
    for word in given.option:
        name, _, value = word.partition("=")
        options[name] = json.loads(value)
    engine = start(given.folder, **options)
    try:
        outputs = engine.run([tokens(n, seed=n) for n in (5, 70, 130)], logprobs=3, max_tokens=32)
        answers = [
            {
                "token_ids": list(o.outputs[0].token_ids),
                "logprobs": [
                    {str(k): v.logprob for k, v in step.items()} for step in o.outputs[0].logprobs
                ],
            }
            for o in outputs
        ]
        captured = None
        if given.capture:
            output = engine.run([tokens(20)], {"output_residual_stream": True})[0]
            rows = output.activations["residual_stream"]
            captured = bool((rows.abs().sum(dim=-1) > 0).all())
    finally:
        engine.close()
    sys.stdout.write("\n" + json.dumps({"answers": answers, "captured": captured}) + "\n")


if __name__ == "__main__":
    main()
