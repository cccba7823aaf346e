"""Every family from GGUF: what a file of the same numbers gives is what the folder gives.

The files are written here from the goldens, under the names that the `gguf` package maps a folder's
names to, in the form that converters give them.
"""

import dataclasses
import json
import pathlib

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvfunc.models.config_gguf import config_from_gguf
from kvfunc.models.load_gguf import load_gguf
from kvfunc.models.load_hf import load_hf

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
FAMILIES = {"qwen2": "qwen2", "qwen3": "qwen3", "gpt_oss": "gpt-oss", "minimax_m2": "minimax-m2",
            "phi3": "phi3", "gemma2": "gemma2", "gemma3": "gemma3"}


def metadata(c):
    """Fields of a file, below its architecture, from a config.json."""
    heads = c["num_attention_heads"]
    fields = {
        "block_count": c["num_hidden_layers"], "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"], "feed_forward_length": c["intermediate_size"],
        "attention.head_count": heads, "attention.head_count_kv": c["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"], "vocab_size": c["vocab_size"],
        "rope.freq_base": float(c["rope_theta"]),
        "attention.key_length": c.get("head_dim", c["hidden_size"] // heads),
        "attention.value_length": c.get("head_dim", c["hidden_size"] // heads)}
    if "rotary_dim" in c:
        fields["rope.dimension_count"] = c["rotary_dim"]
    if c["model_type"] in ("gpt_oss", "phi3", "gemma2", "gemma3_text"):
        fields["attention.sliding_window"] = c["sliding_window"]
    if "attn_logit_softcapping" in c:
        fields |= {"attn_logit_softcapping": c["attn_logit_softcapping"],
                   "final_logit_softcapping": c["final_logit_softcapping"]}
    if "sliding_window_pattern" in c:
        fields["attention.sliding_window_pattern"] = c["sliding_window_pattern"]
    experts = c.get("num_experts", c.get("num_local_experts"))
    if experts:
        fields |= {"expert_count": experts, "expert_used_count": c["num_experts_per_tok"],
                   "expert_feed_forward_length": c.get("moe_intermediate_size",
                                                       c["intermediate_size"])}
    if "shared_expert_intermediate_size" in c:
        fields["expert_shared_feed_forward_length"] = c["shared_expert_intermediate_size"]
    scaling = c.get("rope_scaling")
    if scaling:
        fields |= {"rope.scaling.type": scaling.get("rope_type"),
                   "rope.scaling.factor": scaling["factor"]}
        if "original_max_position_embeddings" in scaling:
            fields["rope.scaling.original_context_length"] = scaling[
                "original_max_position_embeddings"]
    return fields


def converted(c, tensors):
    """A folder's tensors as they stand in a file."""
    if c["model_type"] == "gpt_oss":
        split = {}
        for name, tensor in tensors.items():
            if "experts" in name and not name.endswith("_bias"):
                tensor = tensor.swapaxes(1, 2)
            module, bias = name.removesuffix("_bias"), ".bias" if name.endswith("_bias") else (
                ".weight" if "experts" in name or "sinks" in name else "")
            if "gate_up_proj" in name:
                split[module.replace("gate_up", "gate") + bias] = tensor[:, ::2]
                split[module.replace("gate_up", "up") + bias] = tensor[:, 1::2]
            else:
                split[module + bias] = tensor
        return split
    merged = {}
    for name, tensor in tensors.items():
        before, found, behind = name.partition(".experts.")
        if found:
            expert, _, rest = behind.partition(".")
            merged.setdefault(f"{before}.experts.{rest}", {})[int(expert)] = tensor
        else:
            gemma = c["model_type"].startswith("gemma") and name.endswith("norm.weight")
            merged[name] = tensor.astype(np.float32) + 1 if gemma else tensor
    return {name: np.stack([one[i] for i in range(len(one))]) if isinstance(one, dict) else one
            for name, one in merged.items()}


def written(path, golden, architecture, changes=None, tensors=None):
    """A GGUF file of a golden model."""
    folder = GOLDENS / golden
    c = json.loads((folder / "config.json").read_text()) | (changes or {})
    tensors = tensors or load_file(next(folder.glob("*.safetensors")))
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, c["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata(c).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{architecture}.{key}", value)
    for name, tensor in converted(c, tensors).items():
        if name.endswith("e_score_correction_bias"):
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, name
        writer.add_tensor(new, np.ascontiguousarray(tensor.astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same(found, expected, **changes):
    (config, params), (other_config, other) = found, expected
    assert config.norm_eps == pytest.approx(other_config.norm_eps, rel=1e-6)  # float32 in the file
    assert config == dataclasses.replace(other_config, norm_eps=config.norm_eps, **changes)
    assert jax.tree.structure(params) == jax.tree.structure(other)
    for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=3e-7)  # 1 + weight - 1


@pytest.mark.parametrize(("golden", "architecture"), FAMILIES.items())
def test_a_file_is_the_folder(tmp_path, golden, architecture):
    path = written(tmp_path / "model.gguf", golden, architecture)
    # The scale is no field of a file, and the golden's is none that llama.cpp knows.
    changes = {"attention_scale": 24**-0.5} if golden == "gemma2" else {}
    assert_same(load_gguf(path, jnp.float32), load_hf(GOLDENS / golden, jnp.float32), **changes)


@pytest.mark.parametrize(("golden", "architecture", "layer"), [
    ("qwen2_moe", "qwen2moe", 0), ("qwen3_moe", "qwen3moe", 1)])
@pytest.mark.parametrize("is_vector", [False, True])
def test_experts_in_every_layer(tmp_path, golden, architecture, layer, is_vector):
    """A file has experts in all layers: the golden's one layer that has some, alone."""
    tensors = {name.replace(f"layers.{layer}.", "layers.0."): tensor for name, tensor in load_file(
        next((GOLDENS / golden).glob("*.safetensors"))).items()
        if ".layers." not in name or f".layers.{layer}." in name}
    changes = {"num_hidden_layers": 1, "mlp_only_layers": [], "decoder_sparse_step": 1}
    config = json.loads((GOLDENS / golden / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors, tmp_path / "model.safetensors")
    gate = "model.layers.0.mlp.shared_expert_gate.weight"
    stored = tensors | ({gate: tensors[gate][0]} if is_vector and gate in tensors else {})
    path = written(tmp_path / "model.gguf", golden, architecture, changes, stored)
    assert_same(load_gguf(path, jnp.float32), load_hf(tmp_path, jnp.float32), sparse=None)


def fields_of(architecture, golden, **changes):
    config = json.loads((GOLDENS / golden / "config.json").read_text())
    own = metadata(config) | changes
    return {"general.architecture": architecture} | {
        f"{architecture}.{key}": value for key, value in own.items()}


@pytest.mark.parametrize(("architecture", "golden", "largest"), [
    ("gemma2", "gemma2", 46), ("gemma3", "gemma3", 62)])
def test_the_largest_gemma_scales_by_its_width(architecture, golden, largest):
    for layers, dim in ((largest, 64 // 4), (largest - 1, 24)):
        config = config_from_gguf(fields_of(architecture, golden, block_count=layers), tied=True)
        assert config.attention_scale == dim**-0.5


def test_what_is_wrong_with_a_file_is_named():
    with pytest.raises(ValueError, match=r"minimax-m2\.expert_gating_func is 1; only 2"):
        config_from_gguf(fields_of("minimax-m2", "minimax_m2", expert_gating_func=1), tied=False)
    with pytest.raises(ValueError, match=r"qwen3\.attention\.sliding_window, which is not"):
        config_from_gguf(fields_of("qwen3", "qwen3", **{"attention.sliding_window": 9}), tied=False)
    with pytest.raises(ValueError, match=r"'bert'; supported are 'llama', .*'gemma3'"):
        config_from_gguf({"general.architecture": "bert"}, tied=False)
