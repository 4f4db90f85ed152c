"""Audits a model with Petri while a probe reads it."""

from evals.lens_audit.dataset import audit_seeds
from evals.lens_audit.task import lens_audit, target_alarm

__all__ = ["audit_seeds", "lens_audit", "target_alarm"]
