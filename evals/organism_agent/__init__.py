"""Where does the agent lie, and does it call what it must not? A probe reads each of its turns."""

from evals.organism_agent.dataset import agent_dataset
from evals.organism_agent.task import converse, organism_agent, planted

__all__ = ["agent_dataset", "converse", "organism_agent", "planted"]
