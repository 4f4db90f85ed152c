"""`inspect-lens lens …`: the commands and their options."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from inspect_lens._base.installed import install_extra
from inspect_lens._base.untrusted import parse_json, refuse_irregular
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.spec import LensKind

from ._choices import Dtype as DtypeName
from ._output import (
    CommandGroup,
    Json,
    check_options_of,
    emit,
    examples,
    number,
    out_folder,
    parse_layers,
    typed_command,
)

if TYPE_CHECKING:
    from inspect_lens.lens import LensQuality

lens_app = typer.Typer(
    cls=CommandGroup,
    help="Fit tuned and Jacobian lenses, judge them on other texts, and import published ones.",
    no_args_is_help=True,
)

Model = Annotated[str, typer.Option(help="Model for transformers: folder or hub name.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, and so on.")]
Dtype = Annotated[DtypeName, typer.Option(help="Precision of the model.")]
Texts = Annotated[str, typer.Option(help="JSONL file; each line has 'text' or 'messages'.")]


@lens_app.command(
    epilog=examples(
        "inspect-lens lens fit --kind tuned --model models/my-model --texts train.jsonl \\",
        "    --held-out test.jsonl --name my-model/tuned --out lenses/my-model",
    )
)
def fit(
    context: typer.Context,
    kind: Annotated[LensKind, typer.Option(help="Kind of lens.")],
    model: Model,
    texts: Texts,
    held_out: Annotated[str, typer.Option(help="JSONL file of other texts, to judge the lens on.")],
    out: Annotated[str, out_folder("Folder to write the lens to.")],
    name: Annotated[str, typer.Option(help="Name on the card: <model>/<name>.")] = "",
    layers: Annotated[
        str, typer.Option(help="'all' (but the last), or numbers such as 8,10-14.")
    ] = "all",
    steps: Annotated[int, typer.Option(min=1, help="tuned only: number of batches.")] = 250,
    lr: Annotated[float, number("tuned only: learning rate at the start.", min=0)] = 1e-3,
    batch: Annotated[int, typer.Option(min=1, help="tuned only: texts per batch.")] = 16,
    block: Annotated[
        int, typer.Option(min=1, help="jacobian only: rows of the matrix at once.")
    ] = 32,
    max_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of a text; 0 means 512 (tuned) or 128 (jacobian).")
    ] = 0,
    skip_first: Annotated[
        int,
        typer.Option(
            min=-1, help="First tokens to leave out; -1 means 0 (tuned) or 16 (jacobian)."
        ),
    ] = -1,
    seed: Annotated[int, typer.Option(min=0, help="tuned only: seed of the order of texts.")] = 0,
    half: Annotated[bool, typer.Option(help="Store the matrices as float16.")] = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Fit a lens, judge it on held-out texts next to the logit lens, and write it."""
    from inspect_lens.lens import Lens
    from inspect_lens.probe import ModelRef, fingerprint_model
    from inspect_lens.train import fit_jacobian_lens, fit_tuned_lens

    check_options_of(context, kind)
    picked = parse_layers(layers)
    refuse_irregular(texts)
    refuse_irregular(held_out)
    tokenizer = _tokenizer(model)
    prompts, others = _read(texts, tokenizer), _read(held_out, tokenizer)
    loaded = _model(model, device, dtype)
    is_folder = Path(model).is_dir()
    about: dict[str, Any] = {
        "held_out": others,
        "name": name or f"{Path(model).name}/{kind}",
        "layers": None if picked == "all" else picked,
        "dataset": Path(texts).name,
        "model_ref": ModelRef(name=model, sha256=fingerprint_model(model) if is_folder else None),
        "command": typed_command(),
    }
    about |= {"max_tokens": max_tokens} if max_tokens else {}
    about |= {} if skip_first < 0 else {"skip_first": skip_first}
    if kind == "tuned":
        lens = fit_tuned_lens(
            loaded, prompts, steps=steps, lr=lr, batch=batch, random_state=seed, **about
        )
    else:
        lens = fit_jacobian_lens(loaded, prompts, block=block, **about)
    if half:
        lens = Lens(matrix=lens.matrix.astype(np.float16), bias=lens.bias, card=lens.card)
    folder = lens.save(out)
    facts, lines = _judged(lens.card.quality)
    result = {"lens": str(folder), "name": lens.card.name, "kind": kind, **facts}
    emit(result, [f"{lens.card.name}: {kind}, {folder}", *lines], as_json=as_json)


