"""Probes on the Hugging Face hub."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, Final

from inspect_lens.errors import ArtifactError

from ._files import CARD_FILE, PROBE_FILE

__all__ = ["fetch_probe"]

_ADDRESS: Final = re.compile(
    r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<folder>[\w./-]+?))?/?(?:@(?P<revision>[\w./-]+))?"
)


def fetch_probe(address: str) -> Path:
    """Download the files of a probe.

    Args:
        address: `hf://owner/repository[/folder][@revision]`.

    Returns:
        The folder in the hub's cache.

    Raises:
        ArtifactError: the address is wrong, huggingface_hub is not installed, or the files
            cannot be had.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ArtifactError(
            f"probe={address!r}; allowed is hf://owner/repository, then /folder and @revision if "
            "they are needed; correct the address"
        )
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ArtifactError(
            f"probe={address!r}: needs the package huggingface_hub; install it, or download the "
            "folder and pass its path"
        ) from None
    folder = f"{match['folder']}/" if match["folder"] else ""
    try:
        files = [
            hub.hf_hub_download(match["repo"], folder + name, revision=match["revision"])
            for name in (PROBE_FILE, CARD_FILE)
        ]
    except Exception as error:  # noqa: BLE001 (the hub raises errors of many packages)
        raise ArtifactError(
            f"probe={address!r}: could not be downloaded ({type(error).__name__}: {error}); needed "
            f"are {folder}{PROBE_FILE} and {folder}{CARD_FILE} in that repository; check the "
            "address and your access to it"
        ) from None
    return Path(files[0]).parent
