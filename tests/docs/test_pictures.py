"""Pictures of the documentation: used by a page, and as dark as their names."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image, ImageStat

from tests.kit.blocks import pages
from tests.kit.repository import ROOT

ASSETS = ROOT / "docs/assets"
SHOTS = sorted(ASSETS.glob("*.png"))


def luminance(path: Path) -> float:
    return float(ImageStat.Stat(Image.open(path).convert("L")).mean[0])


@pytest.mark.parametrize("path", SHOTS, ids=lambda path: path.name)
def test_a_dark_picture_is_dark_and_others_are_light(path: Path) -> None:
    assert (luminance(path) < 90) if "dark" in path.stem else (luminance(path) > 180)


@pytest.mark.parametrize("path", sorted(ASSETS.iterdir()), ids=lambda path: path.name)
def test_every_picture_is_used(path: Path) -> None:
    if path.suffix == ".json":  # what a screenshot shows
        assert path.with_suffix(".png").exists()
        return
    sources = [ROOT / page for page in pages()] + [ROOT / "mkdocs.yml"]
    assert any(path.name in source.read_text(encoding="utf-8") for source in sources)
