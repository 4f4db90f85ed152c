"""Ten tests of what an engine does with activations, for any backend that speaks the protocol.

`protocol.py` says what a backend is; `alignment.py`, `edits.py`, `isolation.py`, `refusals.py`,
`parallel.py` and `round_trip.py` hold the tests, which know no backend; `offline.py` and
`over_http.py` are the backends; `suite.py` runs all and writes the result.
"""
