"""Configurations from config.json and from GGUF metadata, and what is refused."""

import dataclasses
import math

import pytest

from kvfunc.models.config import ModelConfig
from kvfunc.models.config_gguf import config_from_gguf
from kvfunc.models.config_hf import config_from_hf
from kvfunc.rope import Rope

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 100_000, "rope_scaling": None, "rope_interleaved": False,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32000,
    "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "sliding_window": 4096,
    "rope_theta": 10_000.0,
}
GGUF = {
    "general.architecture": "llama", "general.name": "a model", "llama.block_count": 30,
    "llama.context_length": 8192, "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536, "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3, "llama.rope.freq_base": 100_000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": 49152,
    "llama.rope.dimension_count": 64, "tokenizer.ggml.model": "gpt2",
}
EXPECTED = ModelConfig(
    vocab_size=49152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp_width=1536,
    norm_eps=1e-5, tied=True, rope=Rope.default(64, 100_000.0), context_length=8192, window=None)


def without(config, name):
    return {key: value for key, value in config.items() if key != name}


def from_gguf(**changes):
    """GGUF with fields under `llama.` added; `__` stands for a dot."""
    extra = {f"llama.{name.replace('__', '.')}": value for name, value in changes.items()}
    return config_from_gguf(GGUF | extra, tied=True)


def test_smollm2_reads_the_same_from_both_formats():
    assert config_from_hf(SMOLLM2) == EXPECTED
    assert config_from_gguf(GGUF, tied=True) == EXPECTED


def test_config_is_hashable():
    assert hash(config_from_hf(SMOLLM2)) == hash(EXPECTED)


def test_mistral_has_a_window_and_its_own_head_dim():
    config = config_from_hf(MISTRAL)
    assert (config.window, config.head_dim, config.tied) == (4096, 128, False)
    assert config.rope == Rope.default(128, 10_000.0)
    assert config_from_hf(MISTRAL | {"sliding_window": None}).window is None


def test_llama_has_no_window():
    assert config_from_hf(SMOLLM2 | {"sliding_window": 4096}).window is None


@pytest.mark.parametrize("config", [without(SMOLLM2, "num_key_value_heads"),
                                    SMOLLM2 | {"num_key_value_heads": None}])
def test_llama_without_kv_heads_has_one_for_each_head(config):
    assert config_from_hf(config).kv_heads == 9


@pytest.mark.parametrize("changes", [{"model_type": "gpt2"}, {"model_type": None},
                                     {"architectures": ["LlamaForSequenceClassification"]}])
def test_other_architectures_are_refused_with_a_list_of_ours(changes):
    wrong = next(iter(changes.values()))
    named = repr(wrong[0] if isinstance(wrong, list) else wrong)
    with pytest.raises(ValueError, match=f"{named}.*llama .*mistral"):
        config_from_hf(SMOLLM2 | changes)


@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias", "rope_interleaved"])
def test_features_that_are_not_built_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}=True"):
        config_from_hf(SMOLLM2 | {name: True})


def test_quantised_folders_are_refused():
    with pytest.raises(ValueError, match="quantization_config"):
        config_from_hf(SMOLLM2 | {"quantization_config": {"quant_method": "fp8"}})


def test_other_activations_are_refused():
    with pytest.raises(ValueError, match="hidden_act='gelu'"):
        config_from_hf(SMOLLM2 | {"hidden_act": "gelu"})


@pytest.mark.parametrize("name", [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "rms_norm_eps"])
def test_missing_field_of_config_json_is_named(name):
    with pytest.raises(ValueError, match=f"lacks {name}"):
        config_from_hf(without(SMOLLM2, name))


@pytest.mark.parametrize("name", ["num_key_value_heads", "sliding_window"])
def test_a_mistral_model_must_say(name):
    with pytest.raises(ValueError, match=f"lacks {name}"):
        config_from_hf(without(MISTRAL, name))


@pytest.mark.parametrize("name", sorted(
    GGUF.keys() - {"general.architecture", "general.name", "tokenizer.ggml.model",
                   "llama.rope.freq_base", "llama.rope.dimension_count",
                   "llama.attention.head_count_kv"}))
def test_missing_field_of_gguf_is_named(name):
    with pytest.raises(ValueError, match=f"lacks {name}"):
        config_from_gguf(without(GGUF, name), tied=True)


def test_gguf_of_another_architecture_is_refused():
    with pytest.raises(ValueError, match=r"'bert'.*'llama'"):
        config_from_gguf(GGUF | {"general.architecture": "bert"}, tied=True)


