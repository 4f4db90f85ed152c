"""In the process that schedules: no more prompt tokens in a step than the buffer has room for.

In: vLLM's scheduler. Out: a smaller step where prompts keep rows. Read `scheduler.py`.
"""
