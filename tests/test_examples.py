"""The examples do what the README says of them."""

import pathlib
import runpy

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def test_a_dropped_sentence_is_forgotten(capsys):
    runpy.run_path(str(EXAMPLES / "edit_cache.py"), run_name="__main__")
    with_secret, without, summary = capsys.readouterr().out.splitlines()
    assert with_secret.endswith(" sword")
    assert "sword" not in without
    assert summary == "dropped 6 tokens; the next one is born at 4"
