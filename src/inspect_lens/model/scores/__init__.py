"""Token scores of probes that the engine ran: how they are asked for, kept and read.

In: names of probes, scores from a response. Out: a handle and a file of scores. Read
`_probe_scores.py` first.
"""
