"""Labelled data sets, their registry, and stores of activations on disk."""

from inspect_lens._base.shipped import organism_data
from inspect_lens._shards import (
    Captured,
    RecordedShard,
    Recording,
    SampleRecord,
    ShardWriter,
    encode_shard,
    read_layer,
    read_records,
)

from ._registry import DATASETS, DatasetInfo, load_dataset
from ._rows import read_rows
from ._sample import Message, ProbeDataset, ProbeSample, Source
from ._store import MANIFEST, STORE_FORMAT, ActivationStore, read_whole, write_whole
from ._synthetic import Planted, instructed_pairs, planted_activations

__all__ = [
    "DATASETS",
    "MANIFEST",
    "STORE_FORMAT",
    "ActivationStore",
    "Captured",
    "DatasetInfo",
    "Message",
    "Planted",
    "ProbeDataset",
    "ProbeSample",
    "RecordedShard",
    "Recording",
    "SampleRecord",
    "ShardWriter",
    "Source",
    "encode_shard",
    "instructed_pairs",
    "load_dataset",
    "organism_data",
    "planted_activations",
    "read_layer",
    "read_records",
    "read_rows",
    "read_whole",
    "write_whole",
]
