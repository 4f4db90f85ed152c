"""What the lens costs, against vLLM without it and against its peers.

`run.py` measures, `plots.py` draws, `soak.py` mixes everything for long in one engine.
`arms.py`, `loads.py` and `shapes.py` say what is measured and hold no code that runs it.
"""
