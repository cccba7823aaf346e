"""What is saved comes back whole, as the caller holds arrays now, or a sentence says why not."""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from kvfunc import cache as kv_cache
from kvfunc.attention import segment_attention
from kvfunc.cache import KVCache
from kvfunc.checkpoint import Checkpoints, fingerprint_of_arrays
from kvfunc.quantize import Quantized
from kvfunc.rope import Rope
from kvfunc.storage import read_block, write_layer

MODEL = {"weights": "abc", "layers": 2, "rope_theta": 10000.0, "template": None}
ON_CPU = [jnp.float32, jnp.uint16, jnp.int8, jnp.uint8]
# Of several reads that orbax starts, the others may end after the first has failed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(?s)Exception ignored in.*Event loop is closed:pytest.PytestUnraisableExceptionWarning")
SCRIPT = pathlib.Path(__file__).with_name("killed_while_saving.py")


@functools.cache
def a_cache(dtype=jnp.float32, slots=12) -> KVCache:
    """Seven tokens of two layers, of which two were dropped and the others renumbered."""
    k, v = jax.random.normal(jax.random.key(3), (2, 2, 7, 2, 8))
    cache, _ = kv_cache.append(kv_cache.init(2, slots, 2, 8, dtype), list(k), list(v))
    return kv_cache.repos(kv_cache.drop(cache, jnp.array([1, 4]))[0])[0]


def save(directory, tree, meta=None, **options):
    with Checkpoints(directory, MODEL, **options) as checkpoints:
        return checkpoints.save(tree, meta).result()


def restore(directory, like, fingerprint=MODEL):
    with Checkpoints(directory, fingerprint) as checkpoints:
        return checkpoints.restore(like)


def assert_same(tree, expected):
    jax.tree.map(np.testing.assert_array_equal, tree, expected)
    assert jax.tree.map(lambda x: x.dtype, tree) == jax.tree.map(lambda x: x.dtype, expected)


def steps(directory):
    return sorted(path.name for path in directory.iterdir())


def test_arrays_of_any_type_and_meta_come_back(tmp_path):
    tree = {
        "cache": a_cache(jnp.float8_e4m3fn), "with.dot/and slash": jnp.arange(3),
        "mask": np.array([True, False]), "empty": np.zeros((0, 4)), "scalar": jnp.float32(2.5),
        "strided": np.arange(12).reshape(3, 4).T, "bits": (np.arange(4, dtype=np.uint16), None)}
    meta = {"requests": 17, "names": ["a", "b"]}
    assert save(tmp_path, tree, meta) == 1
    restored, meta_again = restore(tmp_path, tree)
    assert_same(restored, tree)
    assert meta_again == meta
    assert isinstance(restored["mask"], np.ndarray)
    assert isinstance(restored["scalar"], jax.Array)


def test_shapes_alone_say_what_is_wanted_and_commitment_to_a_device_is_kept(tmp_path):
    cache, device = a_cache(), jax.devices()[-1]
    save(tmp_path, cache)
    for like in (cache, jax.eval_shape(lambda: cache)):
        restored, meta = restore(tmp_path, like)
        assert_same(restored, cache)
        assert meta == {}
        assert not restored.birth.committed
    assert restore(tmp_path, jax.device_put(cache, device))[0].birth.committed


def test_without_a_checkpoint_the_start_is_cold(tmp_path):
    for directory in (tmp_path, tmp_path / "absent"):
        with Checkpoints(directory, MODEL) as checkpoints:
            assert checkpoints.restore(a_cache()) is None
            assert checkpoints.latest() is None
    assert not (tmp_path / "absent").exists()


def test_numbers_rise_and_old_checkpoints_go(tmp_path):
    with Checkpoints(tmp_path, MODEL, keep=3) as checkpoints:
        assert [checkpoints.save({"x": jnp.int32(i)}).result() for i in range(5)] == [1, 2, 3, 4, 5]
        assert checkpoints.latest() == 5
    assert steps(tmp_path) == ["3", "4", "5"]
    assert save(tmp_path, {"x": jnp.int32(9)}, keep=1) == 6
    assert steps(tmp_path) == ["6"]
    assert restore(tmp_path, {"x": jnp.int32(0)})[0] == {"x": 9}


@pytest.fixture
def gate(monkeypatch):
    """Saves write nothing until this event is set."""
    event, write = threading.Event(), ocp.Checkpointer.save

    def slow(*args, **kwargs):
        event.wait(timeout=30)  # a test that fails goes on
        return write(*args, **kwargs)

    monkeypatch.setattr(ocp.Checkpointer, "save", slow)
    return event


