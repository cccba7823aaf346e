"""How the laws are tried: the same random programs in every run, through small blocks."""

import hypothesis
import pytest

import kvfunc.attention

hypothesis.settings.register_profile("laws", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("laws")

SMALL_BLOCKS = dict(FEW_QUERIES=2, TILE_QUERIES=4, LARGE_BLOCK=8, SMALL_BLOCK=4)


@pytest.fixture(scope="module")
def small_blocks():
    """Tiles and blocks of a few tokens, so that short programs cross many of their borders."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL_BLOCKS.items():
            patch.setattr(kvfunc.attention, name, value)
        yield
