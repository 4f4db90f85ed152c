"""Recipes: a YAML file that says how a published probe is made, from data sets to card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import FOLLOWED_FLOOR
from inspect_lens.spec import Positions

from ._jobs import train_job
from ._made import Made
from ._output import parse_layers
from ._stores import MEMORY


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SetRecipe(_Part):
    """One data set of a recipe."""

    dataset: str
    name: str = ""
    """Folder of its store; the data set's name by default."""
    path: str | None = None
    """Files, where the set is files; relative to the working directory."""
    revision: str | None = None
    config: str | None = None
    """Configuration of a hub repository that has several."""
    split: str | None = None
    limit: int | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    disjoint: str = ""
    """Column that keeps it apart from the training set, where both are of one text-overlap group;
    `group` keeps all others apart."""


class Recipe(_Part):
    """How a probe is made."""

    name: str
    """`<model>/<name>`."""
    description: str
    source: str
    """Paper or code."""
    model: str
    """Model as the provider takes it."""
    model_args: dict[str, Any] = Field(default_factory=dict)
    """For the provider, such as `max_model_len` of the server that it starts."""
    layers: str | int
    """`all` to choose on the selection set, or what the source uses."""
    positions: Positions = "completion"
    family: str = "lr"
    behaviour_floor: float = FOLLOWED_FLOOR
    """Least share of answers that do what an instruction to be honest or to lie asks."""
    settings: dict[str, Any] = Field(default_factory=dict)
    rows: str = ""
    """`tokens`, `mean` or `last`; what the family's source takes by default."""
    pool: str = "mean"
    fpr: float = 0.01
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    train: SetRecipe
    control: SetRecipe
    heldout: tuple[SetRecipe, ...] = ()
    notes: tuple[str, ...] = ()
    """Where the recipe departs from the source, and what it needs."""


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe."""
    try:
        return Recipe.model_validate(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValidationError, RecursionError) as error:
        raise ArtifactError(f"{path}: not a recipe ({error}); see probes/recipes") from None


def run_recipe(
    path: str,
    *,
    out: str,
    work: str,
    model: str,
    model_args: dict[str, Any],
    n_resamples: int,
    memory: float = MEMORY,
) -> Made:
    """Collect every set of a recipe in `work`, where what is there already is used; then train."""
    recipe = load_recipe(path)
    if not work:
        raise SpecError("--work: is missing; a recipe needs a folder for its activations")
    # A server that runs already takes none of the arguments that the recipe starts one with.
    given = model_args if "base_url" in model_args else recipe.model_args | model_args
    stores = anyio.run(_collect, recipe, model or recipe.model, work, given)
    held = [part.name or part.dataset for part in recipe.heldout]
    control = recipe.control.name or recipe.control.dataset
    judged = dict(zip([control, *held], (recipe.control, *recipe.heldout), strict=True))
    return train_job(
        out=out, train=stores[recipe.train.name or recipe.train.dataset], control=stores[control],
        selection="", heldout=[stores[n] for n in held],
        disjoint={n: part.disjoint for n, part in judged.items() if part.disjoint},
        name=recipe.name, family=recipe.family, settings=recipe.settings, layers="all",
        rows=recipe.rows, pool=recipe.pool, fpr=recipe.fpr,
        behaviour_floor=recipe.behaviour_floor, allow_few=False,
        n_resamples=n_resamples, seed=recipe.seed, memory=memory, work=f"{work.rstrip('/')}/fits",
        card={"description": recipe.description, "source": recipe.source, "notes": recipe.notes},
    )  # fmt: skip


async def _collect(
    recipe: Recipe, model: str, work: str, model_args: dict[str, Any]
) -> dict[str, str]:
    """Collect every set through one model, whose server so starts once; none if all are there."""
    from inspect_ai.model import get_model

    from inspect_lens.collect import collect_async
    from inspect_lens.data import load_dataset

    stores: dict[str, str] = {}
    try:
        made = get_model(model, memoize=False, **model_args)
    except ValueError as error:
        raise SpecError(f"model={model}: {error}") from None
    async with made as live:
        for part in (recipe.train, recipe.control, *recipe.heldout):
            title = part.name or part.dataset
            data = load_dataset(
                part.dataset, path=part.path, revision=part.revision, config=part.config,
                split=part.split, limit=part.limit, **part.options,
            )  # fmt: skip
            store = await collect_async(
                live, data, f"{work.rstrip('/')}/{title}",
                layers=parse_layers(str(recipe.layers)), positions=recipe.positions,
                max_tokens=recipe.max_tokens, temperature=recipe.temperature, seed=recipe.seed,
            )  # fmt: skip
            stores[title] = store.uri
    return stores
