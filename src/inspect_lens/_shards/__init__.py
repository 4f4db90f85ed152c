"""Shards of captured activations: their format, and folders that servers record into.

The Inspect process and the servers share it. What `collect` and a server wrote is read through
`inspect_lens.data`.
"""

from ._recording import RECORDING, RECORDING_FORMAT, RecordedShard, Recording, ShardWriter
from ._shard import (
    Captured,
    SampleRecord,
    decode_shard,
    encode_shard,
    read_layer,
    read_records,
    shard_facts,
    shard_parts,
    sum_facts,
    to_json,
)

__all__ = [
    "RECORDING",
    "RECORDING_FORMAT",
    "Captured",
    "RecordedShard",
    "Recording",
    "SampleRecord",
    "ShardWriter",
    "decode_shard",
    "encode_shard",
    "read_layer",
    "read_records",
    "shard_facts",
    "shard_parts",
    "sum_facts",
    "to_json",
]
