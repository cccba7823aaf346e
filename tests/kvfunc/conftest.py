"""Where Triton is interpreted, its kernel is what the tests of attention are about."""

import os

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))

if INTERPRETED:
    from .interpreted_triton import in_the_interpreter  # noqa: F401
