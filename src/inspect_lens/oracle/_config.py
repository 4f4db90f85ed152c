"""`ao_config.json`: the numbers of the format that an oracle was trained with."""

from __future__ import annotations

import logging
import re
import string
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from inspect_lens._untrusted import parse_json, read_regular
from inspect_lens.errors import ArtifactError

__all__ = ["CONFIG_FILE", "OracleConfig", "read_config"]

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


class OracleConfig(BaseModel):
    """Prompt format of an oracle, and the layers it was trained on.

    Source:
        arXiv:2512.15674 and its published adapters.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    hook_onto_layer: int
    """Block after which vectors are put in, 0-based; 1 in the published oracles."""
    special_token: str
    """Text that has to be one token, and is repeated once per vector; `" ?"` as published."""
    prefix_template: str
    """What stands before the question, once per layer: with `{layer}`, and
    `{special_token} * {num_positions}` where the placeholders go."""
    steering_coefficient: float
    """Length of the added vector, in lengths of the stream that it is added to."""
    act_layer_combinations: tuple[tuple[int, ...], ...]
    """Sets of layers whose activations the oracle learned to read; each set is one prompt."""

    @field_validator("steering_coefficient", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("act_layer_combinations", mode="before")
    @classmethod
    def _tuples(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(tuple(v) if isinstance(v, list) else v for v in value)
        return value

    @field_validator("hook_onto_layer")
    @classmethod
    def _check_layer(cls, value: int) -> int:
        if value < 0:
            raise ValueError("layers count from 0")
        return value

    @field_validator("special_token")
    @classmethod
    def _check_token(cls, value: str) -> str:
        if not value:
            raise ValueError("a placeholder is needed; it is empty")
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
        if not value or not all(value):
            raise ValueError("is empty, or holds an empty set of layers")
        if any(layer < 0 for combination in value for layer in combination):
            raise ValueError("holds a negative layer; layers count from 0")
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
    """Read and check the `ao_config.json` of an oracle; missing fields raise an error.

    Args:
        folder: of the adapter, or the file itself.

    Returns:
        The format.

    Raises:
        ArtifactError: the file is missing, is not JSON, lacks a field, or a field is wrong.

    Example:
        ```python
        from inspect_lens.oracle import read_config

        config = read_config("oracles/organism")
        assert config.hook_onto_layer == 1
        assert config.prefix((4,), 2).splitlines() == ["Layer: 4", " ? ? "]
        ```
    """
    path = Path(folder)
    path = path if path.name == CONFIG_FILE else path / CONFIG_FILE
    try:
        values: Any = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path}: could not be read ({type(error).__name__}: {error}); an oracle needs it "
            f"beside its adapter, with {', '.join(OracleConfig.model_fields)}"
        ) from None
    if not isinstance(values, dict):
        raise ArtifactError(f"{path}: holds a {type(values).__name__}; wanted is a JSON object")
    try:
        config = OracleConfig.model_validate(values)
    except ValidationError as error:
        raise ArtifactError(f"{path}: {_explain(error)}") from None
    extra = sorted(values.keys() - OracleConfig.model_fields.keys())
    unknown = [name for name in extra if not _TRAINING.fullmatch(name)]
    if unknown:
        logger.warning(
            "%s: unknown fields %s; they change nothing here. If one of them changes how the "
            "oracle is to be asked, its answers will be wrong",
            path, ", ".join(unknown),
        )  # fmt: skip
    return config


def _explain(error: ValidationError) -> str:
    parts = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"])
        if item["type"] == "missing":
            parts.append(f"{field} is missing; it is never guessed, take it from the training")
        else:
            reason = item["msg"].removeprefix("Value error, ")
            parts.append(f"{field}={item['input']!r}: {reason}")
    return "; ".join(parts)
