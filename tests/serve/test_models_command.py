"""`kvfunc models`: what runs, whether a file does, why not, and in how much memory."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from kvfunc.models import params
from kvfunc.models.config_hf import FAMILIES
from kvfunc.models.load_hf import load_hf
from kvfunc.serve.cli import app

from .fake import byte_tokenizer

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"


def asked(*options):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["models", *map(str, options)])


def test_without_a_model_all_families_are_listed():
    result = asked()
    assert result.exit_code == 0
    for kind, family in FAMILIES.items():
        assert f" {kind} " in result.stdout and family.models in result.stdout


def folder_of(golden, path, **changes):
    """A golden model with a tokenizer, and other fields in its config.json."""
    folder = shutil.copytree(GOLDENS / golden, path / "model")
    byte_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | changes))
    return folder


def test_a_folder_that_runs_and_its_memory(tmp_path):
    folder = folder_of("gpt_oss", tmp_path)
    result = asked(folder, "--context", 1_000_000, "--batch", 2, "--kv-dtype", "int8")
    assert result.exit_code == 0
    assert "can be run: 3 layers of width 64, 4 heads, 2 KV heads of 24" in result.stdout
    per_token = 3 * 2 * 2 * (24 + 4)  # layers, K and V, heads, numbers and a scale
    assert f"KV of 2,000,000 tokens, {per_token} bytes each" in result.stdout
    rows = {line.split()[0]: line.split()[-1] for line in result.stdout.splitlines() if line}
    assert rows["KV"] == rows["together"] == f"{2e6 * per_token / 1e9:.2f}"
    assert "--context 1,000,000 is more than the model's 1,024" in result.stdout


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", ["minimax_m2", "qwen2_moe", "gemma3"])
def test_the_size_of_weights_is_that_of_loaded_ones(name, quantization):
    config, loaded = load_hf(GOLDENS / name, jnp.bfloat16, quantization=quantization)
    bytes_loaded = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))
    assert params.size(config, jnp.bfloat16, quantization) == bytes_loaded


def test_the_embedded_model_is_not_loaded_for_it():
    from kvfunc.models.load import embedded_path

    result = asked(embedded_path())
    assert result.exit_code == 0 and "30 layers of width 576" in result.stdout
    assert "23,040 bytes each" in result.stdout


@pytest.mark.parametrize(("changes", "reason"), [
    ({"model_type": "gemma3"}, "sees images"), ({"model_type": "gpt2"}, "'gpt2' is not supported"),
    ({"rope_scaling": {"type": "longrope"}}, "longrope"), ({"vocab_size": 63}, "has shape"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config")])
def test_what_cannot_be_run_is_told_with_the_reason(tmp_path, changes, reason):
    folder = folder_of("default", tmp_path, **changes)
    result = asked(folder)
    assert result.exit_code == 2
    assert f"MODEL {str(folder)!r} cannot be run" in result.stderr and reason in result.stderr


def test_a_model_without_a_tokenizer_cannot_be_run():
    result = asked(GOLDENS / "default")
    assert result.exit_code == 2 and "no tokenizer.json" in result.stderr


def test_no_such_file():
    result = asked("nowhere.gguf")
    assert result.exit_code == 2 and "neither a GGUF file nor a folder" in result.stderr
