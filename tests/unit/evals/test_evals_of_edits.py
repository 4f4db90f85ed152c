"""`refusal_ablation` and `sae_clamp` on a server whose answers depend on what is edited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task, eval
from inspect_ai.log import EvalLog
from inspect_ai.model import ModelOutput, ModelUsage, get_model

from evals.refusal_ablation import refusal_ablation
from evals.sae_clamp import clamp_dataset, sae_clamp
from inspect_lens.spec import Ablate, Add, Latents, LensRequest, parse_extra_args
from inspect_lens.vector import Vector, VectorCard
from tests.kit.fake_server import FakeLensServer

pytestmark = pytest.mark.usefixtures("elsewhere")

H, LAYER, N_LAYERS = 8, 2, 4
REFUSAL = np.arange(1.0, H + 1)
SITES = {"resid_pre", "attn_out", "mlp_out", "resid_post"}


class Model(FakeLensServer):
    """Refuses harm unless its direction is gone everywhere, and anything where that is added.

    A clamped latent 1 makes it speak of a bridge, from 5 on.
    """

    def _complete(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = parse_extra_args(body.get("vllm_xargs")) or LensRequest()
        answer = super()._complete(path, body)
        message = answer["choices"][0]["message"]
        prompt = body["messages"][-1]["content"]
        refuses = "harm" in prompt
        gone = {
            (edit.site, layer)
            for edit in request.edits
            if isinstance(edit, Ablate) and _is_refusal(edit.direction)
            for layer in edit.layers
        }
        if gone == {(site, layer) for site in SITES for layer in range(N_LAYERS)}:
            refuses = False
        for edit in request.edits:
            if isinstance(edit, Add) and _is_refusal(edit.vector):
                assert (edit.layers, edit.site, edit.scale) == ((LAYER,), "resid_post", 1.5)
                refuses = True
            if isinstance(edit, Latents) and _is_bridge(edit):
                message["content"] = "The bridge is golden."
                return answer
        message["content"] = "I\u2019m sorry, no." if refuses else "Here is how."
        return answer


def _is_bridge(edit: Latents) -> bool:
    return bool(edit.value.to_float32()[0] >= 5 and edit.encoder.to_float32()[0, 1])


def _is_refusal(tensor: Any) -> bool:
    row = tensor.to_float32()
    return bool(np.isclose(row @ REFUSAL, np.linalg.norm(row) * np.linalg.norm(REFUSAL)))


def refusal_vector(folder: Path, layers: tuple[int, ...] = tuple(range(N_LAYERS))) -> str:
    card = VectorCard(name="t/refusal", layers=layers, layer=LAYER, hidden=H)
    raw = np.random.default_rng(0).standard_normal((len(layers), H))
    raw[layers.index(LAYER)] = REFUSAL
    return str(Vector.from_raw(raw, card=card).save(folder / f"vector-{len(layers)}"))


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text(json.dumps(rows))
    return str(path)


def instructions(folder: Path) -> dict[str, str]:
    return {
        "harmful": written(folder / "h.json", [{"instruction": f"harm {i}"} for i in range(4)]),
        "harmless": written(folder / "g.json", [{"instruction": f"help {i}"} for i in range(3)]),
    }


def run(task: Task, **options: Any) -> EvalLog:
    with Model(n_layers=N_LAYERS, hidden=H) as server:
        model = get_model("lens/org/tiny", base_url=server.url, memoize=False)
        (log,) = eval(task, model=model, display="none", log_dir="logs", **options)
    assert log.status == "success", log.error
    return log


def metrics(log: EvalLog, name: str) -> dict[str, float]:
    assert log.results is not None
    (found,) = [s.metrics for s in log.results.scores if s.name == name]
    return {key: m.value for key, m in found.items()}


def test_one_kind_of_instructions_is_enough_and_an_ablation_of_few_layers_is_none(
    tmp_path: Path,
) -> None:
    vector = refusal_vector(tmp_path, (0, LAYER))
    harmful = instructions(tmp_path)["harmful"]
    with pytest.raises(ValueError, match=r"has layers \[0, 2\], .* pass n_layers="):
        refusal_ablation(vector, harmful)
    for n_layers, left in ((N_LAYERS, 0.0), (N_LAYERS - 1, 1.0)):
        log = run(refusal_ablation(vector, harmful, n_layers=n_layers))
        found = metrics(log, "refusals_by_edit")
        assert found["harmful_ablated"] == left
        assert not [name for name in found if name.startswith("harmless")]
    # A single place is not everywhere.
    log = run(refusal_ablation(vector, harmful, n_layers=N_LAYERS, sites="resid_post"))
    assert metrics(log, "refusals_by_edit")["harmful_ablated"] == 1.0


def autoencoder(folder: Path) -> str:
    rows = np.eye(H)[:6]
    none = np.zeros(6)
    np.savez(folder / "params.npz", W_enc=rows.T, b_enc=none, threshold=none, W_dec=rows,
             b_dec=np.zeros(H))  # fmt: skip
    return str(folder / "params.npz")


def prompts(folder: Path, *targets: Any) -> str:
    rows: list[dict[str, Any]] = [{"prompt": f"say {i}"} for i in range(3)]
    return written(
        folder / "p.json", [r | ({"target": t} if t else {}) for r in rows for t in targets or [""]]
    )


def says(messages: Any, *_: Any) -> ModelOutput:
    """A grader that finds gold where gold is asked for."""
    text = messages[-1].text
    assert "It is about gold." in text
    output = ModelOutput.from_content("mockllm/m", f"GRADE: {'C' if 'golden' in text else 'I'}")
    output.usage = ModelUsage()
    return output


@pytest.mark.parametrize("by", ["phrases", "target", "criterion"])
def test_the_share_of_a_behaviour_follows_the_latent_and_no_control(
    by: str, tmp_path: Path
) -> None:
    targets = [["tunnel", "Bridge"]] if by == "target" else []
    options: dict[str, Any] = {
        "phrases": {"phrases": "BRIDGE"}, "target": {},
        "criterion": {"criterion": "It is about gold."},
    }[by] | {"data": prompts(tmp_path, *targets)}  # fmt: skip
    task = sae_clamp(
        autoencoder(tmp_path), 1, [0, 4, 5], layer=LAYER, controls=2, max_tokens=9, **options
    )
    grader = get_model("mockllm/m", custom_outputs=says, memoize=False)
    log = run(task, model_roles={"grader": grader})
    found = metrics(log, "behaviour_by_value")
    assert [found[name] for name in ("unedited", "clamped x0", "clamped x4", "clamped x5")] == [
        0.0, 0.0, 0.0, 1.0,
    ]  # fmt: skip
    assert found["clamped x5_effect"] == 1.0
    assert "clamped x5_effect_low" not in found, "of three prompts"
    assert {found[f"clamped x{value}_random_effect"] for value in (0, 4, 5)} == {0.0}
    # The server's rows are a formula, whatever is edited.
    active = metrics(log, "activation_by_value")
    assert active["unedited"] > 0
    assert active["clamped x5_effect"] != 5


def test_one_value_has_no_number_in_its_name(tmp_path: Path) -> None:
    data = prompts(tmp_path)
    # As `-T values=5 -T phrases=tunnel, bridge` comes from the command line.
    given: Any = {"values": 5, "phrases": ["tunnel", " bridge"]}
    log = run(sae_clamp(autoencoder(tmp_path), 1, data=data, layer=LAYER, **given))
    assert metrics(log, "behaviour_by_value")["clamped"] == 1.0


def test_a_behaviour_that_nobody_names_is_refused(tmp_path: Path) -> None:
    sae, data = autoencoder(tmp_path), prompts(tmp_path)
    with pytest.raises(ValueError, match="a row has no 'target'"):
        sae_clamp(sae, 1, [5], data, layer=LAYER)
    # An empty text is in every answer.
    with pytest.raises(ValueError, match="allowed are texts that not every answer has"):
        sae_clamp(sae, 1, [5], data, layer=LAYER, phrases=["bridge", ""])
    with pytest.raises(ValueError, match="or an empty one"):
        sae_clamp(sae, 1, [5], prompts(tmp_path, ["bridge", ""]), layer=LAYER)
    with pytest.raises(ValueError, match="allowed is one of them"):
        sae_clamp(sae, 1, [5], data, layer=LAYER, phrases=["x"], criterion="y")
    with pytest.raises(ValueError, match="no 'prompt'"):
        sae_clamp(sae, 1, [5], written(tmp_path / "x.json", [{"text": "x"}]), layer=LAYER)


def test_rows_may_have_a_system_message(tmp_path: Path) -> None:
    rows = [{"prompt": "Hi.", "system": "Be kind.", "target": "x"}, {"prompt": "Hi."}]
    one, other = clamp_dataset(written(tmp_path / "x.json", rows))
    assert [(m.role, m.content) for m in one.input] == [("system", "Be kind."), ("user", "Hi.")]  # type: ignore[union-attr]
    assert (other.input, other.target) == ("Hi.", "")
