"""Pictures of the documentation: used by a page, and as dark as their names."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageStat

from tests.kit.blocks import pages
from tests.kit.repository import ROOT

ASSETS = ROOT / "docs/assets"


def luminance(path: Path) -> float:
    return float(ImageStat.Stat(Image.open(path).convert("L")).mean[0])


def test_a_dark_picture_is_dark_and_others_are_light() -> None:
    for path in sorted(ASSETS.glob("*.png")):
        is_right = (luminance(path) < 90) if "dark" in path.stem else (luminance(path) > 180)
        assert is_right, path.name


def test_every_picture_is_used() -> None:
    sources = [ROOT / page for page in pages()] + [ROOT / "mkdocs.yml"]
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    for path in sorted(ASSETS.iterdir()):
        if path.suffix == ".json":  # what a screenshot shows
            assert path.with_suffix(".png").exists(), path.name
        else:
            assert path.name in text, path.name
