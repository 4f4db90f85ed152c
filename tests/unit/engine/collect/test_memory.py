"""The memory that a process may use, from files of the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inspect_lens._engine.collect.result_memory import memory_bytes

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"memory.max": 64 * MIB}, 64 * MIB),
        ("0::/\n", {"memory.max": "max"}, MACHINE),
        ("0::/\n", {}, MACHINE),
        ("", {"memory.max": 64 * MIB}, MACHINE),
        # A job whose step has no limit of its own.
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": 32 * MIB}, 32 * MIB),
        (
            "0::/job/step\n",
            {"job/step/memory.max": 16 * MIB, "job/memory.max": 32 * MIB},
            16 * MIB,
        ),
        ("0::/other\n", {"job/memory.max": 32 * MIB}, MACHINE),
        # The first version, where a container sees the host's path; no limit is a huge number.
        (
            "3:cpu:/x\n2:memory:/docker/abc\n",
            {"memory/memory.limit_in_bytes": 8 * MIB, "memory.max": 1},
            8 * MIB,
        ),
        (
            "2:hugetlb,memory:/a\n",
            {"memory/a/memory.limit_in_bytes": 0x7FFFFFFFFFFFF000},
            MACHINE,
        ),
        ("2:cpu:/a\n", {"memory/a/memory.limit_in_bytes": 1}, MACHINE),
    ],
)
def test_limits_of_the_group_and_of_those_around_it_hold(
    tmp_path: Path, membership: str, files: dict[str, int | str], expected: int
) -> None:
    own = tmp_path / "proc/self/cgroup"
    own.parent.mkdir(parents=True)
    own.write_text(membership)
    for name, content in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    assert memory_bytes(tmp_path) == expected


def test_it_is_the_machines_where_the_kernel_says_nothing(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == MACHINE
    assert 0 < memory_bytes() <= MACHINE
