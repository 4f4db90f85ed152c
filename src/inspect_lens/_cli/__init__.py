"""The command `inspect-lens`.

Owns options, output and exit codes; may import every other folder, each when a command needs it, so
that `--help` is quick.
"""

from ._main import app, main

__all__ = ["app", "main"]
