"""Make tests/goldens/: tiny random models, and what transformers computes from their files.

Run once, in an environment of its own; the tests need neither torch nor transformers:

    pip install torch transformers safetensors
    python tests/make_goldens.py [NAME ...]

Every folder holds a model as files and `expected.npz`: `tokens`, the float32 `logits` at
`positions`, and the `greedy` continuation. `rope.json` holds the rotary tables of many
configurations. The script fails if a model could not tell a wrong RoPE from the right one.
"""

import copy
import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

GOLDENS = pathlib.Path(__file__).parent / "goldens"
PROMPT, GREEDY = 600, 16
POSITIONS = np.array([0, 1, 7, 63, 64, 127, 130, 200, 256, 300, 400, 513, 599])
SEES_FAULT, CLEAR_WINNER = 1e-2, 1e-3  # least change of a logit; least lead of a greedy token

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024, "tie_word_embeddings": False, "bos_token_id": None,
    "eos_token_id": None,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0,
        "original_max_position_embeddings": 128}



def of_kind(model_type, architecture, **changes):
    """A config.json as LLAMA, of another family."""
    return LLAMA | {"model_type": model_type, "architectures": [architecture]} | changes


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}

# Each RoPE in another spelling of config.json, and each family.
MODELS = {
    "default": LLAMA | {"rope_theta": 10_000.0, "tie_word_embeddings": True},
    "linear_sharded": LLAMA | {"rope_theta": 10_000.0,
                               "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": LLAMA | {
        "rope_theta": 500_000.0, "tie_word_embeddings": True, "num_hidden_layers": 3,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 256}},
    "yarn": LLAMA | {"rope_parameters": YARN},
    "yarn_attention_factor": LLAMA | {
        "tie_word_embeddings": True, "rope_parameters": YARN | {"attention_factor": 1.4}},
    "mistral_window": MISTRAL | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 24,
        "sliding_window": 64},
    "qwen2": of_kind("qwen2", "Qwen2ForCausalLM", rope_theta=1_000_000.0,
                     tie_word_embeddings=True, sliding_window=64, use_sliding_window=False),
    "qwen2_window": of_kind(
        "qwen2", "Qwen2ForCausalLM", rope_theta=10_000.0, num_hidden_layers=3, sliding_window=64,
        use_sliding_window=True, max_window_layers=1),
    "qwen3": of_kind("qwen3", "Qwen3ForCausalLM", rope_theta=1_000_000.0, head_dim=24,
                     tie_word_embeddings=True, attention_bias=False),
    "qwen2_moe": of_kind(
        "qwen2_moe", "Qwen2MoeForCausalLM", rope_theta=10_000.0, num_hidden_layers=3, **EXPERTS,
        shared_expert_intermediate_size=40, norm_topk_prob=False, decoder_sparse_step=1,
        mlp_only_layers=[1]),
    "qwen3_moe": of_kind(
        "qwen3_moe", "Qwen3MoeForCausalLM", rope_theta=10_000.0, num_hidden_layers=3, head_dim=24,
        **EXPERTS, norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[]),
    "gpt_oss": of_kind(
        "gpt_oss", "GptOssForCausalLM", head_dim=24, num_local_experts=8, num_experts_per_tok=2,
        attention_bias=True, sliding_window=64, layer_types=[SLIDING, FULL, SLIDING],
        num_hidden_layers=3, swiglu_limit=7.0, rope_theta=10_000.0,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                      "original_max_position_embeddings": 128, "truncate": False}),
    "minimax_m2": of_kind(
        "minimax_m2", "MiniMaxM2ForCausalLM", head_dim=32, rotary_dim=16, rope_theta=10_000.0,
        num_local_experts=8, num_experts_per_tok=2, use_qk_norm=True, qk_norm_type="per_layer",
        use_routing_bias=True, scoring_func="sigmoid"),
    "phi3": of_kind("phi3", "Phi3ForCausalLM", rope_theta=10_000.0, rope_scaling=None,
                    sliding_window=64, original_max_position_embeddings=1024, pad_token_id=None),
    "gemma2": of_kind(
        "gemma2", "Gemma2ForCausalLM", rope_theta=10_000.0, head_dim=24, num_hidden_layers=3,
        tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh", sliding_window=64,
        query_pre_attn_scalar=16, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    "gemma3": of_kind(
        "gemma3_text", "Gemma3ForCausalLM", rope_theta=1_000_000.0, rope_local_base_freq=10_000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0}, head_dim=24, num_hidden_layers=3,
        tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh", sliding_window=64,
        sliding_window_pattern=3, query_pre_attn_scalar=24),
}
FAMILIES = list(MODELS)[list(MODELS).index("qwen2"):]  # these are stored in bfloat16
# What a wrong implementation would compute; each must show in the logits.
FAULTS = {
    "default": [{"rope_theta": 11_000.0}],
    "linear_sharded": [{"rope_scaling": None}, {"rope_scaling": {"type": "linear", "factor": 3.9}}],
    "llama3": [{"rope_scaling": None}, {"rope_scaling": {"type": "linear", "factor": 8.0}}],
    "yarn": [{"rope_parameters": YARN | {"rope_type": kind}} for kind in ("default", "linear")]
    + [{"rope_parameters": YARN | {"attention_factor": 1.0}},
       {"rope_parameters": YARN | {"truncate": False}},
       {"rope_parameters": YARN | {"original_max_position_embeddings": 1024}}],
    "yarn_attention_factor": [{"rope_parameters": YARN}],
    "mistral_window": [{"sliding_window": None}, {"sliding_window": 63}, {"sliding_window": 65}],
    "qwen2": [{"use_sliding_window": True, "max_window_layers": 0}],
    "qwen2_window": [{"max_window_layers": 0}, {"max_window_layers": 2}, {"sliding_window": 63}],
    "qwen3": [{"rope_theta": 900_000.0}],
    "qwen2_moe": [{"norm_topk_prob": True}, {"num_experts_per_tok": 1}],
    "qwen3_moe": [{"norm_topk_prob": False}, {"num_experts_per_tok": 3}],
    "gpt_oss": [{"layer_types": [FULL] * 3}, {"layer_types": [SLIDING] * 3},
                {"sliding_window": 63}, {"sliding_window": 65}, {"swiglu_limit": 1.0}],
    "minimax_m2": [{"rotary_dim": 32}, {"rotary_dim": 8}, {"num_experts_per_tok": 1}],
    "phi3": [{"sliding_window": None}, {"sliding_window": 63}, {"sliding_window": 65}],
    "gemma2": [{"sliding_window": 63}, {"query_pre_attn_scalar": 24},
               {"attn_logit_softcapping": None}, {"final_logit_softcapping": None},
               {"layer_types": [FULL] * 3}],
    "gemma3": [{"sliding_window": 63}, {"query_pre_attn_scalar": 16}, {"rope_scaling": None},
               {"rope_local_base_freq": 11_000.0}, {"layer_types": [FULL] * 3}],
}
WEIGHT_STD = {"mistral_window": 0.2, "gemma2": 0.13, "gemma3": 0.13}


