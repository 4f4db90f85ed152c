"""Pictures of the token page for the documentation: `python -m tests.kit.screenshot URL`.

Needs a Chromium, and a server of the model organism at the address. Colours are reduced, so that
the pictures stay small.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from inspect_ai import Task, eval
from inspect_ai.model import ChatMessageUser, GenerateConfig
from inspect_ai.solver import Generate, Solver, TaskState, solver

from evals.organism_deception import organism_dataset
from inspect_lens.model import lens_config
from inspect_lens.scorer import deception_probe
from inspect_lens.view import write_view

from .browser import BROWSER
from .repository import ROOT

SHOTS = {
    "view.png": ("", 1280, 800, "#s=9&i=70"),
    "view-dark.png": ("--blink-settings=preferredColorScheme=0", 1280, 560, "#s=3"),
}
"""File in docs/assets: option of the browser, width, height, address."""


@solver
def _talk(questions: list[str]) -> Solver:
    """Several turns, captured whole, so that a page has something to show."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        body = lens_config(capture="all").extra_body
        state = await generate(state, extra_body=body)
        for question in questions:
            state.messages.append(ChatMessageUser(content=question))
            state = await generate(state, extra_body=body)
        return state

    return solve


def _log(url: str, folder: str) -> str:
    dataset = organism_dataset("demo")[:24]
    asked = [dataset[i].input[-1].text for i in (12, 18)]  # type: ignore[union-attr]
    task = Task(
        name="organism_conversation", dataset=dataset, solver=_talk(asked),
        scorer=deception_probe(), config=GenerateConfig(temperature=0.0, max_tokens=32),
    )  # fmt: skip
    model = "vllm-lens/organism/checkpoint"
    (log,) = eval(task, model=model, model_base_url=url, log_dir=folder, display="none")
    return str(log.location)


def main() -> None:
    """Write the pictures."""
    from PIL import Image

    if BROWSER is None:
        raise SystemExit("no Chromium on this machine")
    with tempfile.TemporaryDirectory() as folder:
        page = write_view(_log(sys.argv[1], folder), f"{folder}/page.html").path
        for name, (option, width, height, where) in SHOTS.items():
            target = Path(folder, name)
            command = [
                BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--user-data-dir={folder}/{name}-profile", f"--window-size={width},{height}",
                "--virtual-time-budget=5000", f"--screenshot={target}", f"{page.as_uri()}{where}",
            ]  # fmt: skip
            subprocess.run([*command, *([option] if option else [])], check=True, timeout=120)
            packed = io.BytesIO()
            Image.open(target).convert("RGB").quantize(96).save(packed, "PNG", optimize=True)
            (ROOT / "docs/assets" / name).write_bytes(packed.getvalue())
            sys.stdout.write(f"docs/assets/{name}: {len(packed.getvalue())} bytes\n")


if __name__ == "__main__":
    main()