def test_a_save_goes_on_behind_the_callers_back_and_arrays_may_change(tmp_path, gate):
    tree, meta = {"jax": jnp.arange(1000.0), "numpy": np.arange(3)}, {"list": [1]}
    like = {"jax": jnp.zeros(1000), "numpy": np.zeros(3, int)}
    with Checkpoints(tmp_path, MODEL) as checkpoints:
        future = checkpoints.save(tree, meta)
        jax.jit(lambda x: x * 0, donate_argnums=0)(tree["jax"]).block_until_ready()
        tree["numpy"][:] = 0
        meta["list"].append(2)
        assert (checkpoints.saving, future.done(), checkpoints.latest()) == (True, False, None)
        gate.set()
        checkpoints.wait()
        assert (checkpoints.saving, future.result(), checkpoints.latest()) == (False, 1, 1)
        restored, meta = checkpoints.restore(like)
    np.testing.assert_array_equal(restored["jax"], np.arange(1000))
    np.testing.assert_array_equal(restored["numpy"], [0, 1, 2])
    assert meta == {"list": [1]}


def test_the_next_save_waits_for_the_one_under_way(tmp_path, gate):
    with Checkpoints(tmp_path, MODEL) as checkpoints:
        first = checkpoints.save({"x": jnp.int32(1)})
        threading.Timer(0.3, gate.set).start()
        second = checkpoints.save({"x": jnp.int32(2)})
        assert first.done()
        assert (first.result(), second.result()) == (1, 2)


def test_close_finishes_the_save_under_way(tmp_path):
    with Checkpoints(tmp_path, MODEL) as checkpoints:
        checkpoints.save({"x": jnp.arange(3)})
    assert steps(tmp_path) == ["1"]


def test_a_save_that_fails_is_told_and_the_next_may_succeed(tmp_path, caplog):
    directory = tmp_path / "taken"
    directory.write_text("a file")
    checkpoints = Checkpoints(directory, MODEL)
    future = checkpoints.save({"x": jnp.int32(1)})
    with pytest.raises(OSError, match=f"could not be saved in {re.escape(str(directory))}"):
        checkpoints.wait()
    assert isinstance(future.exception(), OSError)
    assert "could not be saved" in caplog.text
    directory.unlink()
    assert checkpoints.save({"x": jnp.int32(2)}).result() == 1
    directory.rename(tmp_path / "away")
    directory.write_text("a file")
    checkpoints.save({"x": jnp.int32(3)})
    with pytest.raises(OSError, match="could not be saved"):
        checkpoints.close()


def test_another_fingerprint_is_refused_field_by_field(tmp_path):
    save(tmp_path, a_cache())
    other = {"weights": "xyz", "layers": 2, "rope_theta": 10000, "tokenizer": "t"}
    with pytest.raises(ValueError) as error:
        restore(tmp_path, a_cache(), other)
    assert str(error.value) == (
        f"checkpoint 1 in {tmp_path} has another fingerprint: template is None there and absent "
        "here; tokenizer is absent there and 't' here; weights is 'abc' there and 'xyz' here; "
        "start with what it was made with, or give another directory")


def test_a_newer_format_is_refused_even_with_an_older_checkpoint_beside_it(tmp_path):
    for _ in range(2):
        save(tmp_path, a_cache())
    path = tmp_path / "2" / "_CHECKPOINT_METADATA"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2')
                    .replace('"arrays"', '"unheard of"'))
    with pytest.raises(ValueError, match=r"checkpoint 2 in .* has format 2 and this kvfunc reads "
                                         r"up to 1; upgrade kvfunc, or give another directory"):
        restore(tmp_path, a_cache())


@pytest.mark.parametrize("arguments, message", [
    (dict(keep=0), "keep must be at least 1, got 0"),
    (dict(fingerprint={"rope": [1, 2]}), "got rope=[1, 2]; hash it or spread it")])
