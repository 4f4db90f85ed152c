"""Finding an oracle: an adapter folder with its `ao_config.json`."""

from __future__ import annotations

import hashlib
import logging
import re
import string
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, field_validator

from inspect_lens._base.artifact import check_given, download, folders_named
from inspect_lens._base.shipped import organism_advice, shipped_root
from inspect_lens._base.untrusted import parse_json, parsing, read_regular
from inspect_lens.errors import ArtifactError
from inspect_lens.spec import explain

__all__ = ["Oracle", "OracleConfig", "load_oracle"]

logger = logging.getLogger(__name__)

CONFIG_FILE: Final = "ao_config.json"
REPEAT: Final = "{special_token} * {num_positions}"
"""How the published templates say that the placeholder stands once per position."""

_TRAINING: Final = re.compile(
    r"(chat_regularization|eval|gradient|hf|lora|max|monitor|save|train|validation|wandb)_\w+"
    r"|created_at_utc|dataset_configs|dataset_folder|dataset_loader_names|generation_kwargs"
    r"|git_commit|layer_combinations|layer_percents|load_lora_path|lr|model_name|num_epochs"
    r"|schema_version|seed|use_decoder_vectors|use_lora|window_mult"
)
"""Fields of published files that say how an oracle was trained, and nothing of how to ask it."""


Layers = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]


class OracleConfig(BaseModel):
    """Prompt format of an oracle, and the layers it was trained on.

    Source:
        arXiv:2512.15674 and its published adapters.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    hook_onto_layer: int = Field(
        ge=0,
        description="Block after which vectors are put in, 0-based; 1 in the published oracles.",
    )
    special_token: str = Field(
        min_length=1,
        description='Text that has to be one token, and is repeated once per vector; `" ?"` as '
        "published.",
    )
    prefix_template: str = Field(
        description="What stands before the question, once per layer: with `{layer}`, and "
        "`{special_token} * {num_positions}` where the placeholders go."
    )
    steering_coefficient: float = Field(
        description="Length of the added vector, in lengths of the stream that it is added to."
    )
    act_layer_combinations: tuple[Layers, ...] = Field(
        min_length=1,
        description="Sets of layers whose activations the oracle learned to read; each set is one "
        "prompt.",
    )

    @field_validator("act_layer_combinations", mode="before")
    @classmethod
    def _tuples(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(tuple(v) if isinstance(v, list) else v for v in value)
        return value

    @field_validator("prefix_template")
    @classmethod
    def _check_template(cls, value: str) -> str:
        for part in ("{layer}", REPEAT):
            if value.count(part) != 1:
                raise ValueError(f"has {part!r} {value.count(part)} times; needed is once")
        try:
            names = {n for _, n, _, _ in string.Formatter().parse(value) if n is not None}
        except ValueError as error:
            raise ValueError(f"is no template ({error})") from None
        if other := sorted(names - {"layer", "special_token", "num_positions"}):
            raise ValueError(f"names {other}, which nobody fills in")
        return value

    @field_validator("act_layer_combinations")
    @classmethod
    def _check_combinations(cls, value: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        if any(len(set(combination)) < len(combination) for combination in value):
            raise ValueError("names a layer twice in one set")
        return value

    def prefix(self, layers: tuple[int, ...], count: int) -> str:
        """Text in front of the question in an oracle's prompt.

        Args:
            layers: whose activations are shown; each has its own block of the prefix.
            count: vectors per layer.
        """
        # Published files hold a backslash and an n where the prompt has a line feed.
        template = self.prefix_template.replace("\\n", "\n")
        template = template.replace(REPEAT, self.special_token * count)
        return "".join(template.replace("{layer}", str(layer)) for layer in layers)


def read_config(folder: str | Path) -> OracleConfig:
    """Read and check the `ao_config.json` of an oracle; missing fields raise an error."""
    path = Path(folder)
    path = path if path.name == CONFIG_FILE else path / CONFIG_FILE
    fields = ", ".join(OracleConfig.model_fields)
    needed = f"an oracle needs it beside its adapter, with {fields}"
    with parsing(path, "the configuration of an oracle", needed, unread=needed):
        values: Any = parse_json(read_regular(path))
    if not isinstance(values, dict):
        raise ArtifactError(f"{path}: holds a {type(values).__name__}; wanted is a JSON object")
    try:
        config = OracleConfig.model_validate(values)
    except ValidationError as error:
        raise ArtifactError(
            f"{path}: {explain(error, kind=OracleConfig)}; give what the oracle was trained with"
        ) from None
    extra = sorted(values.keys() - OracleConfig.model_fields.keys())
    unknown = [name for name in extra if not _TRAINING.fullmatch(name)]
    if unknown:
        logger.warning(
            "%s: unknown fields %s; they change nothing here. If one of them changes how the "
            "oracle is to be asked, its answers will be wrong",
            path, ", ".join(unknown),
        )  # fmt: skip
    return config


WEIGHTS: Final = "adapter_model.safetensors"
ADAPTER: Final = "adapter_config.json"


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
    check_given("oracle", oracle)
    if str(oracle).startswith("hf://"):
        folder = download("oracle", str(oracle), (CONFIG_FILE, ADAPTER, WEIGHTS))
    else:
        folder = _find(Path(oracle))
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
    roots, root = folders_named("oracles"), shipped_root()
    shipped = [] if root is None else [root]
    # A task is loaded in its own folder, so a path may also start at a folder above.
    above = list(Path.cwd().parents) if len(path.parts) > 1 else []
    for root in (*roots, *above, *shipped):
        if ".." not in path.parts and (root / path / CONFIG_FILE).is_file():
            return root / path
    known = sorted({c.parent.name for r in roots for c in r.glob(f"*/{CONFIG_FILE}")})
    if advice := organism_advice(str(path)):
        raise ArtifactError(f"oracle: {advice}")
    raise ArtifactError(
        f"oracle={str(path)!r} was not found; allowed are a folder with {CONFIG_FILE}, an hf:// "
        f"address, or a name below oracles/ (there: {', '.join(known) or 'none'})"
    )


def _read_adapter(path: Path) -> dict[str, Any]:
    saved = "an oracle is a folder as PEFT saves it"
    with parsing(path, "the configuration of a LoRA adapter", saved, unread=saved):
        values = parse_json(read_regular(path))
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        raise ArtifactError(f"{path}: is not the configuration of a LoRA adapter")
    return values


@cache
def _digest(path: Path, changed_ns: int, size: int) -> str:
    """Hash of a file, computed once as long as its time and size stay."""
    del changed_ns, size
    return hashlib.sha256(read_regular(path)).hexdigest()
