"""Keep of a universal lock what this project installs: CPython 3.11 to 3.13 on Linux.

A filter from standard input to standard output; `make lock` is its one caller.
"""

from __future__ import annotations

import itertools
import sys

from packaging.requirements import Requirement

PYTHONS = ("3.11.0", "3.11.9", "3.12.9", "3.13.9")
MACHINES = ("x86_64", "aarch64")
HEADER = """\
# Made by `make lock` from pyproject.toml, cpu.in and overrides.txt; do not edit.
# Install with --no-deps: the overrides are part of the resolution. No hashes, because the
# CPU build of torch comes from another source than the rest, and not the same one everywhere.
"""


def environments() -> list[dict[str, str]]:
    """Marker environments that the lock has to serve."""
    return [
        {
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_machine": machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": python,
            "python_version": python.rpartition(".")[0],
            "sys_platform": "linux",
        }
        for python, machine in itertools.product(PYTHONS, MACHINES)
    ]


def main() -> None:
    """Drop the lines that never apply, and the markers that always hold."""
    sys.stdout.write(HEADER)
    for line in sys.stdin:
        requirement = Requirement(line.strip())
        if requirement.marker is None:
            sys.stdout.write(line)
            continue
        holds = [requirement.marker.evaluate(env) for env in environments()]
        if all(holds):
            sys.stdout.write(f"{requirement.name}{requirement.specifier}\n")
        elif any(holds):
            sys.stdout.write(line)


if __name__ == "__main__":
    main()