def test_arguments_that_cannot_be_are_named(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Checkpoints(**dict(directory=tmp_path, fingerprint=MODEL) | arguments)


def test_meta_that_json_cannot_hold_is_refused(tmp_path):
    with Checkpoints(tmp_path, MODEL) as checkpoints:
        with pytest.raises(ValueError, match=r"meta must be what JSON can hold.*put arrays"):
            checkpoints.save({}, {"x": jnp.zeros(2)})
        assert not checkpoints.saving


# Damage


def spoil_truncate(path):
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def spoil_flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def spoil_remove(path):
    path.unlink()


@pytest.mark.parametrize("spoil", [spoil_truncate, spoil_flip, spoil_remove])
def test_whatever_file_is_damaged_the_checkpoint_is_whole_or_the_one_before(tmp_path, caplog,
                                                                            spoil):
    like = {"x": jnp.zeros(5000), "y": jnp.zeros(3, jnp.int32)}
    for i in (1, 2):
        save(tmp_path, jax.tree.map(lambda x, i=i: x + jnp.arange(x.size, dtype=x.dtype) * i, like),
             {"i": i})
    # The paths of data differ from save to save; so do not name the files.
    files = [path for path in (tmp_path / "2").rglob("*") if path.is_file()]
    assert len(files) > 5
    fell_back = []
    for path in files:
        caplog.clear()
        content = path.read_bytes()
        spoil(path)
        restored, meta = restore(tmp_path, like)
        np.testing.assert_array_equal(restored["x"], np.arange(5000) * meta["i"])
        np.testing.assert_array_equal(restored["y"], np.arange(3) * meta["i"])
        warned = [x.getMessage() for x in caplog.records if x.name == "kvfunc.checkpoint"]
        assert bool(warned) == (meta["i"] == 1)
        for message in warned:
            assert message.startswith(f"checkpoint 2 in {tmp_path} cannot be read, trying the one "
                                      "before it: ")
            assert "\n" not in message
            assert len(message.split("before it: ")[1]) <= 200
            fell_back.append(path.name)
        path.write_bytes(content)
    assert {"_CHECKPOINT_METADATA", "manifest.ocdbt"} <= set(fell_back)
    assert any(len(name) == 32 for name in fell_back)  # data


def test_values_that_orbax_reads_but_nobody_saved_are_damage(tmp_path):
    save(tmp_path, {"x": jnp.zeros(3)})
    save(tmp_path, {"x": jnp.ones(3)})
    path = tmp_path / "2" / "_CHECKPOINT_METADATA"
    about = json.loads(path.read_text())
    about["custom_metadata"]["arrays"][0]["crc32"] ^= 1
    path.write_text(json.dumps(about))
    np.testing.assert_array_equal(restore(tmp_path, {"x": jnp.ones(3)})[0]["x"], [0, 0, 0])


def test_if_none_is_whole_an_error_names_the_directory_and_the_reasons(tmp_path):
    for i in (1, 2):
        save(tmp_path, a_cache())
        (tmp_path / str(i) / "_CHECKPOINT_METADATA").unlink()
    reason = "ValueError: the description of what it holds is missing or damaged"
    with pytest.raises(ValueError) as error:
        restore(tmp_path, a_cache())
    assert str(error.value) == (
        f"no checkpoint in {tmp_path} can be read (2: {reason}; 1: {reason}); restore it from a "
        "backup, or remove it or give another directory to start cold")


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path):
    for i in (1, 2):
        save(tmp_path, {"x": jnp.int32(i)})
    (tmp_path / "2" / "_METADATA").unlink()
    with Checkpoints(tmp_path, MODEL, keep=2) as checkpoints:
        assert checkpoints.restore({"x": jnp.int32(0)})[0] == {"x": 1}
        assert checkpoints.save({"x": jnp.int32(3)}).result() == 3
    assert steps(tmp_path) == ["1", "3"]


@pytest.mark.parametrize("moment", ["begun", "half", "done"])
def test_a_kill_loses_at_most_the_save_under_way(tmp_path, moment):
    """SIGKILL as a save begins, in the middle of it, and as it has taken its name."""
    def temporary_files():
        return sum(len(files) for path in tmp_path.glob("*checkpoint-tmp*")
                   for _, _, files in os.walk(path))

    def is_now():
        if moment == "done":
            return max(int(name) for name in steps(tmp_path) if name.isdigit()) >= 4
        return temporary_files() > {"begun": 0, "half": 8}[moment]

    child = subprocess.Popen([sys.executable, str(SCRIPT), str(tmp_path)], stdout=subprocess.PIPE,
                             text=True)
    with child:
        told = [int(child.stdout.readline()) for _ in range(2)]
        stopped = False
        while not stopped:
            if is_now():  # and still is when the child stands still
                child.send_signal(signal.SIGSTOP)
                os.waitpid(child.pid, os.WUNTRACED)
                stopped = is_now()
                child.send_signal(signal.SIGKILL if stopped else signal.SIGCONT)
            time.sleep(0.001)
        told += map(int, child.stdout.read().split())
    if moment in ("begun", "half"):
        assert temporary_files()  # it was killed within a save

    like = {f"array {i}": np.zeros((128, 1024), np.int32) for i in range(100)}
    with Checkpoints(tmp_path, {"model": "killed"}) as checkpoints:
        tree, meta = checkpoints.restore(like)
        assert meta["number"] >= told[-1]  # a finished save may not have been printed yet
        assert all((x == meta["number"]).all() for x in tree.values())
        assert checkpoints.save(tree).result() == checkpoints.latest()
    assert len(steps(tmp_path)) == 2  # what the killed process left is gone


