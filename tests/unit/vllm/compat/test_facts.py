"""What the configuration says: which taps there are, and which engines are not served."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from inspect_lens import CaptureSpec, LensRequest
from inspect_lens._engine.protocol import readouts
from inspect_lens._settings import Settings
from inspect_lens._vllm.compat.engine_facts import (
    computing_facts,
    facts_mark,
    facts_of,
    n_experts,
    refusal,
)
from inspect_lens.errors import SpecError, UnsupportedError
from inspect_lens.probe import CaptureFacts
from inspect_lens.spec import TapPoint, check_request


def config(**changes: Any) -> Any:
    """What is read of vLLM's configuration, with `part__field` changed."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "runner_type": "generate",
            "is_encoder_decoder": False,
            "hf_config": SimpleNamespace(),
            "hf_text_config": SimpleNamespace(num_hidden_layers=4),
            "get_hidden_size": lambda: 8,
            "dtype": "torch.float32",
            "model": "org/model",
            "max_model_len": 64,
            "quantization": None,
            "use_mla": False,
            "is_hybrid": False,
        },
        "parallel_config": {
            "nnodes": 1,
            "master_addr": "10.0.0.1",
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "distributed_executor_backend": None,
            "enable_dbo": False,
            "data_parallel_backend": "mp",
            "data_parallel_master_ip": "10.0.0.1",
            "data_parallel_size": 1,
            "data_parallel_size_local": 1,
            "data_parallel_external_lb": False,
            "data_parallel_hybrid_lb": False,
            "data_parallel_rank_local": None,
            "_api_process_count": 1,
        },
        "scheduler_config": {
            "max_num_batched_tokens": 16,
            "max_num_seqs": 4,
            "async_scheduling": True,
            "enable_chunked_prefill": True,
            "disable_chunked_mm_input": False,
            "scheduler_cls": None,
            "stream_interval": 1,
        },
        "cache_config": {
            "enable_prefix_caching": True,
            "cache_dtype": "auto",
            "block_size": 16,
            "kv_sharing_fast_prefill": False,
            "mamba_cache_mode": "none",
        },
        "compilation_config": {},
        "device_config": {"device_type": "cpu"},
        "observability_config": {"otlp_traces_endpoint": None},
    }
    top: dict[str, Any] = {
        "speculative_config": None,
        "kv_transfer_config": None,
        "lora_config": None,
    }
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            parts[part][field] = value
        else:
            top[part] = value
    return SimpleNamespace(**{k: SimpleNamespace(**v) for k, v in parts.items()}, **top)


SPECULATIVE = {"speculative_config": object()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel_config__pipeline_parallel_size": 4},
        SPECULATIVE | {"scheduler_config__async_scheduling": False},
        {"parallel_config__data_parallel_size": 2, "parallel_config__data_parallel_size_local": 2},
        {
            "parallel_config__data_parallel_size": 2,
            "parallel_config__data_parallel_external_lb": True,
        },
    ],
)
def test_served(changes: dict[str, Any]) -> None:
    assert refusal(config(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (SPECULATIVE, "no-async-scheduling"),
        (
            SPECULATIVE
            | {
                "scheduler_config__async_scheduling": False,
                "parallel_config__pipeline_parallel_size": 2,
            },
            "over a pipeline",
        ),
        (
            SPECULATIVE
            | {"scheduler_config__async_scheduling": False, "scheduler_config__stream_interval": 4},
            "stream_interval",
        ),
        ({"parallel_config__data_parallel_size": 2}, "several"),
        ({"parallel_config__nnodes": 2}, "several"),
        ({"parallel_config__distributed_executor_backend": "external_launcher"}, "launcher"),
        ({"model_config__runner_type": "pooling"}, "generate"),
    ],
)
def test_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    found = refusal(config(**changes))
    assert found is not None
    assert reason in found


REMOTE_ENGINES = {"parallel_config__data_parallel_size": 2}
REMOTE_RANKS = {"parallel_config__nnodes": 2}
KEY = "0123456789abcdef"


