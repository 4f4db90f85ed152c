"""What public functions are given is judged by their annotations, before anything runs."""

from __future__ import annotations

import json
import pickle
import re
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from inspect_ai.model import GenerateConfigArgs, get_model

from inspect_lens import judged_arguments
from inspect_lens._base.arguments import judged_value, warn_caller
from inspect_lens.attention import load_heads
from inspect_lens.data import load_dataset
from inspect_lens.errors import ArtifactError, LensError, SpecError
from inspect_lens.lens import load_lens
from inspect_lens.oracle import ask_oracle, load_oracle
from inspect_lens.probe import CaptureFacts, ProbeCard, load_probe
from inspect_lens.reading import LatentReader, lens_column
from inspect_lens.sae import SparseAutoencoder
from inspect_lens.scorer import (
    attention_tracker,
    calibration_error,
    coherence,
    lens_rank,
    monitor_alarm,
    oracle_answer,
    probe_cascade,
    probe_score,
    recall_at_fpr_metric,
    refusal_rate,
)
from inspect_lens.solver import (
    causal_trace,
    contrastive_pairs,
    probe_gate,
    steering_sweep,
    with_capture,
)
from inspect_lens.train import (
    ActivationSet,
    LDAProbe,
    evaluate_probe,
    extract_vector,
    fit_condition,
    fit_layers,
    fit_on,
    from_arrays,
    refusal_candidates,
    select_layer,
    split_by_group,
    train_probe,
)
from inspect_lens.vector import load_vector

PROBE = "organism/deception-lr"


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (probe_score, {"check_model": "no"}, "check_model='no'; allowed is true or false"),
        (probe_score, {"selection": 5}, "selection=5; allowed is a text or None"),
        (probe_score, {"roles": 5}, "roles=5; allowed is a list of texts or None"),
        (probe_score, {"roles": [1]}, r"roles=\[1\]; allowed is a list of texts or None"),
        (monitor_alarm, {"threshold": float("nan")}, "threshold=nan; allowed is a number"),
        (monitor_alarm, {"threshold": True}, "threshold=True; allowed is a number"),
        (probe_score, {"layer": True}, "layer=True; allowed is an integer or None"),
        (probe_score, {"layer": -1}, "layer=-1; allowed are integers of 0 or more"),
        (probe_cascade, {"band": [0.1]}, "band=.* a list of 2 numbers or None"),
    ],
)
def test_what_a_probe_is_asked_for(make: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make(PROBE, **given)


@pytest.mark.parametrize("given", [5, None, ["organism/truth"]])
@pytest.mark.parametrize(
    "load", [load_probe, load_vector, load_lens, load_oracle, load_heads, attention_tracker]
)
def test_what_is_no_name_of_an_artefact(load: Any, given: Any) -> None:
    said = re.escape(f"={given!r}: a {type(given).__name__}; allowed are a name, a path")
    with pytest.raises(ArtifactError, match=said):
        load(given)
    with pytest.raises(ArtifactError, match=r"=''|='\.' was not found"):
        load("")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: causal_trace(site="resid_pos"), "site='resid_pos'.*did you mean 'resid_post'"),
        (lambda: causal_trace(window=0), "window=0; allowed are integers of 1 or more"),
        (lambda: causal_trace(seed=-1), "seed=-1; allowed are integers of 0 or more"),
        (lambda: load_vector("organism/truth").random_control(seed=-1), "seed=-1; allowed are"),
        (lambda: load_vector("organism/truth").relative_scale(4, None), "share=None; allowed is"),
        (lambda: calibration_error(n_bins=0), "n_bins=0; allowed are integers of 1 or more"),
        (lambda: recall_at_fpr_metric(2.0), "fpr=2.0; allowed is a number between 0 and 1"),
        (lambda: lens_rank(layers=[]), "layers=.*at least one"),
        (lambda: lens_rank(layers=[1.5]), r"layers=\[1.5\]; allowed is a list of integers"),
        (lambda: with_capture([1], inner=5), "inner=5; allowed is an Inspect Solver"),
        (lambda: contrastive_pairs(positions="complete"), "positions='complete'"),
        (lambda: steering_sweep("organism/truth", [1.0], capture=["x"]), "capture=.*'x'"),
        (lambda: steering_sweep(5, [1.0]), "vector=5"),
        (lambda: anyio.run(lambda: ask_oracle("m", [], [], seed="x")), "seed='x'"),
    ],
)
def test_what_others_are_asked_for(make: Any, message: str) -> None:
    with pytest.raises((SpecError, ArtifactError), match=message):
        make()


