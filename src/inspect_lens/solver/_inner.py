"""What a solver runs inside of itself."""

from __future__ import annotations

from typing import cast

from inspect_ai.agent import Agent, as_solver, is_agent
from inspect_ai.solver import Solver

__all__ = ["as_inner"]


def as_inner(inner: Solver | Agent | None) -> Solver | None:
    """A solver for a solver or an agent; None for none."""
    # By its registration: to a type checker an agent and a solver may look alike.
    wrapped = as_solver(inner) if inner is not None and is_agent(inner) else inner
    return cast("Solver | None", wrapped)