@pytest.mark.parametrize("changes", [REMOTE_ENGINES, REMOTE_RANKS], ids=["engines", "ranks"])
@pytest.mark.parametrize(
    "settings",
    [{"KEY": KEY}, {"OPEN": "1"}, {"ADDRESS": "127.0.0.1"}, {"ADDRESS": "[::1]:7000-7001"}],
    ids=lambda settings: next(iter(settings)),
)
def test_several_hosts_are_served_with_a_secret_or_without_one_where_nobody_else_listens(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], settings: dict[str, str]
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(f"INSPECT_LENS_HOSTS_{name}", value)
    assert refusal(config(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        (REMOTE_RANKS, "", "INSPECT_LENS_HOSTS_KEY"),
        (REMOTE_ENGINES, "", "INSPECT_LENS_HOSTS_KEY"),
        (REMOTE_ENGINES, KEY[:-1], "fewer than 16"),
        (REMOTE_RANKS | REMOTE_ENGINES, KEY, "span hosts themselves"),
        (REMOTE_ENGINES | {"parallel_config__data_parallel_backend": "ray"}, KEY, "Ray"),
    ],
)
def test_what_is_refused_over_several_hosts(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], key: str, reason: str
) -> None:
    monkeypatch.setenv("INSPECT_LENS_HOSTS_ADDRESS", "10.0.0.1")
    monkeypatch.setenv("INSPECT_LENS_HOSTS_KEY", key)
    assert reason in str(refusal(config(**changes)))
    # One host needs none of it.
    assert refusal(config()) is None


def test_hosts_agree_on_facts_and_not_on_where_the_model_lies() -> None:
    facts = facts_of(config(), Settings())
    assert facts_mark(facts) == facts_mark(replace(facts, model="elsewhere"))
    for other in (
        facts_of(config(), Settings(layers="1,2")),
        facts_of(config(), Settings(sites="resid_post")),
        replace(facts, ring_rows=facts.ring_rows + 1),
    ):
        assert facts_mark(facts) != facts_mark(other)


def taps(**settings: Any) -> tuple[TapPoint, ...]:
    return facts_of(config(), Settings(**settings)).taps


def test_both_ends_of_a_block_cost_one_tap_more_than_one() -> None:
    default = taps()
    assert default == (TapPoint("resid_pre", 0), *(TapPoint("resid_post", i) for i in range(4)))
    assert taps(sites="resid_post") == default[1:]
    assert taps(layers="2") == (TapPoint("resid_post", 1), TapPoint("resid_post", 2))


def test_taps_come_in_the_order_of_a_forward_pass() -> None:
    found = taps(sites="all", layers="0,1")
    assert [tap.site for tap in found] == [
        "resid_pre",
        "attn_out",
        "mlp_out",
        "resid_post",
        "attn_out",
        "mlp_out",
        "resid_post",
    ]


@pytest.mark.parametrize("sites", ["", "resid_between", "resid_post,oops"])
def test_an_unknown_site_is_refused(sites: str) -> None:
    with pytest.raises(SpecError, match="INSPECT_LENS_SITES"):
        taps(sites=sites)


UNCUT = {"scheduler_config__enable_chunked_prefill": False}
"""Such an engine's steps cannot be cut, so what does not fit the buffer is refused."""