def test_what_numpy_torch_and_the_command_line_give_is_read() -> None:
    def typed(
        n: int, share: float | None = None, layers: list[int] | None = None, free: object = None
    ) -> Any:
        return n, share, layers, free

    taken: Any = judged_arguments(typed)
    found = taken(np.int64(3), np.float32(0.5), layers=["3", np.int64(5)], free=(array := [1]))
    assert found == (3, 0.5, [3, 5], [1])
    assert [type(value) for value in found[:2]] == [int, float]
    assert found[3] is array
    assert taken(1, 2, (i for i in (4, 5)))[2] == [4, 5]
    tensors = taken(torch.tensor(3), np.array(0.5), layers=torch.tensor([3, 5]))
    assert tensors[:3] == (3, 0.5, [3, 5])
    assert {type(value) for value in (tensors[0], *tensors[2])} == {int}
    assert taken("-3", "1e-3", ["1", "2"])[:3] == (-3, 1e-3, [1, 2])
    for wrong in ("nan", "x"):
        with pytest.raises(SpecError, match=f"share='{wrong}'; allowed is a number or None"):
            taken(1, wrong)
    with pytest.raises(TypeError, match="missing"):
        taken()


def test_what_is_no_kind_of_ours_is_left_to_the_function() -> None:
    def mixed(pair: tuple[int, str], *others: Any, config: GenerateConfigArgs | None = None) -> Any:
        return pair, others, config

    def misnamed(value: any | None, limit: int = 1) -> Any:  # type: ignore[valid-type]
        return value, limit

    taken: Any = judged_arguments(mixed)
    assert taken((1, "a"), "x", "y", config={}) == ((1, "a"), ("x", "y"), {})
    assert judged_arguments(misnamed)("x") == ("x", 1)
    with pytest.raises(SpecError, match="limit=0"):
        judged_arguments(misnamed)("x", 0)


def test_one_alone_may_stand_where_several_may() -> None:
    def typed(layers: Sequence[int] = (), roles: list[str] | None = None) -> Any:
        return layers, roles

    taken: Any = judged_arguments(typed)
    assert taken(3, "grader") == taken([3], ["grader"]) == ([3], ["grader"])
    for wrong in ({3: 1}, b"3", "all"):
        with pytest.raises(SpecError, match=r"layers=.*; allowed is a list of integers"):
            taken(wrong)


def test_an_argument_that_is_not_there_is_a_type_error_with_the_nearest_name() -> None:
    @judged_arguments
    def typed(probe: str, *, layers: list[int] | None = None, **others: Any) -> Any:
        return probe, layers, others

    @judged_arguments
    def strict(probe: str, layer: int | None = None) -> Any:
        return len(probe, 1) if layer else probe  # type: ignore[call-arg]

    wrong: Any = strict
    for error in (TypeError, SpecError):
        with pytest.raises(error, match=r"^strict: takes no prob=…; did you mean 'probe'\?$"):
            wrong(prob="x")
    with pytest.raises(SpecError, match="missing a required argument: 'probe'; it takes probe, la"):
        wrong()
    with pytest.raises(SpecError, match="too many positional arguments"):
        wrong("x", 1, 2)

    class Made:
        @judged_arguments
        def __init__(self, probe: str) -> None:
            self.probe = probe

    made: Any = Made
    with pytest.raises(SpecError, match=r"^Made: takes no prob=…; did you mean 'probe'\?$"):
        made(prob="x")
    assert typed("x", lay=1) == ("x", None, {"lay": 1})
    with pytest.raises(TypeError, match=r"len\(\) takes") as error:
        strict("x", 1)
    assert not isinstance(error.value, SpecError), "a fault inside is none of the call"


class Block(IntEnum):
    FIRST = 0
    SECOND = 1


def _set(name: str, n: int, seed: int, positive: float = 0.5) -> ActivationSet:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(n) < positive * n
    acts = ((rng.normal(size=(2, 3, 4)) + 2 * y).astype(np.float32) for y in labels)
    return ActivationSet(
        name=name, model="org/tiny", layers=(0, 1), labels=labels, acts=tuple(acts),
        groups=tuple(f"{name}/{i}" for i in range(n)),
        ids=tuple(f"{name}/{i}" for i in range(n)),
    )  # fmt: skip


TRAIN, OTHER, CONTROL = _set("train", 80, 0), _set("other", 80, 1), _set("control", 400, 2, 0.0)
VECTOR = extract_vector(TRAIN, name="t/v")
CARD = ProbeCard(name="t/p", layers=(0,), hidden=4)
AUTOENCODER = SparseAutoencoder(
    hook="blocks.1.hook_resid_post",
    weight=np.ones((3, 4), np.float32),
    bias=np.zeros(3, np.float32),
    decoder=np.ones((3, 4), np.float32),
    decoder_bias=np.zeros(4, np.float32),
)