def test_gguf_vocabulary_is_counted_where_no_field_gives_it():
    fields = without(GGUF, "llama.vocab_size") | {"tokenizer.ggml.tokens": ["a", "b", "c"]}
    assert config_from_gguf(fields, tied=True).vocab_size == 3


@pytest.mark.parametrize(("scaling", "rope"), [
    ({}, Rope.default(64, 1e5)),
    ({"type": "none", "factor": 4.0}, Rope.default(64, 1e5)),
    ({"type": "linear", "factor": 4.0}, Rope.linear(64, 1e5, factor=4.0)),
    ({"factor": 4.0}, Rope.linear(64, 1e5, factor=4.0)),
    ({"type": "linear", "factor": 0.0}, Rope.default(64, 1e5)),
    ({"type": "yarn", "factor": 4.0, "original_context_length": 2048, "finetuned": True},
     Rope.yarn(64, 1e5, factor=4.0, original_context=2048)),
    ({"type": "yarn", "factor": 4.0}, Rope.yarn(64, 1e5, factor=4.0, original_context=8192)),
    ({"type": "yarn", "factor": 4.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
     Rope.yarn(64, 1e5, factor=4.0, original_context=8192, beta_fast=16.0, beta_slow=2.0)),
])
def test_gguf_rope_scaling(scaling, rope):
    assert from_gguf(**{f"rope__scaling__{k}": v for k, v in scaling.items()}).rope == rope


def test_gguf_old_spelling_of_linear_scaling():
    assert from_gguf(rope__scale_linear=2.0).rope == Rope.linear(64, 1e5, factor=2.0)


def test_gguf_attn_factor_multiplies_the_magnitude_of_yarn():
    rope = from_gguf(rope__scaling__type="yarn", rope__scaling__factor=math.e,
                     rope__scaling__attn_factor=0.5).rope
    assert rope.magnitude == pytest.approx(0.55)


def test_gguf_rope_factors_divide_the_frequencies():
    llama3 = Rope.llama3(64, 1e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                         original_context=2048)
    plain = Rope.default(64, 1e5)
    factors = [a / b for a, b in zip(plain.inv_freq, llama3.inv_freq, strict=True)]
    rope = config_from_gguf(GGUF, tied=True, rope_factors=factors).rope
    assert rope.inv_freq == pytest.approx(llama3.inv_freq, rel=1e-15)
    assert rope.magnitude == 1.0


def test_gguf_rope_factors_must_fit_the_rotary_dims():
    with pytest.raises(ValueError, match=r"rope_freqs\.weight has 3 factors.*32 pairs"):
        config_from_gguf(GGUF, tied=True, rope_factors=[1.0, 2.0, 3.0])


def test_gguf_partial_rotary():
    assert from_gguf(rope__dimension_count=32).rope == Rope.default(32, 1e5)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_gguf_other_scaling_types_are_refused(kind):
    with pytest.raises(ValueError, match=f"'{kind}'.*none, linear and yarn"):
        from_gguf(rope__scaling__type=kind)


@pytest.mark.parametrize("name", ["expert_count", "rope.scaling.yarn_log_multiplier",
                                  "rope.scaling.alpha", "attention.scale", "logit_scale"])
def test_gguf_field_that_is_not_understood_is_named(name):
    with pytest.raises(ValueError, match=f"llama.{name}"):
        config_from_gguf(GGUF | {f"llama.{name}": 2}, tied=True)


def test_gguf_window_and_head_dim():
    config = from_gguf(attention__sliding_window=512, attention__key_length=96,
                       attention__value_length=96, rope__dimension_count=96)
    assert (config.window, config.head_dim) == (512, 96)
    assert from_gguf(attention__sliding_window=0).window is None


def test_gguf_values_must_be_as_long_as_keys():
    with pytest.raises(ValueError, match=r"llama\.attention\.value_length is 32.*64"):
        from_gguf(attention__value_length=32)


@pytest.mark.parametrize(("name", "value"), [("attention__head_count_kv", [3, 3]),
                                             ("block_count", 30.0), ("block_count", True)])
def test_value_of_the_wrong_type_is_named(name, value):
    with pytest.raises(ValueError, match=f"llama.{name.replace('__', '.')} must be one integer"):
        from_gguf(**{name: value})


@pytest.mark.parametrize("changes", [
    {"heads": 0}, {"window": 0}, {"kv_heads": 2}, {"head_dim": 32}, {"context_length": -1}])
def test_impossible_shapes_are_refused_by_name(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        dataclasses.replace(EXPECTED, **changes)


def test_zero_heads_are_named_and_nothing_is_divided_by_them():
    with pytest.raises(ValueError, match="heads must be at least 1"):
        from_gguf(attention__head_count=0)
