"""Checkpoints: a tree of arrays is copied to the host at once and written behind the caller's back.

What is written says what it is (a fingerprint of the model, names, types, shapes and sums of the
arrays), so that whoever restores gets all of it or a sentence that says why not. A step appears
under its number only when it is whole; one that is damaged later gives way to the one before it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from kvfunc.cache import KVCache
from kvfunc.quantize import BITS_OF_FP8, FP8, Quantized, is_quantized
from kvfunc.storage import KV, number_dtype, with_numbers, write_layer

FORMAT = 1  # of what is written; readers refuse a larger number
_SAMPLES = 65_536  # elements of a large array that its fingerprint reads
_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints in one directory: one writer, any number of readers.

    `save` is to be called by one thread at a time. Call `close` before the process ends, or use it
    as a context manager: a save that has not ended by then may be lost, never an earlier one.
    """

    def __init__(self, directory: str | os.PathLike[str],
                 fingerprint: Mapping[str, str | int | float | bool | None], keep: int = 2):
        """Nothing is read or written yet.

        Args:
          directory: a local path, or a URL of an object store (gs://, s3://), for checkpoints only.
          fingerprint: what the arrays depend on: hashes of weights, tokenizer and chat template,
            RoPE, layers, kv_heads, head_dim. Compared by `restore`.
          keep: how many checkpoints stay; older ones are removed after a save.

        Raises:
          ValueError: if `keep` is not positive or a value of `fingerprint` is not flat.
          ImportError: if orbax-checkpoint is not installed.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        for name, value in fingerprint.items():
            if not isinstance(value, str | int | float | bool | None):
                raise ValueError("fingerprint must have str, int, float, bool or None as values, "
                                 f"got {name}={value!r}; hash it or spread it over several names")
        try:
            import orbax.checkpoint as ocp
            from etils import epath
        except ImportError as error:
            raise ImportError("checkpoints need orbax: pip install orbax-checkpoint") from error
        self._ocp = ocp
        is_url = "://" in str(directory)
        path = epath.Path(directory)
        self.directory = path if is_url else path.expanduser().resolve()
        self.fingerprint, self.keep = dict(fingerprint), keep
        # A rename is atomic in a file system; object stores copy, so there a last file commits.
        mode = ocp.options.AtomicityMode
        self._atomicity = ocp.options.AtomicityOptions(
            mode=mode.COMMIT_FILE if is_url else mode.ATOMIC_RENAME)
        # What is saved is a copy that nobody else has, so orbax need not make another.
        handlers = ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
            (jax.Array, ocp.type_handlers.ArrayHandler()))
        self._checkpointer = ocp.Checkpointer(
            ocp.PyTreeCheckpointHandler(type_handler_registry=handlers),
            atomicity_options=self._atomicity)
        self._unreadable: dict[int, str] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvfunc-checkpoint")
        self._last: Future[int] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def saving(self) -> bool:
        """Whether a save is under way."""
        return self._last is not None and not self._last.done()

    def save(self, tree: PyTree, meta: Mapping[str, Any] | None = None) -> Future[int]:
        """Start a save. On return the arrays are copied: they may be donated or changed.

        A save that is under way is waited for first, so that at most one copy is held; look at
        `saving` to skip instead. A failure is logged, and raised by the future, `wait` and `close`.

        Args:
          tree: any pytree of JAX or NumPy arrays.
          meta: what else to give back on restore; JSON has to hold it.

        Returns:
          A future of the checkpoint's number. It raises OSError if the save failed; what was saved
          before is untouched.

        Raises:
          ValueError: if JSON cannot hold `meta`.
        """
        try:
            meta = json.dumps(dict(meta or {}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"meta must be what JSON can hold ({error}), got {meta!r}; "
                             "put arrays into `tree`") from error
        if self.saving:
            self._last.exception()
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        for _, leaf in leaves:
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        copies = {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}
        self._last = self._worker.submit(self._write, copies, json.loads(meta))
        return self._last

    def wait(self) -> None:
        """Return when no save is under way; raises OSError if the last one failed."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Finish the save under way and let go of threads; raises OSError if it failed."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            self._checkpointer.close()

    def latest(self) -> int | None:
        """The number of the newest checkpoint that was completed; None if there is none."""
        return max(self._steps(), default=None)

    def restore(self, like: PyTree | Callable[[dict[str, Any]], PyTree],
                ) -> tuple[PyTree, dict[str, Any]] | None:
        """The newest checkpoint that can be read, as arrays like those of `like`.

        Numbers are converted to the types of `like`: between float types, bits as integers (see
        `storage.fastest_dtype`) and `Quantized`. A KVCache may have more slots in `like` than it
        was saved with: the others are free. Pages are an allocator's matter and not stored, so
        their size may differ.

        Args:
          like: the structure, shapes and types wanted; `jax.ShapeDtypeStruct`s will do. NumPy
            leaves are restored as NumPy, others to the sharding that they are committed to. Or a
            function that makes it of `meta`, where what was saved decides.

        Returns:
          The tree and `meta`; None if there is no checkpoint (a cold start).

        Raises:
          ValueError: if the newest readable one was made with another fingerprint, by a newer
            version of the format, or does not fit `like`; or if there are some and none is whole.
        """
        if self.saving:
            self._last.exception()
        steps = sorted(self._steps(), reverse=True)
        for step in steps:
            where = f"checkpoint {step} in {self.directory}"
            try:
                about = self._about(step)
                version, fingerprint = int(about["format"]), dict(about["fingerprint"])
                if version <= FORMAT:
                    stored = self._arrays(step, about["arrays"])
            except Exception as error:  # whatever damage looks like to orbax and tensorstore
                reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
                self._unreadable[step] = reason.splitlines()[0][:200]
                _log.warning("%s cannot be read, trying the one before it: %s", where,
                             self._unreadable[step])
                continue
            if version > FORMAT:
                raise ValueError(f"{where} has format {version} and this kvfunc reads up to "
                                 f"{FORMAT}; upgrade kvfunc, or give another directory")
            self._compare(where, fingerprint)
            wanted = like(about["meta"]) if callable(like) else like
            return _fitted(where, stored, wanted), about["meta"]
        if not steps:
            return None
        reasons = "; ".join(f"{step}: {self._unreadable[step]}" for step in steps)
        raise ValueError(f"no checkpoint in {self.directory} can be read ({reasons}); restore it "
                         "from a backup, or remove it or give another directory to start cold")

    def _steps(self) -> list[int]:
        names = self._ocp.path.step.standard_name_format(atomicity_options=self._atomicity)
        return [found.step for found in names.find_all(self.directory)]

    def _compare(self, where: str, theirs: dict[str, Any]) -> None:
        def shown(side: dict[str, Any], name: str) -> str:
            return repr(side[name]) if name in side else "absent"

        ours = self.fingerprint
        differing = [f"{name} is {shown(theirs, name)} there and {shown(ours, name)} here"
                     for name in sorted({*theirs, *ours})
                     if (name in theirs, theirs.get(name)) != (name in ours, ours.get(name))]
        if differing:
            raise ValueError(f"{where} has another fingerprint: {'; '.join(differing)}; start with "
                             "what it was made with, or give another directory")

    def _write(self, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> int:
        try:
            before = sorted(self._steps())
            step = max(before, default=0) + 1
            about = dict(format=FORMAT, fingerprint=self.fingerprint, meta=meta, arrays=[
                dict(name=name, dtype=str(x.dtype), shape=list(x.shape), crc32=_sum(x))
                for name, x in arrays.items()])
            # What a killed process left of this step orbax removes; forced, in a bucket too, where
            # it has the final name.
            # Numbered, since names may hold what paths must not; orbax refuses empty arrays.
            numbered = {str(i): x for i, x in enumerate(arrays.values()) if x.size}
            self._checkpointer.save(self.directory / str(step), force=True, custom_metadata=about,
                                    args=self._ocp.args.PyTreeSave(numbered))
            kept = [x for x in [*before, step] if x not in self._unreadable][-self.keep:]
            for old in {*before} - {*kept}:
                (self.directory / str(old)).rmtree()
        except Exception as error:
            message = f"a checkpoint could not be saved in {self.directory}: {error}"
            _log.error(message)
            raise OSError(message) from error
        return step

    def _about(self, step: int) -> dict[str, Any]:
        about = self._checkpointer.metadata(self.directory / str(step)).custom_metadata
        if not about:
            raise ValueError("the description of what it holds is missing or damaged")
        return about

    def _arrays(self, step: int, listed: list[dict[str, Any]]) -> dict[str, np.ndarray]:
        found = self._checkpointer.restore(self.directory / str(step),
                                           args=self._ocp.args.PyTreeRestore())
        stored = {}
        for i, entry in enumerate(listed):
            shape, dtype = tuple(entry["shape"]), jnp.dtype(entry["dtype"])
            x = np.asarray(found[str(i)]) if math.prod(shape) else np.zeros(shape, dtype)
            if (x.shape, x.dtype, _sum(x)) != (shape, dtype, entry["crc32"]):
                raise ValueError(f"array {entry['name']} is not what was saved")
            stored[entry["name"]] = x
        return stored


def fingerprint_of_arrays(tree: PyTree) -> str:
    """A hash of arrays, such as a model's weights: sha256 over names, types, shapes and bytes.

    Of an array with more than 65 536 elements every n-th one is read, n odd and such that fewer
    remain: any training changes some of these. Weights held in another type hash differently.
    """
    digest = hashlib.sha256()
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        x = x if isinstance(x, jax.Array) else np.asarray(x)
        digest.update(f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape}\n".encode())
        # Odd, so that a stride does not stay within few columns of a matrix.
        stride = math.ceil(x.size / _SAMPLES) | 1
        sampled = _every(x, stride) if isinstance(x, jax.Array) else x.reshape(-1)[::stride]
        digest.update(np.asarray(sampled).tobytes())
    return digest.hexdigest()


def _fitted(where: str, stored: dict[str, np.ndarray], like: PyTree) -> PyTree:
    """The stored arrays in the structure, shapes and types of `like`."""
    growing = {}  # by name: the axis of slots, and what a free slot holds
    for path, cache in _leaves(like, KVCache):
        if isinstance(cache, KVCache):
            for field, fill in (("kv", 0), ("birth", KVCache.UNWRITTEN),
                                ("position", KVCache.DROPPED)):
                for inner, _ in _leaves(getattr(cache, field), Quantized):
                    growing[f"{path}.{field}{inner}"] = cache.next_position.ndim, fill
    wanted, given = dict(_leaves(like, Quantized)), dict(stored)
    for name in wanted:
        if f"{name}.values" in given and f"{name}.scales" in given:
            given[name] = Quantized(given.pop(f"{name}.values"), given.pop(f"{name}.scales"))
    if wanted.keys() != given.keys():
        names = [", ".join(sorted(x.keys() - y.keys())[:4]) or "none"
                 for x, y in ((given, wanted), (wanted, given))]
        raise ValueError(f"{where} has other arrays than `like`: only there {names[0]}; only in "
                         f"`like` {names[1]}; restore the structure that was saved, or give "
                         "another directory")

    def fit(path: tuple, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        what = f"{name or 'the array'} of {where}"
        value, (axis, fill) = given[name], growing.get(name, (None, 0))
        had, has = value.shape, leaf.shape
        if had != has and (axis is None or len(had) != len(has) or had[axis] > has[axis]
                           or had[:axis] + had[axis + 1:] != has[:axis] + has[axis + 1:]):
            raise ValueError(f"{what} has shape {had} and `like` has {has}; give `like` the shape "
                             "that was saved (a KVCache may have more slots, not fewer)")
        converted = _converted(value, leaf)
        if converted is None:
            raise ValueError(f"{what} is {_type(value)} and cannot become {_type(leaf)} of `like`; "
                             "give `like` the type that was saved")
        if had != has:
            room = [(0, more - n) for n, more in zip(had, has, strict=True)]
            converted = jax.tree.map(
                lambda x: np.pad(x, room[:x.ndim], constant_values=fill), converted)
        return jax.tree.map(_placed, converted, leaf)

    return jax.tree_util.tree_map_with_path(fit, like, is_leaf=lambda x: isinstance(x, Quantized))


def _leaves(tree: PyTree, kind: type) -> list[tuple[str, Any]]:
    """Names and leaves of a tree, where objects of `kind` count as leaves."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, kind))[0]
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in found]


def _converted(value: np.ndarray | Quantized, like: Any) -> Any:
    """The same numbers as `like` stores them, in host memory; None if it cannot hold them."""
    had, has = isinstance(value, Quantized), isinstance(like, Quantized)
    if had == has and value.dtype == like.dtype:
        return value
    if had and has and {value.dtype, like.dtype} == {FP8, BITS_OF_FP8}:
        return Quantized(value.values.view(like.dtype), value.scales)
    on_device = jax.tree.map(jnp.asarray, value)
    numbers = on_device.numbers() if had else with_numbers(on_device)
    wanted = numbers.dtype if has else number_dtype(jnp.zeros(0, like.dtype))
    if is_quantized(like.dtype) != has or not all(
            jnp.issubdtype(dtype, jnp.floating) for dtype in (numbers.dtype, wanted)):
        return None
    # As rows of storage, which knows what an element looks like.
    rows = numbers.reshape(-1, 1, numbers.shape[-1] if numbers.ndim else 1)
    empty = KV.zeros(1, *rows.shape, like.dtype).k[0]
    filled = write_layer(empty, jnp.arange(len(rows)), rows)
    return jax.tree.map(lambda x: np.asarray(x).reshape(value.shape[:numbers.ndim + x.ndim - 3]),
                        filled)


def _placed(value: np.ndarray, like: Any) -> Any:
    if isinstance(like, np.ndarray | np.generic):
        return value
    # What was not committed to a device stays so, or functions compiled for it compile again.
    committed = getattr(like, "committed", True)
    return jax.device_put(value, like.sharding if committed else None, may_alias=False)


def _type(value: Any) -> str:
    return f"quantised {value.dtype}" if isinstance(value, Quantized) else str(value.dtype)


def _sum(x: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8))


@functools.partial(jax.jit, static_argnums=1)
def _every(x: jax.Array, stride: int) -> jax.Array:
    return x.reshape(-1)[::stride]
