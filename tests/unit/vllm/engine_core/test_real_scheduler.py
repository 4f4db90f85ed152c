"""vLLM's own scheduler with requests that fill the edit table many times over; no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inspect_lens._engine.protocol.messages import Envelope, seal
from inspect_lens._engine.tap.edit_table import Placements, Steering
from inspect_lens._settings import Settings
from inspect_lens._vllm.compat.engine_facts import facts_of
from inspect_lens._vllm.engine_core import SCHEDULER_WRAPPERS
from inspect_lens.spec import ENVELOPE_KEY, Add, EngineFacts, LensRequest
from tests.kit.tiny_models import tiny_llama

HIDDEN, ROWS, REQUESTS = 128, 3, 60


def scheduler_of(folder: Path, policy: str) -> tuple[Any, EngineFacts]:
    """vLLM's scheduler, wrapped, and what its engine has."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    class Wrapped(Scheduler):  # type: ignore[misc]
        schedule = SCHEDULER_WRAPPERS["schedule"](Scheduler.schedule)
        add_request = SCHEDULER_WRAPPERS["scheduler_add"](Scheduler.add_request)

    cache = CacheConfig(block_size=32, enable_prefix_caching=True)
    cache.num_gpu_blocks = 400
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=256
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=256,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy=policy,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    attention = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)
    made = Wrapped(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=400,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
        ),
        block_size=32,
        log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
    )
    return made, facts_of(config, Settings.load())


def a_request(i: int, facts: EngineFacts) -> Any:
    """Four of five bring a vector of their own."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    extra: dict[str, Any] | None = None
    if i % 5:
        vector = np.random.default_rng(i).standard_normal(HIDDEN).astype("f4")
        asked = LensRequest(edits=(Add(vector=vector, layers=(1,)),))
        extra = {
            ENVELOPE_KEY: dict(seal(asked, facts, reply="r", n_prompt=12, max_tokens=3).pack())
        }
    return Request(
        request_id=str(i),
        prompt_token_ids=list(range(12)),
        sampling_params=SamplingParams(max_tokens=3, ignore_eos=True, extra_args=extra),
        pooling_params=None,
    )


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_many_requests_with_vectors_of_their_own_share_a_small_table(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight may run at once, and the table has rows for three; the worker's is the judge."""
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import RequestStatus

    monkeypatch.setenv("INSPECT_LENS_BANK_BYTES", str(ROWS * HIDDEN * 4))
    scheduler, facts = scheduler_of(tiny_llama(tmp_path, layers=4, hidden=HIDDEN), policy)
    table = Placements(facts.bank_rows + 1, HIDDEN, [(0, HIDDEN)] * len(facts.taps))
    tap_index = {tap: i for i, tap in enumerate(facts.taps)}
    held: dict[str, Steering] = {}
    started: list[int] = []
    most = 0
    for i in range(REQUESTS):
        scheduler.add_request(a_request(i, facts))
    scheduler.finish_requests(["7", "33"], RequestStatus.FINISHED_ABORTED)
    while scheduler.has_requests():
        step = scheduler.schedule()
        for key in step.finished_req_ids & held.keys():
            table.release(held.pop(key))
        for new in step.scheduled_new_reqs:
            started.append(int(new.req_id))
            if (packed := (new.sampling_params.extra_args or {}).get(ENVELOPE_KEY)) is not None:
                # A full table raises here, as in a worker.
                held[new.req_id] = table.admit(Envelope.unpack(packed), tap_index)
        most = max(most, len(held))
        keys = list(step.num_scheduled_tokens)
        known = {key: scheduler.requests[key] for key in keys}
        is_fed = [r.num_computed_tokens >= r.num_prompt_tokens for r in known.values()]
        scheduler.update_from_output(
            step,
            ModelRunnerOutput(
                req_ids=keys,
                req_id_to_index={key: i for i, key in enumerate(keys)},
                sampled_token_ids=[[5] if fed else [] for fed in is_fed],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
    assert sorted(started) == [i for i in range(REQUESTS) if i not in (7, 33)]
    assert most == ROWS
    edited = [i for i in started if i % 5]
    assert edited == sorted(edited)
    # Those without edits pass: the fifth of them runs before the fifth vector does.
    assert started.index(20) < started.index(6)
    scheduler.schedule()
    assert scheduler.inspect_lens_edits.is_idle
