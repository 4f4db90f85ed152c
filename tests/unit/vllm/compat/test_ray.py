"""Engines whose workers Ray places: any of them may be on another host, and so needs a secret."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from inspect_lens._settings import Settings
from inspect_lens._vllm.compat.engine_facts import (
    facts_of,
    links_of,
    may_have_remote_ranks,
    refusal,
)
from tests.unit.vllm.compat.test_facts import config

KEY = "0123456789abcdef"
RAY = {"parallel_config__distributed_executor_backend": "ray"}


class OwnExecutor:
    """As vLLM's are marked, and those that are made from them."""

    uses_ray = True


@pytest.fixture(autouse=True)
def newer_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1")
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)


@pytest.mark.parametrize("executor", ["ray", OwnExecutor])
@pytest.mark.parametrize(
    "settings",
    [{"KEY": KEY}, {"OPEN": "1"}, {"ADDRESS": "127.0.0.1"}],
    ids=lambda settings: next(iter(settings)),
)
def test_workers_of_ray_are_served_where_rows_may_travel(
    monkeypatch: pytest.MonkeyPatch, executor: Any, settings: dict[str, str]
) -> None:
    engine = config(parallel_config__distributed_executor_backend=executor)
    assert may_have_remote_ranks(engine)
    reason = str(refusal(engine))
    assert "INSPECT_LENS_HOSTS_KEY" in reason
    assert "INSPECT_LENS_HOSTS_ADDRESS=127.0.0.1" in reason
    for name, value in settings.items():
        monkeypatch.setenv(f"INSPECT_LENS_HOSTS_{name}", value)
    assert refusal(engine) is None


def test_an_address_that_workers_do_not_know_stands_for_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # vLLM does not tell Ray's workers VLLM_HOST_IP: they would decide otherwise.
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    assert "INSPECT_LENS_HOSTS_KEY" in str(refusal(config(**RAY)))


@pytest.mark.parametrize("executor", ["mp", "uni", None])
def test_other_executors_have_the_workers_of_one_host(executor: str | None) -> None:
    engine = config(parallel_config__distributed_executor_backend=executor)
    assert not may_have_remote_ranks(engine)
    assert refusal(engine) is None
    assert links_of(engine, Settings(), facts_of(engine, Settings())) is None


def test_what_is_refused_with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSPECT_LENS_HOSTS_KEY", KEY)
    two = {"parallel_config__data_parallel_size": 2, "parallel_config__data_parallel_size_local": 2}
    assert "whose workers Ray places" in str(refusal(config(**RAY, **two)))
    backend = {"parallel_config__data_parallel_backend": "ray"}
    assert "--data-parallel-backend mp" in str(refusal(config(**two, **backend)))
    monkeypatch.setenv("INSPECT_LENS_HOSTS_KEY", KEY[:-1])
    assert "fewer than 16" in str(refusal(config(**RAY)))
    monkeypatch.setenv("INSPECT_LENS_HOSTS_KEY", KEY)
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    assert "VLLM_USE_RAY_V2_EXECUTOR_BACKEND" in str(refusal(config(**RAY)))
    # In 0.33 there is no other one.
    envs = importlib.import_module("vllm.envs")
    monkeypatch.delitem(envs.environment_variables, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND")
    assert refusal(config(**RAY)) is None


def test_the_front_end_listens_where_it_is_told_to_or_at_the_address_of_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def address(**settings: Any) -> str:
        given = Settings(hosts_key=KEY, **settings)
        links = links_of(config(**RAY), given, facts_of(config(**RAY), given))
        assert links is not None
        assert links.key == KEY
        return links.address

    # Ray need not be installed; it says what address this host has in its cluster.
    ray = SimpleNamespace(get_node_ip_address=lambda: "fd00::7")
    monkeypatch.setitem(sys.modules, "ray.util", ray)
    assert address() == "[fd00::7]"
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.3")
    assert address() == "10.0.0.3"
    assert address(hosts_address="10.0.0.1:7000-7010") == "10.0.0.1:7000-7010"