def test_any_engine_that_cuts_prompts_serves_all_layers_whatever_the_setting() -> None:
    facts = facts_of(config(), Settings(ring_bytes=1, sites="all"))
    assert facts.least_step_tokens == 4
    assert facts.ring_rows == 4 * len(facts.taps)
    everything = LensRequest(capture=CaptureSpec(site=facts.sites))
    check_request(everything, facts)
    generous = facts_of(config(), Settings(sites="all"))
    assert generous.ring_rows == 16 * len(facts.taps)


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({"speculative_config": SimpleNamespace(num_speculative_tokens=2)}, 12),
        ({"speculative_config": SimpleNamespace(num_speculative_tokens=9)}, 16),
        (UNCUT, 16),
        ({"scheduler_config__disable_chunked_mm_input": True}, 16),
        ({"scheduler_config__scheduler_cls": "somebody.else:Scheduler"}, 16),
        ({"scheduler_config__scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, 4),
        ({"cache_config__mamba_cache_mode": "align", "cache_config__block_size": 8}, 8),
    ],
)
def test_how_short_a_step_can_be(changes: dict[str, Any], least: int) -> None:
    assert facts_of(config(**changes), Settings()).least_step_tokens == least


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_what_a_refusal_advises_is_enough(device: str, dtype: str) -> None:
    request = LensRequest(capture=CaptureSpec())
    changes = UNCUT | {"device_config__device_type": device, "model_config__dtype": dtype}
    small = Settings(ring_bytes=1000, sites="all")
    with pytest.raises(UnsupportedError, match="4 taps times 16 tokens") as refused:
        check_request(request, facts_of(config(**changes), small))
    advice = re.search(r"max_num_batched_tokens of (\d+).*_RING_BYTES=(\d+)", str(refused.value))
    assert advice is not None
    tokens, nbytes = map(int, advice.groups())
    fewer = changes | {"scheduler_config__max_num_batched_tokens": tokens}
    check_request(request, facts_of(config(**fewer), small))
    check_request(request, facts_of(config(**changes), replace(small, ring_bytes=nbytes)))
    for options, settings in (
        (fewer | {"scheduler_config__max_num_batched_tokens": tokens + 1}, small),
        (changes, replace(small, ring_bytes=nbytes - 1)),
    ):
        with pytest.raises(UnsupportedError):
            check_request(request, facts_of(config(**options), settings))


@pytest.mark.parametrize(("stages", "copies"), [(1, 2), (2, 4), (3, 6), (8, 6)])
@pytest.mark.parametrize("piece", [1 << 10, 1 << 20])
def test_what_crosses_a_pipeline_has_its_part_of_the_memory(
    stages: int, copies: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = 1 << 18
    changes = {
        "device_config__device_type": "cuda",
        "parallel_config__pipeline_parallel_size": stages,
        "scheduler_config__max_num_batched_tokens": 4096,
    }
    monkeypatch.setattr(readouts, "CROSSING_PIECE", piece)
    facts = facts_of(config(**changes), Settings(ring_bytes=ring))
    # Rows of 8 numbers of 4 bytes.
    assert facts.ring_row_bytes == copies * 32

    def held(rows: int) -> int:
        of_piece = 32 * rows - min(32 * rows, piece) if stages > 2 else 0
        return copies * rows * 32 - of_piece

    assert held(facts.ring_rows) <= ring < held(facts.ring_rows + 1)


def test_no_step_of_no_tokens_is_advised() -> None:
    tiny = Settings(ring_bytes=100, sites="all")
    with pytest.raises(UnsupportedError) as refused:
        check_request(LensRequest(capture=CaptureSpec()), facts_of(config(**UNCUT), tiny))
    assert "max_num_batched_tokens" not in str(refused.value)
    enough = re.search(r"start the engine with INSPECT_LENS_RING_BYTES=(\d+)", str(refused.value))
    assert enough is not None
    large = replace(tiny, ring_bytes=int(enough[1]))
    check_request(LensRequest(capture=CaptureSpec()), facts_of(config(**UNCUT), large))


HEADS = {
    "model_config__hf_text_config": SimpleNamespace(
        num_hidden_layers=4, intermediate_size=40, num_local_experts=6
    ),
    "model_config__get_head_size": lambda: 3,
    "model_config__get_total_num_kv_heads": lambda: 2,
    "model_config__get_num_attention_heads": lambda parallel: 8 // parallel.tensor_parallel_size,
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_widths_of_sites_and_their_shares(ranks: int) -> None:
    parallel = {"parallel_config__tensor_parallel_size": ranks}
    facts = facts_of(
        config(**HEADS, **parallel),
        replace(Settings(), sites="q,k,v,z,router_logits,mlp_hidden,resid_post"),
    )
    heads, keys = (24, ranks, 8), (6, min(2, ranks), 2)
    found = {width.site: width[1:] for width in facts.widths}
    assert found == {
        "q": heads, "k": keys, "v": keys, "z": heads, "router_logits": (6, 1, 0),
        "mlp_hidden": (40, ranks, 0),
    }  # fmt: skip
    assert facts.width_of("resid_post")[1:] == (8, 1, 0)
    # A row of the buffer has 8 numbers.
    per_layer = {1: 3 + 1 + 1 + 3 + 1 + 5 + 1, 2: 2 + 1 + 1 + 2 + 1 + 3 + 1, 4: 4 * 1 + 1 + 2 + 1}
    assert facts.rows_of(facts.taps) == 4 * per_layer[ranks]
    assert facts.ring_rows == facts.rows_of(facts.taps) * 16


@pytest.mark.parametrize(
    ("site", "changes", "message"),
    [
        ("router_logits", {}, "no router_logits: it has no experts"),
        ("mlp_hidden", {}, "no mlp_hidden: it names no number of them"),
        ("k", {"model_config__use_mla": True}, r"keeps no keys per head \(MLA\)"),
    ],
)
def test_a_site_that_a_model_does_not_have_is_refused_by_name(
    site: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        facts_of(config(**changes), replace(Settings(), sites=site))


def test_tokens_of_images_are_known_where_a_configuration_is_inside_another() -> None:
    from transformers import PretrainedConfig

    inner = PretrainedConfig(image_token_index=7, audio_token_id=8)
    outer = PretrainedConfig(
        thinker_config=inner, video_token_id=9, more={"image_token_id": 10}, num_image_token_id=11
    )
    facts = facts_of(config(model_config__hf_config=outer), Settings())
    assert facts.placeholders == {7, 8, 9, 10}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 0),
        ({"num_experts": 1}, 1),
        ({"num_hidden_layers": 4, "num_experts_per_tok": 2}, 0),
        ({"num_local_experts": 4}, 4),
        ({"moe_num_experts": [64, 32]}, 64),
        ({"ffn_config": {"moe_num_experts": 16}}, 16),
        ({"block_configs": [{"block_type": "mamba"}, {"n_routed_experts": 8}]}, 8),
        ({"text_config": {"rope_parameters": None, "ffn_config": {"num_experts": 1}}}, 1),
    ],
)
def test_experts_are_found_in_all_parts_of_a_configuration(
    fields: dict[str, Any], expected: int
) -> None:
    from transformers import PreTrainedConfig

    made = PreTrainedConfig(**fields)
    assert n_experts(made) == expected
    assert n_experts(SimpleNamespace(text=made)) == expected
    assert n_experts(None) == 0


