"""The README's table of models: one row a family, with what its golden model has."""

import json
import pathlib

import pytest

from kvfunc.models.config_hf import FAMILIES, config_from_hf

TESTS = pathlib.Path(__file__).parents[1]
README = TESTS.parent / "README.md"
GOLDENS = [json.loads(path.read_text())
           for path in sorted((TESTS / "goldens").glob("*/config.json"))]


def features(fields):
    """What one golden model has that not every model has."""
    c = config_from_hf(fields)
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    window = "windows" if c.window and c.windowed is None else "windows in some layers"
    return {
        f"RoPE {kind}": kind != "default", "two RoPE tables": c.window_rope is not None,
        "partial RoPE": c.rope.rotary_dim < c.head_dim,
        window: c.window is not None, f"biases of {', '.join(c.biases)}": bool(c.biases),
        "QK norm by head": c.qk_norm == "head", "QK norm over all heads": c.qk_norm == "all",
        "sinks": c.sinks, "softcaps": c.softcap is not None, "norms behind": c.gemma_norms,
        "experts": c.moe is not None,
        "a shared expert": c.moe is not None and c.moe.shared_width > 0,
    }


def row(kind):
    found = {name for fields in GOLDENS if fields["model_type"] == kind
             for name, has in features(fields).items() if has}
    order = [name for fields in GOLDENS for name in features(fields)]
    tested = ", ".join(sorted(found, key=order.index)) or "-"
    return f"| {FAMILIES[kind].models} | `{kind}` | {tested} |"


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_table_says_what_is_tested(kind):
    assert any(fields["model_type"] == kind for fields in GOLDENS)
    assert row(kind) in README.read_text(), f"the README's row should be\n{row(kind)}"


def test_the_table_has_no_other_rows():
    table = README.read_text().split("| models | `model_type` |")[1].split("\n\n")[0]
    assert table.count("\n") == len(FAMILIES) + 1
