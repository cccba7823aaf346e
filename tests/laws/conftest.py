"""How the laws are tried: the same random programs in every run, through small blocks."""

import hypothesis
import jax
import pytest

import kvfunc.attention
import kvfunc.xla

hypothesis.settings.register_profile("laws", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("laws")

SMALL_BLOCKS = dict(FEW_QUERIES=2, TILE_QUERIES=4, LARGE_BLOCK=8, SMALL_BLOCK=4)


@pytest.fixture(scope="module", params=["XLA in small blocks", "as it runs here"])
def each_attention(request):
    """XLA's tiles and blocks of a few tokens, whose borders short programs cross; the default."""
    jax.clear_caches()  # what was traced before knows neither
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "XLA in small blocks":
            for name, value in SMALL_BLOCKS.items():
                patch.setattr(kvfunc.xla, name, value)
            patch.setattr(kvfunc.attention, "choose", lambda *_: "xla")
        yield
    jax.clear_caches()
