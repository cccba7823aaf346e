"""Saves checkpoint after checkpoint into a directory until it is killed.

Every array of a checkpoint holds its number; the numbers of finished saves are printed.
"""

import sys

import numpy as np

from kvfunc.checkpoint import Checkpoints

FINGERPRINT = {"model": "killed"}


def tree(number: int) -> dict[str, np.ndarray]:
    """Some 50 MB in 100 arrays, so that a save takes long enough to be killed in it."""
    return {f"array {i}": np.full((128, 1024), number, np.int32) for i in range(100)}


def main(directory: str) -> None:
    checkpoints = Checkpoints(directory, FINGERPRINT, keep=2)
    while True:
        number = (checkpoints.latest() or 0) + 1
        print(checkpoints.save(tree(number), {"number": number}).result(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