@lens_app.command(
    epilog=examples(
        "inspect-lens lens evaluate lenses/my-model --model models/my-model --texts test.jsonl"
    )
)
def evaluate(
    lens: Annotated[str, typer.Argument(help="Lens: name, folder or hf:// address.")],
    model: Model,
    texts: Texts,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Compare a lens with the model's own predictions, and with the logit lens."""
    from inspect_lens.lens import load_lens
    from inspect_lens.train import evaluate_lens

    found = load_lens(lens)
    prompts = _read(texts, _tokenizer(model))
    facts, lines = _judged(evaluate_lens(_model(model, device, dtype), found, prompts))
    result = {"name": found.card.name, "kind": found.card.kind, **facts}
    emit(result, [f"{found.card.name}: {found.card.kind}, {texts}", *lines], as_json=as_json)


@lens_app.command(
    name="import",
    epilog=examples(
        "inspect-lens lens import hf://owner/repository/lens.pt --name my-model/jacobian \\",
        "    --out lenses/my-model",
    ),
)
def import_(
    path: Annotated[
        str, typer.Argument(help="A .pt file, or hf://owner/repository/folder/file.pt.")
    ],
    out: Annotated[str, out_folder("Folder to write the lens to.")],
    name: Annotated[str, typer.Option(help="Name on the card: <model>/<name>.")],
    model: Annotated[
        str, typer.Option(help="Model that it was fitted on; that of the file by default.")
    ] = "",
    n_layers: Annotated[
        int,
        typer.Option(min=0, help="Layers of the model; 0 means one more than the file translates."),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Read a Jacobian lens of jlens or TransformerLens, such as neuronpedia publishes."""
    from inspect_lens.lens import import_lens
    from inspect_lens.probe import ModelRef, fingerprint_model

    lens = import_lens(
        path, name=name, n_layers=n_layers or None,
        model=ModelRef(name=model, sha256=fingerprint_model(model)) if model else None,
    )  # fmt: skip
    folder, card = str(lens.save(out)), lens.card
    result = {
        "lens": folder, "name": card.name, "kind": card.kind, "layers": list(card.layers),
        "n_layers": card.n_layers, "hidden": card.hidden, "notes": list(card.notes),
    }  # fmt: skip
    lines = [
        f"{card.name}: {card.kind}, layers {card.layers[0]} to {card.layers[-1]} of "
        f"{card.n_layers}, width {card.hidden}, {folder}",
        *(f"  {note}" for note in card.notes),
    ]
    emit(result, lines, as_json=as_json)


def _judged(quality: Sequence[LensQuality]) -> tuple[dict[str, Any], list[str]]:
    lines = [
        f"  layer {q.layer}: KL {q.kl:.3f} nats (logit lens {q.logit_kl:.3f}), same best token "
        f"{q.agreement:.3f} ({q.logit_agreement:.3f})"
        for q in quality
    ]
    return {"quality": [one.model_dump() for one in quality]}, lines


def _loaded(load: Callable[[Any, Any], Any], name: str, device: str) -> Any:
    """What torch and transformers load of a model."""
    try:
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise SpecError(
            f"lenses of a model need torch and transformers ({error}): {install_extra('train')}"
        ) from None
    try:
        return load(torch, transformers)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        # What follows is advice to who writes Python.
        why = str(error).strip().partition("\n")[0].partition(". Please")[0]
        at = f", device={device!r}" if device else ""
        here = ", and a device that torch has here" if device else ""
        raise ArtifactError(
            f"model={name!r}{at}: cannot be loaded ({why}); allowed are the folder of a checkpoint "
            f"or owner/name of the hub (after hf auth login, if access is granted there){here}"
        ) from None


def _tokenizer(name: str) -> Any:
    return _loaded(lambda _, hf: hf.AutoTokenizer.from_pretrained(name), name, "")


def _model(name: str, device: str, dtype: str) -> Any:
    return _loaded(
        lambda torch, hf: hf.AutoModelForCausalLM.from_pretrained(
            name, dtype=getattr(torch, dtype)
        ).to(device),
        name, device,
    )  # fmt: skip


def _read(file: str, tokenizer: Any) -> list[list[int]]:
    """Token ids of the texts of a file."""
    try:
        lines = Path(file).read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{file}: cannot be read ({error})") from None
    found: list[list[int]] = []
    for i, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            given = sorted({"text", "messages"} & set(row))
        except (ValueError, TypeError):
            given = []
        if len(given) != 1:
            raise ArtifactError(f"{file}:{i}: a line is JSON with 'text' or 'messages'")
        try:
            if given == ["text"]:
                ids = tokenizer(row["text"])["input_ids"]
            else:
                text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # noqa: BLE001 - a template raises what it likes
            why = str(error).partition("\n")[0]
            raise ArtifactError(f"{file}:{i}: {given[0]} cannot be read ({why})") from None
        found.append([int(token) for token in ids])
    return found
