"""Weights from GGUF and from safetensors: values, order of rows, and errors that name a tensor."""

import json
import pathlib
import re
import shutil

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvfunc.models.config import ModelConfig
from kvfunc.models.load_gguf import load_gguf, open_gguf
from kvfunc.models.load_hf import load_hf
from kvfunc.rope import Rope

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
MODELS = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
LLAMA = {name for name in MODELS if json.loads((GOLDENS / name / "config.json").read_text())[
    "model_type"] in ("llama", "mistral")}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def flat(params):
    """Parameters by their path, `layer_0/q/weight`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


def assert_same(left, right):
    left, right = flat(left), flat(right)
    assert left.keys() == right.keys()
    for path in left:
        np.testing.assert_array_equal(left[path], right[path], err_msg=path)


def tensors_of(name):
    return {key: tensor for file in (GOLDENS / name).glob("*.safetensors")
            for key, tensor in load_file(file).items()}


@pytest.fixture
def hf_folder(tmp_path):
    """Makes a copy of a golden model in one file, with tensors or fields of its config changed."""
    def make(tensors=None, *, drop=(), name="default", **config):
        kept = {key: tensor for key, tensor in tensors_of(name).items() if key not in drop}
        save_file(kept | (tensors or {}), tmp_path / "model.safetensors")
        golden = json.loads((GOLDENS / name / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(golden | config))
        return tmp_path
    return make


@pytest.fixture
def gguf_file(tmp_path):
    """Makes a GGUF file of a golden model, with tensors or fields changed; None removes one."""
    def make(tensors=None, *, name="default", fields=None):
        config = json.loads((GOLDENS / name / "config.json").read_text())
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(heads)
        writer.add_head_count_kv(kv_heads)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_vocab_size(config["vocab_size"])
        for key, value in (fields or {}).items():
            writer.add_uint32(key, value)
        stored = {}
        for key, tensor in tensors_of(name).items():
            if layer := re.match(r"model\.layers\.(\d+)\.(.*)\.weight", key):
                new = f"blk.{layer[1]}.{GGUF_NAMES[layer[2]]}.weight"
            else:
                new = f"{GGUF_NAMES[key.removesuffix('.weight')]}.weight"
            if new.endswith(("attn_q.weight", "attn_k.weight")):
                of_heads = np.split(tensor, heads if "attn_q" in new else kv_heads)
                half = len(of_heads[0]) // 2
                tensor = np.concatenate([head[[i // 2 + half * (i % 2) for i in range(2 * half)]]
                                         for head in of_heads])
            stored[new] = tensor.astype(np.float32)
        for key, tensor in (stored | (tensors or {})).items():
            if tensor is not None:
                writer.add_tensor(key, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "model.gguf"
    return make


# The embedded model


@pytest.fixture(scope="module")
def embedded(embedded_gguf):
    return load_gguf(embedded_gguf, jnp.float32)


def test_embedded_config(embedded):
    config, _ = embedded
    assert config == ModelConfig(
        vocab_size=49152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp_width=1536,
        norm_eps=float(np.float32(1e-5)), tied=True, rope=Rope.default(64, 100_000.0),
        context_length=8192)


def test_embedded_shapes(embedded):
    shapes = {path: leaf.shape for path, leaf in flat(embedded[1]).items()}
    assert len(shapes) == 272
    assert shapes["embed/weight"] == (49152, 576)
    assert shapes["norm/weight"] == (576,)
    assert {path: shape for path, shape in shapes.items() if path.startswith("layer_29/")} == {
        "layer_29/attn_norm/weight": (576,), "layer_29/q/weight": (576, 576),
        "layer_29/k/weight": (192, 576), "layer_29/v/weight": (192, 576),
        "layer_29/o/weight": (576, 576), "layer_29/mlp_norm/weight": (576,),
        "layer_29/gate/weight": (1536, 576), "layer_29/up/weight": (1536, 576),
        "layer_29/down/weight": (576, 1536)}
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(embedded[1]))


@pytest.mark.parametrize(("path", "row", "values"), [
    # Read off the file's blocks by hand: Q8_0, float32, Q4_1.
    ("embed", 1, [-0.023803711, -0.01586914, -0.03967285, 0.01586914]),
    ("embed", 49151, [0.011505127, 0.0057525635, 0.09779358, -0.09779358]),
    ("layer_29/v", 1, [0.4449463, 0.16918945, 0.6287842, -0.38232422]),
    ("layer_3/down", 575, [0.010620117, 0.0769043, -0.32080078, -0.055664062]),
    # Rows 0, 1, 2 of head 0, the last of head 1 and row 1 of KV head 2 in the file.
    ("layer_0/q", 0, [-0.09631348, 0.15734863, -0.09631348, -0.73046875]),
    ("layer_0/q", 32, [-0.11730957, -0.11730957, -0.19281006, 0.26019287]),
    ("layer_0/q", 1, [-0.15917969, 0.39794922, -0.019897461, -1.2734375]),
    ("layer_0/q", 127, [0.01977539, -0.23968506, 0.27923584, 0.10626221]),
    ("layer_29/k", 160, [-0.0546875, -0.0546875, -0.029296875, -0.0546875]),
])
def test_embedded_values(embedded, path, row, values):
    np.testing.assert_allclose(flat(embedded[1])[f"{path}/weight"][row, :4], values, rtol=1e-7)


def test_embedded_norm(embedded):
    norm = embedded[1]["norm"]["weight"]
    np.testing.assert_array_equal(norm[:3], [1.7578125, 1.8203125, 1.78125])


# Both formats


@pytest.mark.parametrize("name", MODELS)
def test_every_stored_number_is_loaded_once(name):
    def numbers(tree):
        return np.sort(np.concatenate([np.asarray(x, np.float32).ravel() for x in tree.values()]))

    params = load_hf(GOLDENS / name, jnp.float32)[1]
    np.testing.assert_array_equal(numbers(flat(params)), numbers(tensors_of(name)))


def test_experts_are_stacked_in_order():
    params, stored = flat(load_hf(GOLDENS / "minimax_m2", jnp.float32)[1]), tensors_of("minimax_m2")
    for mine, theirs in {"gate": "w1", "up": "w3", "down": "w2"}.items():
        for expert in (0, 5):
            np.testing.assert_array_equal(
                params[f"layer_1/experts_{mine}/weight"][expert], stored[
                    f"model.layers.1.block_sparse_moe.experts.{expert}.{theirs}.weight"
                ].astype(np.float32))


def test_experts_in_mxfp4_are_the_numbers_that_they_stand_for(hf_folder):
    halves = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    rng, prefix = np.random.default_rng(0), "model.layers.1.mlp.experts."
    stored = {f"{prefix}gate_up_proj": (8, 192, 2), f"{prefix}down_proj": (8, 64, 3)}
    tensors = {}
    for name, groups in stored.items():
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (*groups, 16), dtype=np.uint8)
        tensors[f"{name}_scales"] = rng.integers(120, 131, groups, dtype=np.uint8)
    folder = hf_folder(tensors, name="gpt_oss", drop=stored,
                       quantization_config={"quant_method": "mxfp4"})
    params = flat(load_hf(folder, jnp.float32)[1])

    def number(name, expert, row, column):
        byte = tensors[f"{name}_blocks"][expert, row, column // 32, column % 32 // 2]
        half = byte >> 4 if column % 2 else byte & 15
        return halves[half] * 2.0 ** (int(tensors[f"{name}_scales"][expert, row, column // 32])
                                      - 127)

    for expert, row, column in [(0, 0, 0), (3, 7, 1), (7, 63, 63), (5, 20, 40)]:
        for module, name, at in (("gate", "gate_up_proj", 2 * row), ("down", "down_proj", row),
                                 ("up", "gate_up_proj", 2 * row + 1)):
            found = params[f"layer_1/experts_{module}/weight"][expert, row, column]
            assert found == number(prefix + name, expert, at, column)


@pytest.mark.parametrize("name", [name for name in MODELS if name in LLAMA])
def test_golden_loads_as_stored(name):
    config, params = load_hf(GOLDENS / name, jnp.float32)
    stored, loaded = tensors_of(name), flat(params)
    assert len(loaded) == len(stored) == 9 * config.layers + 2 + (not config.tied)
    for path, key in {
        "embed": "model.embed_tokens", "norm": "model.norm",
        "layer_1/attn_norm": "model.layers.1.input_layernorm",
        "layer_1/q": "model.layers.1.self_attn.q_proj",
        "layer_1/k": "model.layers.1.self_attn.k_proj",
        "layer_1/v": "model.layers.1.self_attn.v_proj",
        "layer_1/o": "model.layers.1.self_attn.o_proj",
        "layer_1/mlp_norm": "model.layers.1.post_attention_layernorm",
        "layer_1/gate": "model.layers.1.mlp.gate_proj", "layer_1/up": "model.layers.1.mlp.up_proj",
        "layer_1/down": "model.layers.1.mlp.down_proj",
    }.items():
        np.testing.assert_array_equal(loaded[f"{path}/weight"],
                                      stored[f"{key}.weight"].astype(np.float32), err_msg=path)


def test_goldens_are_tied_and_untied_and_one_is_sharded():
    assert ("head" in load_hf(GOLDENS / "yarn", jnp.float32)[1],
            "head" in load_hf(GOLDENS / "default", jnp.float32)[1]) == (True, False)
    assert len([*(GOLDENS / "linear_sharded").glob("*.safetensors")]) == 2


@pytest.mark.parametrize("name", ["default", "yarn"])
def test_gguf_and_hf_give_the_same_parameters(gguf_file, name):
    config, params = load_gguf(gguf_file(name=name), jnp.float32)
    hf_config, hf_params = load_hf(GOLDENS / name, jnp.float32)
    assert (config.tied, config.head_dim) == (hf_config.tied, hf_config.head_dim)
    assert_same(params, hf_params)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, "bfloat16"])
def test_every_leaf_has_the_dtype_asked_for_rounded_to_nearest(gguf_file, dtype):
    _, exact = load_hf(GOLDENS / "default", jnp.float32)
    rounded = jax.tree.map(lambda leaf: leaf.astype(dtype), exact)
    for _, params in (load_hf(GOLDENS / "default", dtype), load_gguf(gguf_file(), dtype)):
        assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(params))
        assert_same(params, rounded)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_files_load_exactly(hf_folder, stored):
    halves = {key: tensor.astype(stored) for key, tensor in tensors_of("default").items()}
    _, params = load_hf(hf_folder(halves), jnp.float32)
    np.testing.assert_array_equal(params["layer_0"]["k"]["weight"],
                                  halves["model.layers.0.self_attn.k_proj.weight"].astype("f4"))


@pytest.mark.parametrize("load", ["hf", "gguf"])
def test_progress_tells_every_tensor_once(gguf_file, load):
    calls = []
    if load == "hf":
        load_hf(GOLDENS / "default", jnp.float32, lambda *call: calls.append(call))
    else:
        load_gguf(gguf_file(), jnp.float32, lambda *call: calls.append(call))
    assert [call[1:] for call in calls] == [(done, 20) for done in range(1, 21)]
    assert len({name for name, _, _ in calls}) == 20
    assert calls[0][0] == {"hf": "model.embed_tokens.weight", "gguf": "token_embd.weight"}[load]


# Safetensors: what is wrong is named


def test_old_frequency_buffers_are_harmless(hf_folder):
    buffer = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(8, "f4") for i in (0, 1)}
    assert_same(load_hf(hf_folder(buffer), jnp.float32)[1],
                load_hf(GOLDENS / "default", jnp.float32)[1])


def test_head_that_copies_a_tied_embedding_is_harmless(hf_folder):
    embed = tensors_of("default")["model.embed_tokens.weight"]
    _, params = load_hf(hf_folder({"lm_head.weight": embed}), jnp.float32)
    assert "head" not in params


def test_head_that_differs_from_a_tied_embedding_is_refused(hf_folder):
    embed = tensors_of("default")["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match=r"lm_head\.weight differs.*tie_word_embeddings"):
        load_hf(hf_folder({"lm_head.weight": embed + 1}), jnp.float32)


def test_unknown_tensor_is_named(hf_folder):
    bias = {"model.layers.1.self_attn.q_proj.bias": np.zeros(64, "f4")}
    with pytest.raises(ValueError, match=r"contains model\.layers\.1\.self_attn\.q_proj\.bias,"):
        load_hf(hf_folder(bias), jnp.float32)


def test_tensor_of_a_layer_too_many_is_named(hf_folder):
    with pytest.raises(ValueError, match=r"contains model\.layers\.1\..* and 4 more"):
        load_hf(hf_folder(num_hidden_layers=1), jnp.float32)


@pytest.mark.parametrize("key", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_missing_tensor_is_named(hf_folder, key):
    with pytest.raises(ValueError, match=f"lacks {re.escape(key)}:"):
        load_hf(hf_folder(drop=[key]), jnp.float32)


def test_missing_head_of_an_untied_model_is_named(hf_folder):
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        load_hf(hf_folder(tie_word_embeddings=False), jnp.float32)


def test_wrong_shape_is_named_with_both_shapes(hf_folder):
    wrong = {"model.layers.0.self_attn.k_proj.weight": np.zeros((64, 32), "f4")}
    with pytest.raises(ValueError, match=r"0\.self_attn\.k_proj\.weight has shape \(64, 32\) and "
                                         r"the configuration asks for \(32, 64\)"):
        load_hf(hf_folder(wrong), jnp.float32)


def test_type_that_cannot_be_read_is_named(hf_folder):
    wrong = {"model.norm.weight": np.ones(64, np.int8)}
    with pytest.raises(ValueError, match=r"model\.norm\.weight is stored as I8.*BF16, F16, F32"):
        load_hf(hf_folder(wrong), jnp.float32)


def test_missing_shard_is_named(tmp_path):
    shutil.copytree(GOLDENS / "linear_sharded", tmp_path, dirs_exist_ok=True)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors does not exist"):
        load_hf(tmp_path, jnp.float32)


def test_tensor_in_two_shards_is_named(tmp_path):
    shutil.copytree(GOLDENS / "linear_sharded", tmp_path, dirs_exist_ok=True)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    shutil.copy(first, second)
    with pytest.raises(ValueError, match=r"model\.\S+ stands in two files"):
        load_hf(tmp_path, jnp.float32)


def test_folder_without_weights_or_config_says_what_it_lacks(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        load_hf(tmp_path, jnp.float32)
    shutil.copy(GOLDENS / "default" / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor .*index\.json"):
        load_hf(tmp_path, jnp.float32)
    (tmp_path / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        load_hf(tmp_path, jnp.float32)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load_hf(tmp_path, jnp.float32)


# GGUF: what is wrong is named


def test_gguf_unknown_tensor_is_named(gguf_file):
    with pytest.raises(ValueError, match=r"contains blk\.0\.attn_q\.bias,"):
        load_gguf(gguf_file({"blk.0.attn_q.bias": np.zeros(64, "f4")}), jnp.float32)


def test_gguf_missing_tensor_is_named(gguf_file):
    with pytest.raises(ValueError, match=r"lacks blk\.1\.ffn_gate\.weight:"):
        load_gguf(gguf_file({"blk.1.ffn_gate.weight": None}), jnp.float32)


def test_gguf_wrong_shape_is_named_with_both_shapes(gguf_file):
    wrong = {"blk.1.ffn_down.weight": np.zeros((96, 64), "f4")}
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_down\.weight has shape \(96, 64\) and the "
                                         r"configuration asks for \(64, 96\)"):
        load_gguf(gguf_file(wrong), jnp.float32)


def test_gguf_type_that_cannot_be_dequantised_is_named(gguf_file):
    with pytest.raises(ValueError, match=r"output_norm\.weight is stored as I8"):
        load_gguf(gguf_file({"output_norm.weight": np.ones(64, np.int8)}), jnp.float32)


def test_gguf_rope_factors_scale_the_frequencies(gguf_file):
    factors = {"rope_freqs.weight": np.array([1, 1, 2, 2, 4, 4, 8, 8], "f4")}
    config, params = load_gguf(gguf_file(factors), jnp.float32)
    assert config.rope.inv_freq == pytest.approx(
        np.array(Rope.default(16).inv_freq) / [1, 1, 2, 2, 4, 4, 8, 8])
    assert_same(params, load_hf(GOLDENS / "default", jnp.float32)[1])


def test_gguf_partial_rotary_reorders_the_rotated_rows_only(gguf_file):
    numbered = np.repeat(np.arange(32, dtype="f4")[:, None], 64, axis=1)  # two KV heads of 16 rows
    path = gguf_file({"blk.0.attn_k.weight": numbered},
                     fields={"llama.rope.dimension_count": 8})
    config, params = load_gguf(path, jnp.float32)
    assert config.rope.rotary_dim == 8
    head = [0, 2, 4, 6, 1, 3, 5, 7, *range(8, 16)]
    np.testing.assert_array_equal(params["layer_0"]["k"]["weight"][:, 0],
                                  [*head, *(16 + row for row in head)])


def test_open_reader_is_accepted(gguf_file):
    path = gguf_file()
    assert_same(load_gguf(open_gguf(path), jnp.float32)[1], load_gguf(path, jnp.float32)[1])


def test_one_part_of_a_split_gguf_is_refused(gguf_file):
    with pytest.raises(ValueError, match=r"split\.count"):
        load_gguf(gguf_file(fields={"split.count": 2}), jnp.float32)


def test_file_that_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all, and long enough")
    with pytest.raises(ValueError, match=r"model\.gguf cannot be read as a GGUF file"):
        load_gguf(path, jnp.float32)
