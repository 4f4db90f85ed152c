"""Finding an oracle: an adapter folder with its `ao_config.json`."""

from __future__ import annotations

import hashlib
import importlib
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from inspect_lens._shipped import shipped_root
from inspect_lens._untrusted import parse_json, read_regular
from inspect_lens.errors import ArtifactError

from ._config import CONFIG_FILE, OracleConfig, read_config

__all__ = ["Oracle", "load_oracle"]

WEIGHTS: Final = "adapter_model.safetensors"
ADAPTER: Final = "adapter_config.json"
_ADDRESS: Final = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """An activation oracle: a LoRA adapter of the model that it is asked about."""

    name: str
    """As it was asked for."""
    config: OracleConfig
    """The format that it was trained with."""
    path: Path
    """Folder of the adapter, which the server has to be able to read."""
    sha256: str
    """Of the adapter's weights."""
    base_model: str
    """The model it was trained on, by the name that its `adapter_config.json` has."""
    served_as: str | None = None
    """Name under which the server has it already; None loads it from `path`."""

    @property
    def adapter(self) -> str:
        """Name of the adapter on the server: tells other weights apart, also of the same name."""
        return self.served_as or f"{self.path.name}-{self.sha256[:8]}"

    @property
    def lora_request(self) -> dict[str, Any]:
        """`lora=` of `lens_config`: the server loads the adapter once, beside the base model."""
        request: dict[str, Any] = {"lora_name": self.adapter, "lora_int_id": 1}
        if self.served_as is None:
            request["lora_path"] = str(self.path.resolve())
        return request


def load_oracle(oracle: str | Path | Oracle, *, served_as: str | None = None) -> Oracle:
    """Load an oracle by name, by path or from the Hugging Face hub.

    A path that exists wins. Else it is a name below `oracles/` of the working directory or a
    folder above it, or of the source tree that this package was installed from.

    Args:
        oracle: a folder, a name such as `organism`, `hf://owner/repository[@revision]`, or an
            oracle, which is returned.
        served_as: name under which the server has the adapter already; needed where the server
            cannot read the folder.

    Returns:
        The oracle; its format was read and judged.

    Raises:
        ArtifactError: nothing is found, or its files are wrong.

    Example:
        ```python
        from inspect_lens.oracle import load_oracle

        oracle = load_oracle("organism")
        assert oracle.config.special_token == " ?"
        assert (4,) in oracle.config.act_layer_combinations
        ```
    """
    if isinstance(oracle, Oracle):
        return oracle if served_as is None else replace(oracle, served_as=served_as)
    if not isinstance(oracle, str | Path):
        raise ArtifactError(
            f"oracle={oracle!r}: a {type(oracle).__name__}; allowed are a name, a path, an hf:// "
            "address or an Oracle"
        )
    folder = _fetch(str(oracle)) if str(oracle).startswith("hf://") else _find(Path(oracle))
    weights, adapter = folder / WEIGHTS, _read_adapter(folder / ADAPTER)
    if not weights.is_file():
        raise ArtifactError(f"{weights}: is missing; an oracle is a folder as PEFT saves it")
    return Oracle(
        name=str(oracle),
        config=read_config(folder),
        path=folder,
        sha256=_digest(weights, weights.stat().st_mtime_ns, weights.stat().st_size),
        base_model=str(adapter.get("base_model_name_or_path") or ""),
        served_as=served_as,
    )


def _find(path: Path) -> Path:
    path = path.expanduser()
    if (path / CONFIG_FILE).is_file() or path.is_absolute():
        return path
    here, root = Path.cwd(), shipped_root()
    shipped = [] if root is None else [root]
    roots = [p / "oracles" for p in (here, *here.parents, *shipped)]
    # A task is loaded in its own folder, so a path may also start at a folder above.
    above = list(here.parents) if len(path.parts) > 1 else []
    for root in (*roots, *above, *shipped):
        if ".." not in path.parts and (root / path / CONFIG_FILE).is_file():
            return root / path
    known = sorted({c.parent.name for r in roots if r.is_dir() for c in r.glob(f"*/{CONFIG_FILE}")})
    raise ArtifactError(
        f"oracle={str(path)!r} was not found; allowed are a folder with {CONFIG_FILE}, an hf:// "
        f"address, or a name below oracles/ (there: {', '.join(known) or 'none'})"
    )


def _read_adapter(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path}: could not be read ({type(error).__name__}: {error}); an oracle is a folder "
            "as PEFT saves it"
        ) from None
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        raise ArtifactError(f"{path}: is not the configuration of a LoRA adapter")
    return values


@cache
def _digest(path: Path, changed_ns: int, size: int) -> str:
    """Hash of a file, computed once as long as its time and size stay."""
    del changed_ns, size
    return hashlib.sha256(read_regular(path)).hexdigest()


def _fetch(address: str) -> Path:
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise ArtifactError(
            f"oracle={address!r}; allowed is hf://owner/repository, then @revision if it is needed"
        )
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ArtifactError(
            f"oracle={address!r}: needs the package huggingface_hub; install it, or download the "
            "folder and pass its path"
        ) from None
    try:
        files = [
            hub.hf_hub_download(match["repo"], name, revision=match["revision"])
            for name in (CONFIG_FILE, ADAPTER, WEIGHTS)
        ]
    except Exception as error:  # noqa: BLE001 (the hub raises errors of many packages)
        raise ArtifactError(
            f"oracle={address!r}: could not be downloaded ({type(error).__name__}: {error}); "
            f"needed are {CONFIG_FILE}, {ADAPTER} and {WEIGHTS} in that repository"
        ) from None
    return Path(files[0]).parent
