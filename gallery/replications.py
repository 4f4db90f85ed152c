"""Every replication by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gallery import (
    agent,
    cascade,
    concepts,
    fact,
    injection,
    languages,
    lies,
    refusal,
    steering,
    truth,
)
from gallery._replication import Replication

__all__ = ["REPLICATIONS"]

REPLICATIONS: Final[Mapping[str, Replication]] = {
    "refusal": refusal.REPLICATION,
    "injection": injection.REPLICATION,
    "truth": truth.REPLICATION,
    "languages": languages.REPLICATION,
    "fact": fact.REPLICATION,
    "steering": steering.REPLICATION,
    "lies": lies.REPLICATION,
    "concepts": concepts.REPLICATION,
    "agent": agent.REPLICATION,
    "cascade": cascade.REPLICATION,
}