def tables_wanted():
    """Configurations of rope.json: name -> config.json."""
    qwen = {"head_dim": 128, "hidden_size": 2048, "num_attention_heads": 16,
            "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0}
    llama = qwen | {"rope_theta": 500_000.0}
    llama3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    deepseek = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}

    def scaled(base, scaling, **extra):
        return base | {"rope_scaling": scaling} | extra

    return {
        "default 16": LLAMA | {"rope_theta": 10_000.0},
        "default 128": llama,
        "default partial 0.25": qwen | {"partial_rotary_factor": 0.25},
        "linear": scaled(qwen, {"type": "linear", "factor": 4.0}),
        "linear partial 0.5": scaled(qwen, {"rope_type": "linear", "factor": 4.0},
                                     partial_rotary_factor=0.5),
        "llama3 factor 8": scaled(llama, llama3 | {"factor": 8.0}),
        "llama3 factor 32": scaled(llama, llama3 | {"factor": 32.0}),
        "yarn": scaled(qwen, yarn),
        "yarn attention_factor 1": scaled(qwen, yarn | {"attention_factor": 1.0}),
        "yarn attention_factor 1.25": scaled(qwen, yarn | {"attention_factor": 1.25}),
        "yarn truncate false": scaled(qwen, yarn | {"truncate": False}),
        "yarn betas": scaled(qwen, yarn | {"beta_fast": 16.0, "beta_slow": 2.0}),
        "yarn mscale": scaled(qwen, deepseek | {"mscale": 0.707, "mscale_all_dim": 1.0}),
        "yarn mscale alone": scaled(qwen, deepseek | {"mscale": 0.707}),
        "yarn partial 0.5": scaled(qwen, yarn, partial_rotary_factor=0.5),
        "yarn original from max_position": scaled(
            qwen, {"rope_type": "yarn", "factor": 4.0}, max_position_embeddings=8192),
        "yarn in rope_parameters": {key: qwen[key] for key in qwen if key != "rope_theta"} | {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 5_000_000.0, "factor": 2.0,
                                "original_max_position_embeddings": 16_384}},
    }


