"""What an operator may say of sinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from inspect_lens._vllm.sinks.sink import read_sinks
from inspect_lens.errors import SpecError


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("nonsense", "not JSON"),
        ("[1]", "not JSON, and not a file"),
        ('{"../a": {"store": "x"}}', "allowed are 1 to 128"),
        ('{"a": {}}', "SINKS: a: give one of store"),
        ('{"a": {"store": "x", "callback": "y"}}', "give one of store"),
        ('{"a": {"store": "x", "share": 1.5}}', "a: share"),
        ('{"a": {"store": "x", "share": "1"}}', "a: share"),
        ('{"a": {"store": "x", "when_slow": "block"}}', "'drop', 'sample' or 'spill'"),
        ('{"a": {"store": "x", "when_slow": "spill"}}', "go together"),
        ('{"a": {"store": "x", "spill": "/tmp"}}', "go together"),
        ('{"a": {"store": "x", "positions": [1]}}', "a: positions"),
        ('{"a": {"store": "x", "layers": []}}', "is empty"),
        ('{"a": {"store": "x", "site": ["q", "k"]}}', "a: site"),
        ('{"a": {"store": "x", "memory_bytes": 0}}', "a: memory_bytes"),
        ('{"a": {"store": "x", "path": 1}}', "a: path"),
    ],
)
def test_a_wrong_setting_stops_the_start_and_names_the_field(setting: str, message: str) -> None:
    with pytest.raises(SpecError, match="INSPECT_LENS_SINKS") as caught:
        read_sinks(setting)
    assert message in str(caught.value)


def test_a_setting_is_json_or_a_file_of_it(tmp_path: Path) -> None:
    text = '{"a": {"store": "s3://b/c", "layers": [4, 2], "share": 0.01}}'
    (tmp_path / "sinks.json").write_text(text)
    for setting in (text, str(tmp_path / "sinks.json")):
        (made,) = read_sinks(setting).values()
        assert (made.layers, made.share, made.requests) == ((2, 4), 0.01, True)
    assert read_sinks(" ") == {}
