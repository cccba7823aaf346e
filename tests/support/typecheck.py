"""The checker of jaxtyping's annotations in tests."""

import beartype


def functions(function):
    """Check calls of functions, but not the building of structs.

    JAX rebuilds pytrees with placeholders as leaves, which no annotation of a field allows.
    """
    return function if function.__name__ == "__init__" else beartype.beartype(function)