@pytest.mark.parametrize(
    "use",
    [
        TRAIN.rows, TRAIN.sequences, VECTOR.raw, VECTOR.to_steering,
        lambda n: VECTOR.to_steering([n]),
        lambda n: TRAIN.pooled(n, "mean"),
        lambda n: list(TRAIN.selected([n])),
        lambda n: train_probe(LDAProbe(), TRAIN, name="t/p", control=CONTROL, layers=[n]),
        lambda n: select_layer(LDAProbe(), TRAIN, OTHER, card=CARD, layers=[n]),
        lambda n: fit_on(LDAProbe(), TRAIN, n),
        lambda n: fit_on(LDAProbe(), TRAIN, [n]),
        lambda n: list(fit_layers(LDAProbe(), TRAIN, [n])),
        lambda n: extract_vector(TRAIN, name="t/v", layer=n, layers=[n]),
        lambda n: extract_vector(TRAIN, name="t/v", rows=n),
        lambda n: fit_condition(VECTOR, TRAIN, layers=[n]),
        lambda n: refusal_candidates(OTHER, TRAIN, n_positions=n),
        lambda n: from_arrays([np.zeros((1, 2, 4))] * 2, [0, 1], layers=[n], model="m"),
        lambda n: split_by_group(TRAIN, seed=n),
        lambda n: LatentReader.of(AUTOENCODER, {"a": n}),
        lambda n: AUTOENCODER.latents({0: 1.0}, layers=[n]),
    ],
)  # fmt: skip
def test_integers_are_those_of_python_numpy_and_enumerations_and_no_flags_or_fractions(
    use: Any,
) -> None:
    for number in (1, np.int64(1), np.uint8(1), np.array(1), torch.tensor(1), Block.SECOND):
        assert use(number) is not None
    for wrong in (True, np.bool_(True), 1.0, np.float32(1.0), 1.5):
        with pytest.raises(SpecError, match="; allowed"):
            use(wrong)


def test_many_token_ids_are_judged_in_no_time() -> None:
    ids = list(range(1_000_000))
    began = time.process_time()
    assert judged_value("token_ids", ids, Sequence[int]) == ids
    assert time.process_time() - began < 0.5
    with pytest.raises(SpecError, match="allowed is a list of integers"):
        judged_value("token_ids", [*ids, True], Sequence[int])
    with pytest.raises(SpecError, match="allowed is a list of numbers"):
        judged_value("doses", [1.0, float("nan")], Sequence[float])


def test_a_warning_is_of_the_line_that_called_this_package() -> None:
    few = TRAIN.subset(range(40))
    made = replace(few, acts=tuple(a * [1, 1, 1, 1e-9] for a in few.acts))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_probe(
            LDAProbe(), made, name="t/p", control=CONTROL, selection=OTHER, recall_floor=1.0,
            held_out=[replace(_set("test", 40, 3), capture=CaptureFacts(dtype="float16"))],
        )  # fmt: skip
        warn_caller("here")
    assert {w.filename for w in caught} == {__file__}
    assert len(caught) > 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: probe_gate(PROBE, tries=5), "tries=5: no effect with action='flag'"),
        (lambda: probe_gate(PROBE, temperature=1.0), "temperature=1.0: .* action='flag'"),
        (lambda: probe_gate(PROBE, action="best", replacement="-"), "replacement='-': .*'best'"),
        (
            lambda: probe_gate(PROBE, action="resample", prefer="high"),
            "prefer='high': .*'resample'",
        ),
        (lambda: coherence("repetition", judge="m/j", weighted=True), "judge='m/j', weighted=True"),
        (lambda: coherence(model=get_model("mockllm/model")), "model='mockllm/model': no effect"),
        (lambda: coherence(model="m/x"), "model='m/x': no effect with method='judge'"),
        (lambda: refusal_rate(weighted=True), "weighted=True: .* without judge= or role="),
        (lambda: monitor_alarm(PROBE, watch="mean"), "watch='mean': .* level='turn'"),
        (lambda: lens_column(PROBE, combine="mean"), "combine='mean': .* over='last'"),
        (lambda: oracle_answer("Is it a lie?", grader="m/j"), "grader='m/j': .* match='exact'"),
        (lambda: select_layer(LDAProbe(), TRAIN, OTHER, card=CARD, fpr=0.1), "fpr=0.1: .*control="),
        (lambda: evaluate_probe(load_probe(PROBE), TRAIN, n_random=3), "n_random=3: .* train="),
        (
            lambda: train_probe(
                LDAProbe(), TRAIN, name="t/p", control=CONTROL, pool="max", pools=("mean", "last")
            ),
            "pool='max': no effect beside pools=",
        ),
    ],
)
def test_what_nothing_would_read_is_refused(make: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        make()


def test_what_came_makes_no_message_long(tmp_path: Path) -> None:
    """A label of 100,000 characters in somebody's table was all on the screen."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a", "label": "x" * 100_000}))
    with pytest.raises(
        SpecError, match=r"^row 0: label 'xxx.* … .*say which values are p"
    ) as found:
        load_dataset("prompts", path=str(file), label="label")
    assert len(str(found.value)) <= 8000
    assert str(pickle.loads(pickle.dumps(found.value))) == str(found.value)
    assert LensError("short", 3).args == ("short", 3)
