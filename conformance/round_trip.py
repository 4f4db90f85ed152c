"""Can a finished log be scored again once the server is gone? Test 9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .protocol import NotSupported, Suite, Verdict

__all__ = ["judge_round_trip", "log_round_trip"]

NAME = "9 log round-trip"
LIMIT = "bit-identical scores without a server; a named error without the sidecar"
# What any code raises on data it did not expect names nothing.
UNNAMED = {"AssertionError", "AttributeError", "IndexError", "KeyError", "TypeError", "ValueError"}


def log_round_trip(suite: Suite) -> Verdict:
    """Test 9: an Inspect eval with a probe scorer, then the same scorer on the log alone."""
    backend = suite.backend
    folder = suite.work / "logs"
    try:
        with backend.server() as url:
            first = backend.rescore(["eval", url, str(folder)])
    except NotSupported as reason:
        return Verdict(NAME, None, None, LIMIT, str(reason))
    if "ModuleNotFoundError" in first.get("error", ""):
        lacks = first["error"].strip().splitlines()[-1]
        return Verdict(NAME, None, None, LIMIT, f"not run: Inspect is not there: {lacks}")
    if "error" in first:
        return Verdict(NAME, False, None, LIMIT, f"the eval failed: {first['error']}")
    log = Path(first["log"])
    again = backend.rescore(["score", str(log)])
    sidecars = [p for p in folder.rglob("*") if p.is_file() and p != log]
    for path in sidecars:
        path.unlink()
    without = backend.rescore(["score", str(log)])
    return judge_round_trip(first, again, without, n_sidecars=len(sidecars))


def judge_round_trip(
    first: dict[str, Any], again: dict[str, Any], without: dict[str, Any], *, n_sidecars: int
) -> Verdict:
    """Judge three scorings: live, from the log, and from the log without its sidecars.

    Args:
        first: `scores` by sample id of the eval.
        again: the same, or `error` as `Type: message`.
        without: the same.
        n_sidecars: files that were removed before the third.
    """
    problems = []
    if "error" in again:
        problems.append(f"re-scoring failed: {again['error']}")
        same = 0
    else:
        same = sum(again["scores"].get(k) == v for k, v in first["scores"].items())
        if same != len(first["scores"]):
            problems.append(f"{len(first['scores']) - same} scores differ")
    if "error" not in again:
        if n_sidecars and "error" not in without:
            problems.append("scored without the sidecar as if nothing were missing")
        elif n_sidecars and without["error"].partition(":")[0] in UNNAMED:
            problems.append(f"the error names nothing: {without['error']}")
    return Verdict(
        NAME,
        not problems,
        f"{same} of {len(first['scores'])} scores identical",
        LIMIT,
        "; ".join(problems)[:600],
        {"sidecars": n_sidecars, "error_without_sidecar": str(without.get("error", ""))[:300]},
    )
