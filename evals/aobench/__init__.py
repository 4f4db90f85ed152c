"""How much does an oracle read? AObench's tasks, with controls beside each number."""

from evals.aobench.dataset import TASKS, aobench_dataset
from evals.aobench.grading import aobench_table
from evals.aobench.task import aobench

__all__ = ["TASKS", "aobench", "aobench_dataset", "aobench_table"]
