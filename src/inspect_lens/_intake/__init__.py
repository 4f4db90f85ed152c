"""What calls captured, on its way from a server to a file: fetched, decoded, checked, written.

Done in a thread of the Inspect process, or in a process beside it (`BESIDE`), which leaves the
interpreter to the event loop. May import `_base`, `spec`, `errors`; keeps out Inspect, so that the
other process starts in half a second.
"""

from ._files import (
    absolute,
    has_file,
    is_local,
    join,
    parent,
    read_file,
    stamp_of,
    stem,
    write_file,
)
from ._payload import (
    DTYPES,
    STORAGE,
    ChoiceFields,
    FetchBytes,
    Payload,
    decode_file,
    decode_payload,
    encode_file,
    encode_tensors,
    fetch_payload,
    qk_values,
    read_tensors,
    read_vector,
)
from ._process import BESIDE, Beside, Lost, Source, Stored, fetch_from, file_job, write_job

__all__ = [
    "BESIDE",
    "DTYPES",
    "STORAGE",
    "Beside",
    "ChoiceFields",
    "FetchBytes",
    "Lost",
    "Payload",
    "Source",
    "Stored",
    "absolute",
    "decode_file",
    "decode_payload",
    "encode_file",
    "encode_tensors",
    "fetch_from",
    "fetch_payload",
    "file_job",
    "has_file",
    "is_local",
    "join",
    "parent",
    "qk_values",
    "read_file",
    "read_tensors",
    "read_vector",
    "stamp_of",
    "stem",
    "write_file",
    "write_job",
]
