r"""Task `aobench`.

```text
inspect eval inspect_lens/aobench -T data=<clone> -T oracle=<oracle> --model vllm-lens/<model> \
    -M enable_lora=true -M max_lora_rank=64
```
"""

from __future__ import annotations

from inspect_ai import Task, task

from evals.aobench.asking import ask_of_contexts
from evals.aobench.clone import open_clone
from evals.aobench.dataset import Options, aobench_dataset, choose_tasks
from evals.aobench.grading import aobench_answer
from evals.kit.arguments import required
from inspect_lens import judged_arguments
from inspect_lens.errors import LensError
from inspect_lens.model._host import PrerequisiteError
from inspect_lens.oracle import load_oracle
from inspect_lens.oracle._ask import OraclePlan

__all__ = ["aobench"]


@task
@judged_arguments
def aobench(
    data: str | None = None,
    oracle: str | None = None,
    tasks: str | list[str] = "paper_core",
    subject: str = "Qwen3-8B",
    layers: int | float | list[int] | None = None,
    per_task: int | None = None,
    n_positions: int | None = None,
    taboo_adapter: str | None = None,
    personaqa_adapter: str | None = None,
    controls: bool | list[str] = True,
    seed: int = 0,
    served_as: str | None = None,
) -> Task:
    """Ask an activation oracle the questions of AObench, and each of them without activations too.

    Args:
        data: a clone of the suite, from which data, questions and judges' instructions come.
        oracle: name below `oracles/`, path or `hf://owner/repository`.
        tasks: `paper_core`, `paper_six`, `paper_plus`, `all`, or tasks by name.
        subject: model whose recorded answers are read, and that is evaluated.
        layers: whose activations the oracle sees; by default the largest set of layers that it
            reads together, or else the middle one of its layers, as the suite chooses.
        per_task: entries of each task at most, from the first one on; of each class, word or
            condition where a task has these. 100 for `sycophancy` by default, all for others.
        n_positions: tokens that are shown, for the tasks whose number the suite lets one choose.
        taboo_adapter: path of the adapters that hide a word, with `{word}` in it.
        personaqa_adapter: path of the adapter that knows the personas.
        controls: true for `text_only`, `shuffled` and `random`, false for none, or some by name.
        seed: of the controls.
        served_as: name under which the server has the oracle's adapter already.

    Returns:
        The task. Its metrics are the number of each task and their mean, for the oracle and for
        each control.
    """
    data = required("data", data, "a clone of AObench")
    oracle = required("oracle", oracle, "an oracle of the model, by name, path or hf:// address")
    options = Options(per_task, n_positions, taboo_adapter, personaqa_adapter)
    dataset = aobench_dataset(open_clone(str(data), str(subject)), choose_tasks(tasks), options)
    try:
        known = load_oracle(oracle, served_as=served_as).config.act_layer_combinations
    except LensError as error:
        raise PrerequisiteError(f"-T oracle={oracle}: {error}") from None
    try:
        several = max(known, key=len)
        if layers is None and len(several) > 1:
            layers = list(several)
        asked = sorted({(sample.metadata or {})["question"] for sample in dataset})
        OraclePlan(asked, oracle, layers=layers, controls=controls, served_as=served_as)
    except LensError as error:
        raise PrerequisiteError(f"-T {error}") from None
    return Task(
        dataset=dataset,
        solver=ask_of_contexts(oracle, layers, controls, seed, served_as, str(subject)),
        scorer=aobench_answer(),
    )
