"""The slow twin: a Hugging Face forward pass, plain or with the same edits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["Edit", "HuggingFace", "ids_of", "max_relative_error", "relative_errors", "rows_of"]

Edit = Callable[[torch.Tensor], torch.Tensor]
"""Maps what a site holds, (tokens, hidden), to the edited rows."""

_Note = Callable[[str, int, torch.Tensor], torch.Tensor]
"""Keeps what a site of a layer holds, and returns it, edited."""

_CHILDREN = {
    "attn_out": ("self_attn", "linear_attn", "mamba", "mixer", "attention", "attn"),
    "mlp_out": ("mlp", "shared_mlp", "feed_forward", "block_sparse_moe", "fc2"),
}


class HuggingFace:
    """A checkpoint, run by transformers.

    Args:
        folder: the checkpoint.
        layers: path of the list of decoder layers in the model.
        is_text: whether it is a language model alone, and not a multimodal one.
        dtype: in which it computes; rows are of it.
        **config: fields of its configuration that are others than in the folder.
    """

    def __init__(
        self,
        folder: Path,
        layers: str = "model.layers",
        *,
        is_text: bool = True,
        dtype: torch.dtype = torch.float32,
        **config: Any,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        auto: Any = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
        # Other implementations leave out the cap of Gemma 2's attention, and return no pattern.
        self.model: Any = auto.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", **config
        ).eval()
        self._layers: Any = self.model.get_submodule(layers)
        self.media: dict[str, Any] = {}
        """What the model gets beside tokens, such as `pixel_values`, as a processor makes it."""

    def residual_stream(
        self, tokens: Sequence[int], edits: Mapping[int, Edit] | None = None
    ) -> torch.Tensor:
        """Residual stream after every decoder layer, (layers, tokens, hidden) float32.

        Args:
            tokens: what is fed to the model.
            edits: by layer; rows returned for that layer are the edited ones.
        """
        by_site = {("resid_post", layer): edit for layer, edit in (edits or {}).items()}
        return self.sites(tokens, by_site, ["resid_post"])["resid_post"]

    def attentions(self, tokens: Sequence[int]) -> torch.Tensor:
        """Attention pattern of every layer, (layers, heads, queries, keys) float32.

        Args:
            tokens: what is fed to the model.
        """
        with torch.no_grad():
            found = self.model(
                input_ids=torch.tensor([list(tokens)]), use_cache=False, output_attentions=True
            )
        return torch.stack([layer[0] for layer in found.attentions])

    def sites(
        self,
        tokens: Sequence[int],
        edits: Mapping[tuple[str, int], Edit] | None = None,
        sites: Sequence[str] = ("resid_pre", "attn_out", "mlp_out", "resid_post"),
    ) -> dict[str, torch.Tensor]:
        """What each site of every decoder layer holds, (layers, tokens, hidden) float32.

        Args:
            tokens: what is fed to the model.
            edits: by site and layer; rows returned are the edited ones.
            sites: which to return.
        """
        rows: dict[tuple[str, int], torch.Tensor] = {}

        def note(site: str, layer: int, value: torch.Tensor) -> torch.Tensor:
            edit = (edits or {}).get((site, layer))
            shape = value.shape
            found = value.reshape(-1, shape[-1])
            found = found if edit is None else edit(found)
            rows[site, layer] = found.detach().clone()
            return found.reshape(shape)

        handles = []
        for i, block in enumerate(self._layers):
            given = {"resid_pre": block}
            if "z" in sites:
                given["z"] = _child(block, _CHILDREN["attn_out"]).o_proj
            for site, module in given.items():
                hook = module.register_forward_pre_hook(_before(note, site, i), with_kwargs=True)
                handles.append(hook)
            for site, names in _CHILDREN.items():
                if site in sites:
                    handles.append(
                        _child(block, names).register_forward_hook(_after(note, site, i))
                    )
            handles.append(block.register_forward_hook(_after(note, "resid_post", i)))
        try:
            with torch.no_grad():
                ids = torch.tensor([list(tokens)])
                self.model(input_ids=ids, use_cache=False, **self.media)
        finally:
            for handle in handles:
                handle.remove()
        n = len(self._layers)
        return {site: torch.stack([rows[site, i] for i in range(n)]) for site in sites}

    def inner_sites(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        """What the sites inside of a block's modules hold, (layers, tokens, width) float32.

        Queries and keys are those behind rotary embedding, heads behind each other; a model without
        experts has no `router_logits`, and one with experts no `mlp_hidden`.

        Args:
            tokens: what is fed to the model.
        """
        rows: dict[str, list[torch.Tensor]] = {}

        def note(site: str, value: torch.Tensor) -> None:
            rows.setdefault(site, []).append(value.detach().reshape(len(tokens), -1).clone())

        def given(site: str) -> Any:
            return lambda _, args: note(site, args[0])

        def routed(module: Any, args: Any) -> None:
            note("router_logits", args[0].reshape(len(tokens), -1) @ module.weight.T)

        handles = []
        for block in self._layers:
            attention, mlp = block.self_attn, _child(block, _CHILDREN["mlp_out"])
            middle = _child(block, ("pre_feedforward_layernorm", "post_attention_layernorm"))
            if hasattr(block, "post_feedforward_layernorm") and middle is not getattr(
                block, "pre_feedforward_layernorm", None
            ):
                middle = mlp  # norms lie behind the modules
            handles.append(middle.register_forward_pre_hook(given("resid_mid")))
            handles.append(attention.o_proj.register_forward_pre_hook(given("z")))
            keep = lambda _, args, output: note("v", output)  # noqa: E731
            handles.append(attention.v_proj.register_forward_hook(keep))
            if hasattr(mlp, "down_proj"):
                handles.append(mlp.down_proj.register_forward_pre_hook(given("mlp_hidden")))
            else:
                handles.append(mlp.gate.register_forward_pre_hook(routed))
        home = sys.modules[type(self._layers[0]).__module__]
        rotate: Any = home.apply_rotary_pos_emb

        def rotated(*args: Any, **kwargs: Any) -> Any:
            q, k = rotate(*args, **kwargs)
            for site, value in (("q", q), ("k", k)):
                note(site, value[0].transpose(0, 1))
            return q, k

        home.apply_rotary_pos_emb = rotated  # type: ignore[attr-defined]
        try:
            with torch.no_grad():
                self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
        finally:
            home.apply_rotary_pos_emb = rotate  # type: ignore[attr-defined]
            for handle in handles:
                handle.remove()
        return {site: torch.stack(values) for site, values in rows.items()}


def _after(note: _Note, site: str, layer: int) -> Any:
    def hook(_module: Any, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (note(site, layer, output[0]), *output[1:])
        return note(site, layer, output)

    return hook


def _before(note: _Note, site: str, layer: int) -> Any:
    def hook(_module: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (note(site, layer, args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": note(site, layer, kwargs["hidden_states"])}

    return hook


def _child(block: Any, names: Sequence[str]) -> Any:
    return next(m for name in names if (m := getattr(block, name, None)) is not None)


def rows_of(output: Any) -> torch.Tensor:
    """What an engine captured of the stream: (layers, tokens, hidden)."""
    found: torch.Tensor = output.activations["residual_stream"]
    return found.float()


def ids_of(output: Any) -> list[int]:
    """The tokens that an engine sampled."""
    return list(output.outputs[0].token_ids)


def relative_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Norm of each row's difference over the norm of the expected row."""
    errors: torch.Tensor = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return errors


def max_relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest of `relative_errors`."""
    return float(relative_errors(found, expected).max())
