"""Which token wants what, worked out before a step: pure functions of the batch layout.

In: requests of a step and what they ask for. Out: a `StepPlan`. Read `step_plan.py` first.
"""
