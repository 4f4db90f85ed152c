"""Plans, taps, readouts and export: a torch library that does not know vLLM.

A request meets the folders in this order: `plan` (which token wants what), `protocol` (what
programs tell each other), `tap` (what runs inside the model), `readout` (rows to few numbers),
`step` (one step of a worker), `export` (off the device), `collect` (the receiver's side); `hooks`
beside them.
Read `step/stepper.py` first.
"""
