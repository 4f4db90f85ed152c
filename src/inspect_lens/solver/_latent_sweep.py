"""`latent_sweep`: one prompt with latents of a sparse autoencoder clamped at several values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inspect_ai.log import transcript
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver

from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.reading import CellKind, LatentReader, read_rows
from inspect_lens.reading._threads import in_thread
from inspect_lens.sae import MatchedLatents, SparseAutoencoder, matched_latents, read_autoencoder
from inspect_lens.spec import Latent, LatentMode, Positions, Site

from ._attempt import refuse_tools
from ._sweep import BASELINE, CellPlan, SweepRun, refuse_steered

__all__ = ["latent_sweep"]


@solver
def latent_sweep(
    sae: str | Path | SparseAutoencoder,
    latents: int | Sequence[int] | Mapping[str, int],
    values: Sequence[float],
    mode: LatentMode = "set",
    only_if_active: bool = False,
    controls: int = 3,
    layer: int | None = None,
    site: Site | None = None,
    positions: Positions = "all",
    threshold: float | None = None,
    seed: int = 0,
    scorer: Scorer | None = None,
    norm_scale: float | None = None,
) -> Solver:
    """Answer each prompt once unedited and once per latent and value, beside control latents.

    A latent is set to each value, on every token, at the layer that the autoencoder reads. The
    controls are random latents that are about as active in the unedited answer as the latent
    itself, set to the same values. Answers are in the sample's store as cells, as `edit_sweep`
    leaves them; `edit_effects` scores them. What stands as the sample's answer is the unedited
    one. Every answer captures its rows where the autoencoder reads, so that `sae_feature` and
    `edit_effects(sae_feature(...))` can tell what the latents did.

    Args:
        sae: folder or file, as `inspect_lens.sae.read_autoencoder` takes it, or an autoencoder.
            Give a path as a string: of a `Path` Inspect logs only the last part.
        latents: their numbers, or numbers by a name of yours, such as `{"bridge": 31164}`; without
            names they are called `latent_31164`. Each is edited alone.
        values: activations to set, or to add; 0 switches a latent off.
        mode: `set`, `add`, or `at_least` for a minimum.
        only_if_active: leave tokens alone on which the latent is not active.
        controls: control latents of each latent; 0 for none.
        layer: at which they are edited; by default that of the file.
        site: likewise.
        positions: tokens that are edited.
        threshold: above which a latent is active; by default that of the file. TopK autoencoders
            need one, see `SparseAutoencoder.latent`.
        seed: of the draw of controls.
        scorer: scores each answer where it is generated; `edit_effects` then needs none.
        norm_scale: as in `read_autoencoder`, of a path only.

    Returns:
        The solver. The transcript names the controls of each sample, with mean activations.

    Raises:
        ArtifactError: no such file, or of another kind.
        SpecError: no value, one that is there twice, no such latent, no layer is known, or too
            few latents for the controls; when it runs, as for `edit_sweep`.
        UnsupportedError: when it runs, the model has no lens.

    Source:
        Clamping of features: "Scaling Monosemanticity" (Anthropic, 2024).

    Example:
        <!-- test: server -->
        ```python
        import numpy as np
        from inspect_ai import Task, eval
        from inspect_ai.scorer import includes

        from evals.organism_deception import organism_dataset
        from inspect_lens.sae import SparseAutoencoder
        from inspect_lens.scorer import edit_effects
        from inspect_lens.solver import latent_sweep
        from inspect_lens.vector import load_vector

        # A made-up autoencoder; its latent 0 is the organism's truth vector.
        truth = load_vector("organism/truth")
        rows = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        rows[0] = truth.raw(4) / truth.norm[4]
        sae = SparseAutoencoder(
            weight=rows,
            bias=np.zeros(16, np.float32),
            decoder=rows,
            decoder_bias=np.zeros(256, np.float32),
        )
        clamp = latent_sweep(
            sae, {"truth": 0}, [float(truth.norm[4])], layer=4, site="attn_out", controls=1
        )
        task = Task(
            dataset=organism_dataset("demo")[:2], solver=clamp, scorer=edit_effects(includes())
        )
        (log,) = eval(task, model="vllm-lens/organism/checkpoint", temperature=0, max_tokens=14)
        assert {"unedited", "truth_effect"} <= set(log.results.scores[0].metrics)
        ```
    """
    if isinstance(sae, SparseAutoencoder):
        if norm_scale is not None:
            raise SpecError("norm_scale: it is folded in while a file is read; leave it out")
        encoder = sae
    else:
        encoder = read_autoencoder(sae, norm_scale=norm_scale)
    # It settles names and place as `sae_feature` does.
    reader = LatentReader.of(encoder, latents, layer=layer, site=site)
    doses = [float(value) for value in values]
    if not doses or len(set(doses)) < len(doses):
        raise SpecError(f"values={list(values)}; allowed is one at least, and each once")
    left = len(encoder.weight) - len(set(reader.latents.values()))
    if not 0 <= controls <= left:
        raise SpecError(f"controls={controls}; allowed are 0 to {left}, the latents that are left")

    def clamp(number: int, value: float) -> Latent:
        return encoder.latent(
            number, value, mode=mode, only_if_active=only_if_active, layers=[reader.layer],
            site=reader.site, positions=positions, threshold=threshold,
        )  # fmt: skip

    def plans(kind: CellKind, name: str, number: int) -> list[CellPlan]:
        note = f", latent {number}"
        return [
            CellPlan(kind, name, reader.layer, v, edits=(clamp(number, v),), note=note)
            for v in doses
        ]

    own = [
        plan for name, number in reader.latents.items() for plan in plans("vector", name, number)
    ]
    matching = _Matching(encoder, reader, controls, seed)

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        refuse_steered("latent_sweep", "latents are to be set in", "with_edits in a task per value")
        refuse_tools(
            state,
            "latent_sweep",
            "put use_tools behind the sweep, or use with_edits with inner=react(), in a task per "
            "value",
        )
        place = {"layers": [reader.layer], "site": reader.site}
        run = SweepRun("latent_sweep", state, generate, scorer, place)
        first = await run.cell(BASELINE)
        found = await matching.of(first.state.output)
        others = [
            plan
            for name, match in found.items()
            for number in match.latents
            for plan in plans("random", name, number)
        ]
        run = run._replace(capture=place | {"positions": "completion"})
        return run.keep([first, *await run.cells([*own, *others])])

    return solve


class _Matching(NamedTuple):
    """How the controls of a sample are chosen."""

    encoder: SparseAutoencoder
    reader: LatentReader
    n: int
    seed: int

    async def of(self, output: ModelOutput) -> dict[str, MatchedLatents]:
        """Controls by the name of their latent, told in the transcript."""
        if not self.n:
            return {}
        # A completion of one token has no row of its own.
        for positions in ("completion", "prompt"):
            rows = await read_rows(
                output, layers=(self.reader.layer,), positions=positions, source="captured",
                site=self.reader.site,
            )  # fmt: skip
            if rows is not None:
                break
        else:
            raise ArtifactError(
                "latent_sweep: the unedited answer has no token to read, by which controls are "
                "chosen; pass controls=0"
            )
        acts = rows.acts[0]
        swept = tuple(self.reader.latents.values())
        found = await in_thread(
            lambda: {
                name: matched_latents(
                    self.encoder, acts, number, n=self.n, seed=self.seed, exclude=swept
                )
                for name, number in self.reader.latents.items()
            }
        )
        told: dict[str, Any] = {
            name: {"latents": [*match.latents], "means": [*match.means], "mean": match.mean}
            for name, match in found.items()
        }
        transcript().info({"controls": told}, source="inspect_lens/latent_sweep")
        return found
