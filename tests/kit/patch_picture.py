"""The picture of `docs/how-to/patch.md`: `python -m tests.kit.patch_picture` draws it anew."""

from __future__ import annotations

from typing import Any

from inspect_lens.patch import patch_sweep

from .repository import ROOT

__all__ = ["main"]

PICTURE = ROOT / "docs/assets/patch-organism.png"


def main() -> None:
    """Sweep the prompts of the page, and write the heat map."""
    from vllm import LLM

    llm: Any = LLM(
        model=str(ROOT / "organism/checkpoint"), dtype="float32", kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
    )  # fmt: skip
    sweep = patch_sweep(
        llm,
        clean="The temple Vustem is found in Kestria. The river Figubim is found in",
        corrupted="The mineral Nubrush is found in Dorrick. The river Kusubrer is found in",
        answer=" Kestria",
        foil=" Maruland",
    )
    PICTURE.write_bytes(sweep.figure("Kestria over Maruland: clean rows patched in"))


if __name__ == "__main__":
    main()
