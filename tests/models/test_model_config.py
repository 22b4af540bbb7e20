"""config.json to ModelConfig: published shapes, both spellings, and a clear refusal of what is not served."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tiny_checkpoints import VARIANTS

from minserve.errors import CheckpointError, ExitCode
from minserve.models.layers.rotary import inverse_frequencies
from minserve.models.model_config import GqaConfig, MlaConfig
from minserve.models.registry import load_model_config

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_theta": 10000,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
DEEPSEEK_V2 = {
    **{key: value for key, value in DEEPSEEK_V3.items() if key not in ("quantization_config", "num_nextn_predict_layers")},
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 5120,
    "num_hidden_layers": 60,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "topk_group": 3,
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 16.0,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 151645,
    "use_sliding_window": False,
    "sliding_window": None,
}
QWEN2 = {
    **{key: value for key, value in QWEN3.items() if key not in ("head_dim", "norm_topk_prob")},
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
MODELS = {"v3": DEEPSEEK_V3, "v2": DEEPSEEK_V2, "qwen3": QWEN3, "qwen2": QWEN2}


@pytest.fixture
def parse(tmp_path):
    """`parse(values, generation_config)`: the ModelConfig of a folder with these files."""

    def parse(values, generation=None):
        (tmp_path / "config.json").write_text(json.dumps(values))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_model_config(tmp_path)

    return parse


def _without(values, *names):
    return {key: value for key, value in values.items() if key not in names}


def test_deepseek_v3(parse):
    config = parse(DEEPSEEK_V3)
    attention, moe = config.attention, config.moe
    assert isinstance(attention, MlaConfig)
    assert (attention.num_heads, attention.q_lora_rank, attention.kv_lora_rank) == (128, 1536, 512)
    assert (attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim) == (128, 64, 128)
    assert attention.scale * math.sqrt(192) == pytest.approx(1.8739, abs=1e-4)
    assert config.rope.yarn.attention_factor == pytest.approx(1.0)
    assert config.rope.interleaved
    assert moe.sparse_layers == (False,) * 3 + (True,) * 58
    assert (moe.num_experts, moe.intermediate_size, moe.shared_intermediate_size, moe.shared_gated) == (256, 2048, 2048, False)
    router = moe.router
    assert (router.top_k, router.num_groups, router.top_k_groups, router.group_score) == (8, 8, 4, "top2_sum")
    assert (router.scoring, router.normalize, router.scale, moe.correction_bias) == ("sigmoid", True, 2.5, True)
    assert (config.num_nextn_predict_layers, config.max_position_embeddings) == (1, 163840)
    assert config.raw["rope_scaling"]["factor"] == 40


def test_deepseek_v2(parse):
    config = parse(DEEPSEEK_V2)
    assert config.attention.scale * math.sqrt(192) == pytest.approx(1.5896, abs=1e-4)
    assert config.moe.shared_intermediate_size == 3072
    router = config.moe.router
    assert (router.scoring, router.group_score, router.top_k_groups) == ("softmax", "max", 3)
    assert (router.normalize, router.scale, config.moe.correction_bias) == (False, 16.0, False)
    greedy = parse({**DEEPSEEK_V2, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "q_lora_rank": None})
    assert greedy.moe.router.group_score == "none"
    assert greedy.attention.q_lora_rank is None
    normalised = parse({**DEEPSEEK_V2, "norm_topk_prob": True}).moe.router
    assert (normalised.normalize, normalised.scale) == (True, 1.0)


@pytest.mark.parametrize(("factor", "expected"), [(32.0, 1.8133), (64.0, 2.0047)])
def test_kimi_k2(parse, factor, expected):
    rope = {**DEEPSEEK_V3["rope_scaling"], "factor": factor, "beta_fast": 1.0}
    values = {
        **_without(DEEPSEEK_V3, "num_nextn_predict_layers"),
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "rope_theta": 50000.0,
        "rope_scaling": rope,
        "max_position_embeddings": 131072,
    }
    config = parse(values)
    assert config.model_type == "kimi_k2"
    assert config.attention.scale * math.sqrt(192) == pytest.approx(expected, abs=1e-4)
    assert config.moe.router.group_score == "none"
    assert config.num_nextn_predict_layers == 0
    assert config.max_position_embeddings == 4096 * factor
    assert config.rope.theta == 50000.0


def test_qwen(parse):
    qwen3, qwen2 = parse(QWEN3), parse(QWEN2)
    assert qwen3.attention == GqaConfig(32, 4, 128, qkv_bias=False, output_bias=False, qk_norm=True, scale=128**-0.5)
    assert qwen2.attention == GqaConfig(16, 16, 128, qkv_bias=True, output_bias=False, qk_norm=False, scale=128**-0.5)
    assert (qwen3.moe.router.normalize, qwen2.moe.router.normalize) == (True, False)
    assert (qwen3.moe.shared_intermediate_size, qwen2.moe.shared_intermediate_size) == (0, 5632)
    assert qwen2.moe.shared_gated
    assert (qwen3.rope.theta, qwen3.rope.interleaved) == (1e6, False)


def test_qwen_dense_layers(parse):
    assert parse({**QWEN3, "mlp_only_layers": [0, 47]}).moe.sparse_layers == (False, *(True,) * 46, False)
    assert parse({**QWEN3, "num_hidden_layers": 4, "decoder_sparse_step": 2}).moe.sparse_layers == (False, True, False, True)
    assert parse({**QWEN3, "num_experts": 0}).moe is None


def test_every_fourth_deepseek_layer(parse):
    values = {**DEEPSEEK_V3, "num_hidden_layers": 8, "moe_layer_freq": 4, "first_k_dense_replace": 1}
    assert parse(values).moe.sparse_layers == tuple(layer == 4 for layer in range(8))


@pytest.mark.parametrize("model", ["v3", "v2"])
def test_both_spellings_of_rope_agree(parse, model):
    old = parse(MODELS[model])
    rope = dict(MODELS[model]["rope_scaling"])
    rope["rope_type"] = rope.pop("type")
    new = parse({**_without(MODELS[model], "rope_theta", "rope_scaling"), "rope_parameters": {**rope, "rope_theta": 10000.0}})
    assert (new.rope, new.attention) == (old.rope, old.attention)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_frequencies_are_transformers(tiny, variant):
    checkpoint = tiny(variant)
    rope = load_model_config(checkpoint.directory).rope
    theirs = checkpoint.reference.model.rotary_emb
    torch.testing.assert_close(inverse_frequencies(rope), theirs.inv_freq, rtol=1e-6, atol=0)
    assert (rope.yarn.attention_factor if rope.yarn else 1.0) == pytest.approx(theirs.attention_scaling)


def test_mscale_counts_without_mscale_all_dim(parse):
    """As DeepSeek publishes it, each of the two counts by itself; transformers ignores a lone one."""
    alone = parse({**DEEPSEEK_V2, "rope_scaling": {**YARN, "mscale": 0.707}})
    assert alone.rope.yarn.attention_factor == pytest.approx(0.1 * 0.707 * math.log(40) + 1)
    assert alone.attention.scale == pytest.approx(192**-0.5)
    other = parse({**DEEPSEEK_V2, "rope_scaling": {**YARN, "mscale_all_dim": 0.707}})
    assert other.rope.yarn.attention_factor == pytest.approx((0.1 * math.log(40) + 1) / (0.1 * 0.707 * math.log(40) + 1))


def test_qwen_stretched_by_yarn(parse):
    config = parse({**QWEN3, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}})
    assert config.max_position_embeddings == 131072
    assert config.rope.yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert config.attention.scale == pytest.approx(128**-0.5)
    assert (config.rope.yarn.beta_fast, config.rope.yarn.beta_slow) == (32.0, 1.0)


def test_partial_rotation(parse):
    assert parse({**QWEN3, "partial_rotary_factor": 0.25}).rope.rotary_dim == 32
    inner = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    config = parse({**QWEN3, "rope_parameters": inner})
    assert (config.rope.rotary_dim, config.rope.theta) == (64, 1e7)


def test_a_text_model_within_a_wrapper(parse):
    config = parse({"architectures": ["Wrapper"], "model_type": "wrapper", "text_config": QWEN3, "vision_config": {}})
    assert (config.architecture, config.model_type, config.num_layers) == ("Qwen3MoeForCausalLM", "qwen3_moe", 48)


def test_eos_ids_of_both_files(parse):
    assert parse({**QWEN3, "eos_token_id": None}).eos_token_ids == ()
    assert parse(QWEN3, generation={"eos_token_id": [151645, 151643]}).eos_token_ids == (151645, 151643)
    assert parse({**QWEN3, "eos_token_id": [2, 1]}, generation={}).eos_token_ids == (2, 1)


def test_dtype(parse):
    assert parse(QWEN3).dtype == "bfloat16"
    assert parse({**QWEN3, "torch_dtype": "float16"}).dtype == "float16"
    assert parse({**QWEN3, "dtype": "float32", "torch_dtype": "float16"}).dtype == "float32"


def test_absent_fields_take_the_published_defaults(parse):
    optional = "n_group topk_group norm_topk_prob routed_scaling_factor first_k_dense_replace n_shared_experts scoring_func"
    v3 = parse(_without(DEEPSEEK_V3, *optional.split(), "topk_method", "moe_layer_freq", "rms_norm_eps", "hidden_act"))
    assert v3.moe == parse(DEEPSEEK_V3).moe
    bare = parse(_without(QWEN3, "num_key_value_heads", "head_dim", "mlp_only_layers", "decoder_sparse_step", "rope_theta"))
    assert (bare.attention.num_kv_heads, bare.attention.head_dim, bare.rope.theta) == (32, 64, 10000.0)
    assert all(bare.moe.sparse_layers)


REQUIRED = {
    "v3": "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size moe_intermediate_size kv_lora_rank "
    "qk_nope_head_dim qk_rope_head_dim v_head_dim num_experts_per_tok max_position_embeddings",
    "v2": "n_group topk_group",
    "qwen3": "num_experts num_experts_per_tok moe_intermediate_size model_type vocab_size",
    "qwen2": "shared_expert_intermediate_size",
}


@pytest.mark.parametrize(("model", "field"), [(model, field) for model, fields in REQUIRED.items() for field in fields.split()])
def test_a_missing_field_is_named(parse, model, field):
    with pytest.raises(CheckpointError, match=f"{field} is missing") as error:
        parse(_without(MODELS[model], field))
    assert error.value.exit_code == ExitCode.CHECKPOINT


REFUSED = [
    ("v3", "architectures", ["LlamaForCausalLM"]),
    ("v3", "architectures", None),
    ("v3", "architectures", "DeepseekV3ForCausalLM"),
    ("v3", "model_type", "kimi_linear"),
    ("qwen3", "model_type", "qwen2_moe"),
    ("v3", "hidden_act", "gelu"),
    ("v3", "attention_bias", True),
    ("v3", "scoring_func", "softmax"),
    ("v2", "scoring_func", "sigmoid"),
    ("v3", "topk_method", "greedy"),
    ("v2", "topk_method", "noaux_tc"),
    ("v3", "n_group", 7),
    ("v3", "n_group", 256),
    ("v3", "topk_group", 9),
    ("v3", "num_experts_per_tok", 129),
    ("v3", "n_routed_experts", -1),
    ("v3", "num_hidden_layers", 0),
    ("v3", "num_hidden_layers", "61"),
    ("v3", "num_hidden_layers", 61.0),
    ("v3", "hidden_size", True),
    ("v3", "norm_topk_prob", 1),
    ("v3", "routed_scaling_factor", "2.5"),
    ("v3", "moe_layer_freq", [0, 1]),
    ("v3", "partial_rotary_factor", 0.5),
    ("v3", "torch_dtype", "float8_e4m3fn"),
    ("v3", "eos_token_id", "1"),
    ("qwen3", "use_sliding_window", True),
    ("qwen2", "layer_types", ["sliding_attention", "full_attention"]),
    ("qwen3", "num_key_value_heads", 5),
    ("qwen3", "num_experts_per_tok", 129),
    ("qwen3", "partial_rotary_factor", 1.5),
    ("qwen3", "rms_norm_eps", float("inf")),
    ("qwen3", "hidden_size", 10**30),
    ("qwen3", "rope_scaling", "yarn"),
]


@pytest.mark.parametrize(("model", "field", "value"), REFUSED)
def test_a_refusal_names_field_and_value(parse, model, field, value):
    with pytest.raises(CheckpointError) as error:
        parse({**MODELS[model], field: value})
    assert field in str(error.value)
    shown = "0.5" if value == 0.5 else "1.5" if value == 1.5 else json.dumps(value)
    assert shown in str(error.value)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "longrope"])
def test_other_rope_scalings_are_refused(parse, kind):
    with pytest.raises(CheckpointError, match=f'rope_scaling: rope_type is "{kind}"'):
        parse({**QWEN3, "rope_scaling": {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize("inner", [{}, {"architectures": ["DeepseekV3ForCausalLM"]}, {"model_type": "kimi_k2"}])
def test_kimi_k25_wraps_a_text_model(parse, inner):
    """Whichever of the names its text_config repeats, the text model is DeepSeek-V3's kind."""
    text = {**_without(DEEPSEEK_V3, "architectures", "model_type"), "topk_method": "noaux_tc", **inner}
    wrapper = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "vision_config": {}}
    config = parse({**wrapper, "text_config": text})
    assert config.moe.router.group_score == "top2_sum"
    assert config.num_layers == 61


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[" * 200_000, "not valid JSON"),
        ('{"hidden_size": 1' + "0" * 5000 + "}", "not valid JSON"),
        ("[]", "no JSON object"),
        (None, "cannot be read"),
    ],
    ids=["cut", "deep", "a number of 5000 digits", "a list", "absent"],
)
def test_a_damaged_file(tmp_path, text, says):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=says):
        load_model_config(tmp_path)