def test_a_router_is_as_wide_as_the_experts_of_an_inner_configuration() -> None:
    text = SimpleNamespace(
        **{**vars(config().model_config.hf_text_config), "ffn_config": {"moe_num_experts": 16}}
    )
    facts = facts_of(
        config(model_config__hf_text_config=text),
        replace(Settings(), sites="router_logits,resid_post"),
    )
    assert {w.site: w.width for w in facts.widths}["router_logits"] == 16


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ("auto", "float32"),
        ("float32", "float32"),
        ("fp8", "fp8"),
        ("fp8_e4m3", "fp8"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_the_dtype_of_the_cache_is_told(found: str, told: str) -> None:
    facts = facts_of(config(cache_config__cache_dtype=found), Settings())
    assert facts.numerics.kv_cache_dtype == told
    # Hosts need not agree on its name: attention that loads in a worker may change that.
    assert facts_mark(facts) == facts_mark(replace(facts, kv_cache_dtype="fp8_ds_mla"))


def test_a_server_tells_what_quantises_weights_and_cache() -> None:
    engine = SimpleNamespace(
        vllm_config=config(model_config__quantization="auto_gptq", cache_config__cache_dtype="fp8"),
        input_processor=SimpleNamespace(tokenizer=None),
    )
    engine.model_config = engine.vllm_config.model_config
    engine.model_config.tokenizer = "org/model"
    told = computing_facts(SimpleNamespace(engine_client=engine))
    facts = CaptureFacts.known(told)
    assert (facts.quantization, facts.kv_cache_dtype) == ("auto_gptq", "fp8")
