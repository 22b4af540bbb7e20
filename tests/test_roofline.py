"""The arithmetic of floors against published totals and against a count of real modules."""

import math

import pytest

from minserve.roofline import (
    H200,
    distinct_experts,
    kv_bytes_per_token,
    parameters,
    shape_from_config,
    step_floor,
    weight_bytes,
    wire_seconds,
)
from tools.expert_parallel_table import crossing

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "topk_method": "noaux_tc", "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "vocab_size": 163840, "n_routed_experts": 384,
    "first_k_dense_replace": 1,
}  # fmt: skip
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
MOONLIGHT = {
    "model_type": "deepseek_v3", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 163840, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 11264, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "topk_method": "noaux_tc", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "published_billions"), [(DEEPSEEK_V3, 671.0), (KIMI_K2, 1026.4), (QWEN3_30B, 30.5), (MOONLIGHT, 16.0)]
)
def test_totals_match_the_published_ones(config, published_billions):
    total = sum(parameters(shape_from_config(config)).values()) / 1e9
    assert total == pytest.approx(published_billions, abs=0.06)


@pytest.mark.parametrize(
    ("config", "batch", "milliseconds"),
    [
        (QWEN3_30B, 1, 1.44),
        (QWEN3_30B, 8, 6.20),
        (QWEN3_30B, 32, 13.1),
        (QWEN3_30B, 128, 17.1),
        (QWEN3_30B | {"quantization_config": {"quant_method": "fp8"}}, 1, 0.81),
        (QWEN3_30B | {"quantization_config": {"quant_method": "fp8"}}, 128, 10.1),
        (MOONLIGHT, 1, 1.21),
        (MOONLIGHT, 8, 4.28),
        (MOONLIGHT, 32, 7.22),
        (MOONLIGHT, 128, 8.22),
    ],
)
def test_floors_of_an_h200_at_1k_context(config, batch, milliseconds):
    assert step_floor(shape_from_config(config), H200, batch, 1024).seconds * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_kv_of_a_token():
    assert kv_bytes_per_token(shape_from_config(QWEN3_30B)) == 48 * 2 * 4 * 128 * 2
    assert kv_bytes_per_token(shape_from_config(MOONLIGHT)) == 27 * 576 * 2


def test_fp8_halves_the_experts_and_leaves_the_head():
    plain, fp8 = (weight_bytes(shape_from_config(QWEN3_30B | extra)) for extra in ({}, DEEPSEEK_V3_FP8))
    assert fp8["routed_experts"] / plain["routed_experts"] == pytest.approx(0.5, rel=1e-3)
    assert fp8["lm_head"] == plain["lm_head"]


DEEPSEEK_V3_FP8 = {"quantization_config": {"quant_method": "fp8"}}


def test_distinct_experts_by_simulation_free_identities():
    assert distinct_experts(128, 8, 1) == pytest.approx(8)
    assert distinct_experts(128, 8, 1e6) == pytest.approx(128)
    assert distinct_experts(0, 0, 5) == 0


def test_mlp_only_layers_and_sparse_step_are_honoured():
    shape = shape_from_config(QWEN3_30B | {"decoder_sparse_step": 2, "mlp_only_layers": [1, 3]})
    assert shape.num_sparse_layers == 22
    assert shape.num_dense_layers == 26


def test_expert_parallelism_reads_fewer_experts_and_pays_for_the_wire():
    shape = shape_from_config(DEEPSEEK_V3)
    one, eight = step_floor(shape, H200, 8, 1024), step_floor(shape, H200, 8, 1024, ep_size=8)
    assert eight.parts["routed_experts"].bytes < one.parts["routed_experts"].bytes
    expected = 58 * 8 * 8 * 7168 * (1 + 4 / 128 + 2) * 7 / 8 / 350e9
    assert math.isclose(max(eight.wire_seconds.values()), expected)
    assert one.wire_seconds == {"nvlink": 0, "rdma": 0}


def test_between_hosts_the_slower_wire_sets_the_time():
    shape = shape_from_config(DEEPSEEK_V3)
    alone, paired = (wire_seconds(shape, H200, 32, ranks) for ranks in (8, 16))
    assert alone["rdma"] == 0 < alone["nvlink"]
    # Of 16 ranks a token's experts are 7 times on this host's others and 8 times on the other host's.
    assert math.isclose(paired["rdma"] * 50e9 / (paired["nvlink"] * 350e9), 8 / 7)
    assert paired["rdma"] > paired["nvlink"]


def test_where_each_resource_takes_over():
    shape = shape_from_config(DEEPSEEK_V3)
    first = crossing(shape, 16, most=256)
    assert first["weights"] == 1 and first["rdma"] is not None
    shares = [
        (
            step_floor(shape, H200, batch, 4096, 16).wire_seconds["rdma"],
            sum(p.bytes for n, p in step_floor(shape, H200, batch, 4096, 16).parts.items() if n != "kv_cache") / H200.bandwidth,
        )
        for batch in (first["rdma"] - 1, first["rdma"])
    ]
    assert shares[0][0] < shares[0][1] and shares[1][0] > shares[1][1]


def test_a_missing_field_is_named():
    with pytest.raises(KeyError, match="hidden_size"):
        shape_from_config({"num_hidden_layers": 1, "num_attention_heads": 1})
