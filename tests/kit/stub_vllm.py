"""Stands in for `python -m vllm.entrypoints.openai.api_server`: same arguments, fake server.

Like vLLM it has a child process, and like a bad day of vLLM the child ignores SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from tests.kit.fake_server import FakeLensServer

_CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--api-key", default=os.environ.get("VLLM_API_KEY"))
    options, _ = parser.parse_known_args()
    subprocess.Popen([sys.executable, "-c", _CHILD])
    with FakeLensServer(model=options.model, api_key=options.api_key, port=options.port):
        time.sleep(600)


if __name__ == "__main__":
    main()
