"""Shards of captured activations: their format, and folders that servers record into.

The Inspect process and the servers share it. What `collect` and a server wrote is read through
`inspect_lens.data`.
"""

from ._recording import RECORDING, RECORDING_FORMAT, RecordedShard, Recording, ShardWriter
from ._shard import (
    Captured,
    LayerPlace,
    SampleRecord,
    decode_shard,
    encode_shard,
    find_layers,
    read_layer,
    read_layers,
    read_records,
    read_spans,
    shard_parts,
)

__all__ = [
    "RECORDING",
    "RECORDING_FORMAT",
    "Captured",
    "LayerPlace",
    "RecordedShard",
    "Recording",
    "SampleRecord",
    "ShardWriter",
    "decode_shard",
    "encode_shard",
    "find_layers",
    "read_layer",
    "read_layers",
    "read_records",
    "read_spans",
    "shard_parts",
]