def transformers_config(config):
    """The config object; transformers writes into the dict that it is given."""
    return transformers.AutoConfig.for_model(**{"model_type": "llama"} | copy.deepcopy(config))


def write_rope_tables():
    """Write rope.json: float32 inverse frequencies and attention scaling."""
    tables = []
    for name, raw in tables_wanted().items():
        config = transformers_config(raw)
        kind = config.rope_parameters["rope_type"]
        # Of the default type only the models that rotate a part read partial_rotary_factor.
        compute = ROPE_INIT_FUNCTIONS.get(kind, PhiRotaryEmbedding.compute_default_rope_parameters)
        inv_freq, scaling = compute(config)
        tables.append({"name": name, "config": raw, "attention_scaling": float(scaling),
                       "inv_freq": [float(f"{value:.8g}") for value in inv_freq.tolist()]})
    lines = ",\n".join(json.dumps(table) for table in tables)
    (GOLDENS / "rope.json").write_text(f"[\n{lines}\n]\n")


def write_model(name, directory):
    """Write config.json and random weights."""
    torch.manual_seed(sum(name.encode()))
    model = transformers.AutoModelForCausalLM.from_config(transformers_config(MODELS[name]))
    for key, weight in model.named_parameters():
        if "norm" in key:
            torch.nn.init.uniform_(weight, *((0.0, 1.0) if "gemma" in name else (0.5, 1.5)))
        else:
            torch.nn.init.normal_(weight, std=WEIGHT_STD.get(name, 0.15))
    for key, buffer in model.named_buffers():
        if "correction_bias" in key:
            torch.nn.init.normal_(buffer, std=0.1)
    sharded = "sharded" in name
    model.to(torch.bfloat16 if sharded or name in FAMILIES else torch.float32).save_pretrained(
        directory, max_shard_size="100KB" if sharded else "1GB")
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / "config.json").write_text(json.dumps(MODELS[name], indent=2) + "\n")


def read_model(directory, dtype=torch.float32, **changes):
    """Read a folder as transformers does, with fields of its config.json changed."""
    raw = json.loads((directory / "config.json").read_text()) | changes
    config = transformers_config(raw)
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, config=config, dtype=dtype, attn_implementation="eager",
        experts_implementation="eager").eval()


def logits_of(model, tokens):
    """Logits at every position."""
    return model(torch.tensor(tokens, dtype=torch.int64)[None], use_cache=False).logits[0].numpy()


def greedy_of(model, tokens):
    """The greedy continuation, and the least lead of its tokens over the runner-up."""
    chosen, lead = [], np.inf
    for _ in range(GREEDY):
        last = logits_of(model, [*tokens, *chosen])[-1]
        second, first = np.sort(last)[-2:]
        lead = min(lead, first - second)
        chosen.append(int(last.argmax()))
    return chosen, lead


@torch.no_grad()
def write_golden(name):
    """Write one model and what it computes, and check that its logits see every fault."""
    directory = GOLDENS / name
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.iterdir():
        old.unlink()
    write_model(name, directory)
    model = read_model(directory)
    for seed in range(100):
        tokens = np.random.default_rng(seed).integers(0, 256, PROMPT, dtype=np.int32)
        greedy, lead = greedy_of(model, tokens.tolist())
        if lead > CLEAR_WINNER:
            break
    else:
        raise SystemExit(f"{name}: no prompt has a clear greedy continuation")
    logits = logits_of(model, tokens)[POSITIONS]
    exact = logits_of(read_model(directory, torch.float64), tokens)[POSITIONS]
    print(f"{name}: logits {logits.std():.2f} (std), float32 against float64 "
          f"{np.abs(logits - exact).max():.1e}, greedy lead {lead:.1e}, "
          f"distinct greedy tokens {len(set(greedy))}")
    for fault in FAULTS[name]:
        seen = np.abs(logits - logits_of(read_model(directory, **fault), tokens)[POSITIONS])
        print(f"  {fault}: {seen.max():.2g} at once, {seen[-1].max():.2g} at the last position")
        if min(seen.max(), seen[-1].max()) < SEES_FAULT:
            raise SystemExit(f"{name} cannot see {fault}")
    np.savez_compressed(directory / "expected.npz", tokens=tokens,
                        positions=POSITIONS.astype(np.int32), logits=logits.astype(np.float32),
                        greedy=np.array(greedy, np.int32))


def main():
    """Write everything."""
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    GOLDENS.mkdir(exist_ok=True)
    if not sys.argv[1:]:
        write_rope_tables()
    for name in sys.argv[1:] or MODELS:
        write_golden(name)


if __name__ == "__main__":
    main()