# Other types, layouts and capacities


@pytest.fixture(scope="module")
def saved_caches(tmp_path_factory):
    root = tmp_path_factory.mktemp("caches")
    for dtype in (*ON_CPU, jnp.bfloat16, jnp.float8_e4m3fn):
        save(root / jnp.dtype(dtype).name, a_cache(dtype))
    return root


@pytest.mark.parametrize("dtype, to", [
    *itertools.product(ON_CPU, ON_CPU), (jnp.uint16, jnp.bfloat16),
    (jnp.bfloat16, jnp.uint16), (jnp.uint8, jnp.float8_e4m3fn), (jnp.float8_e4m3fn, jnp.uint8),
    (jnp.bfloat16, jnp.float32), (jnp.float8_e4m3fn, jnp.int8)])
def test_numbers_move_between_all_types_of_storage(saved_caches, dtype, to):
    cache = a_cache(dtype)
    empty = kv_cache.init(2, 12, 2, 8, to)
    restored, _ = restore(saved_caches / jnp.dtype(dtype).name, jax.eval_shape(lambda: empty))
    assert_same(dataclasses.replace(restored, kv=None), dataclasses.replace(cache, kv=None))
    for had, has, room in zip(cache.kv.k + cache.kv.v, restored.kv.k + restored.kv.v,
                              empty.kv.k + empty.kv.v, strict=True):
        numbers = read_block(had, jnp.int32(0), 12)
        expected = write_layer(room, jnp.arange(12), numbers)
        if dtype == to or {dtype, to} == {jnp.float8_e4m3fn, jnp.uint8}:
            # The same bits: not quantised again.
            expected = jax.tree.map(lambda x, y: x.view(y.dtype), had, room)
        assert_same(has, expected)


def test_numbers_outside_of_a_cache_are_converted_too(tmp_path):
    tree = {"scalar": jnp.float32(1.5), "batch": jnp.full((2, 3, 4), 1 + 2**-8)}
    save(tmp_path, tree)
    restored, _ = restore(tmp_path, {"scalar": jnp.bfloat16(0), "batch": np.zeros((2, 3, 4), "u2")})
    assert restored["scalar"].dtype == jnp.bfloat16
    assert restored["scalar"] == jnp.bfloat16(1.5)
    assert isinstance(restored["batch"], np.ndarray)
    assert set(restored["batch"].ravel().tolist()) == {0x3f80}  # a tie, to even


@pytest.mark.parametrize("had, has, names", [
    (jnp.zeros(3, jnp.int32), jnp.zeros(3), ("int32", "float32")),
    (jnp.zeros(3), jnp.zeros(3, jnp.int32), ("float32", "int32")),
    (jnp.zeros(3, jnp.bool_), jnp.zeros(3, jnp.bfloat16), ("bool", "bfloat16")),
    (jnp.zeros(3), jnp.zeros(3, jnp.float8_e4m3fn), ("float32", "float8_e4m3fn")),
    (Quantized.zeros((2, 3), jnp.int8), jnp.zeros((2, 3), jnp.int32), ("quantised int8", "int32"))])
def test_numbers_that_would_lose_their_meaning_are_refused(tmp_path, had, has, names):
    save(tmp_path, {"x": had})
    with pytest.raises(ValueError) as error:
        restore(tmp_path, {"x": has})
    assert str(error.value) == (
        f"['x'] of checkpoint 1 in {tmp_path} is {names[0]} and cannot become {names[1]} of "
        "`like`; give `like` the type that was saved")


def test_a_cache_of_pages_of_4_goes_on_in_pages_of_16(tmp_path):
    """The size of pages is no part of a checkpoint: only the capacity, three pages or one, is."""
    cache = a_cache(slots=3 * 4)
    save(tmp_path, {"pool": cache})
    grown = restore(tmp_path, {"pool": kv_cache.init(2, 16, 2, 8, jnp.float32)})[0]["pool"]
    assert grown.capacity == 16
    assert_same(jax.tree.map(lambda x: x[:12] if x.ndim else x, grown), cache)
    assert (int(grown.length), int(grown.live.sum())) == (7, 5)

    def attended(cache):
        cache, new = kv_cache.reserve(cache, 4)
        k = v = [jnp.ones((4, 2, 8))] * 2
        cache = kv_cache.write(cache, new.slots, k, v)
        rows = kv_cache.rows_for(cache, new)
        return segment_attention(jnp.ones((4, 2, 8)), cache.kv.k[0], cache.kv.v[0], rows,
                                 new.births, Rope.default(8).rotation(rows.shift))

    np.testing.assert_allclose(attended(grown), attended(cache), atol=1e-6)


def test_a_batch_of_caches_grows_along_its_slots(tmp_path):
    def batch(slots):
        return jax.tree.map(lambda *x: jnp.stack(x), *[a_cache(jnp.int8, slots)] * 5)

    save(tmp_path, batch(12))
    assert_same(restore(tmp_path, batch(13))[0], batch(13))


@pytest.mark.parametrize("like, names", [
    (kv_cache.init(2, 11, 2, 8, jnp.float32), ".kv.k[0] (12, 2, 8) (11, 2, 8)"),
    (kv_cache.init(2, 12, 4, 8, jnp.float32), ".kv.k[0] (12, 2, 8) (12, 4, 8)"),
    (kv_cache.init(2, 20, 2, 16, jnp.float32), ".kv.k[0] (12, 2, 8) (20, 2, 16)")])
def test_a_shape_that_does_not_fit_is_refused(tmp_path, like, names):
    save(tmp_path, a_cache())
    name, had, has = re.fullmatch(r"(\S+) (\(.*\)) (\(.*\))", names).groups()
    with pytest.raises(ValueError) as error:
        restore(tmp_path, like)
    assert str(error.value) == (
        f"{name} of checkpoint 1 in {tmp_path} has shape {had} and `like` has {has}; give `like` "
        "the shape that was saved (a KVCache may have more slots, not fewer)")


def test_other_arrays_than_a_cache_do_not_grow(tmp_path):
    save(tmp_path, {"birth": jnp.zeros(3)})
    with pytest.raises(ValueError, match=re.escape("['birth'] of checkpoint 1")):
        restore(tmp_path, {"birth": jnp.zeros(4)})


def test_another_structure_is_refused(tmp_path):
    save(tmp_path, {"a": jnp.zeros(3), "b": jnp.zeros(3)})
    with pytest.raises(ValueError, match=re.escape(
            "has other arrays than `like`: only there ['a']; only in `like` ['c'], ['d']; restore "
            "the structure that was saved")):
        restore(tmp_path, {name: jnp.zeros(3) for name in "bcd"})


# Paths, imports, hashes


def test_urls_stay_urls_and_local_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in ("gs://bucket/pool", "s3://bucket/pool"):
        assert str(Checkpoints(url, MODEL).directory) == url
    assert save("pool", {"x": jnp.zeros(2)}) == 1
    assert steps(tmp_path / "pool") == ["1"]


def test_orbax_is_imported_only_by_who_makes_checkpoints():
    code = "import sys, kvfunc, kvfunc.checkpoint; sys.exit('orbax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_fingerprint_of_arrays_is_of_names_types_shapes_and_values():
    tree = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.zeros(2)}
    expected = fingerprint_of_arrays(tree)
    # Pinned: if it changes, every checkpoint that was ever made is refused.
    assert expected == "92c14c0d635dcf88d4c36965b1060eb33d9a668a16ba1392e199710d81930e66"
    assert fingerprint_of_arrays(jax.tree.map(np.asarray, tree)) == expected
    others = [tree | {"w": tree["w"].at[1, 2].add(1)}, tree | {"w": tree["w"].T},
              tree | {"b": jnp.zeros(2, jnp.int32)}, {"w": tree["w"], "c": tree["b"]},
              {"w": tree["w"]}]
    assert len({expected, *map(fingerprint_of_arrays, others)}) == 6


def test_a_fingerprint_of_large_arrays_sees_training_and_edits_of_a_column():
    w = np.zeros((4096, 512), np.float32)
    column, rank_one = w.copy(), w + 1e-3 * np.arange(512, dtype=np.float32)
    column[:, 77] = 1e-3
    hashes = {fingerprint_of_arrays([x]) for x in (w, column, rank_one)}
    assert len(hashes) == 3
    assert fingerprint_of_arrays([jnp.asarray(column)]) in hashes
