"""Checkpoints: every bit comes back, a kill at any moment leaves a whole one, and damage is seen."""

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import hypothesis.extra.numpy as numpy_strategies
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.errors import InputError
from lehr.training import checkpoint, checkpoint_files, chunks
from lehr.training.leaves import CheckpointError
from lehr.types import Learner

DTYPES = [
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4, jnp.uint4),
]


class State(NamedTuple):
    params: dict
    count: jax.Array


def state_of(value):
    return State({"w": jnp.full((3, 2), value, jnp.float32), "b": jnp.arange(4) + int(value)}, jnp.uint32(value))


def bits(leaf):
    """What a leaf is: its type, dtype, shape and bytes."""
    if hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "key", str(leaf.dtype), str(jax.random.key_impl(leaf)), bits(jax.random.key_data(leaf))
    kind = jax.Array if isinstance(leaf, jax.Array) else type(leaf)
    array = np.asarray(leaf)
    return kind, array.dtype, array.shape, array.tobytes()


def assert_same(state, other):
    assert jax.tree.structure(state) == jax.tree.structure(other)
    assert [bits(leaf) for leaf in jax.tree.leaves(state)] == [bits(leaf) for leaf in jax.tree.leaves(other)]


def round_trip(directory, state, template=None):
    path = checkpoint.save(directory, state, step=1, meta={})
    return checkpoint.load(path, state if template is None else template)[0]


# Every bit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_bit_pattern_of_every_dtype_comes_back(tmp_path, dtype):
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(0)
    raw = np.arange(256, dtype=np.uint8) if dtype.itemsize == 1 else np.frombuffer(rng.bytes(4096), np.uint8)
    if dtype.name in ("bool", "int4", "uint4"):
        raw = raw % (2 if dtype.name == "bool" else 16)
    values = raw.view(dtype)
    state = {"many": values, "shaped": values.reshape(4, -1)[:, ::2], "one": values[5].reshape(()), "none": values[:0]}
    assert_same(round_trip(tmp_path, state), state)
    if jax.device_put(np.zeros((), dtype)).dtype == dtype:
        on_device = jax.tree.map(jnp.asarray, state)
        assert_same(round_trip(tmp_path, on_device, jax.eval_shape(lambda: on_device)), on_device)


def test_payloads_of_nan_negative_zero_and_subnormals_come_back(tmp_path):
    patterns = np.array([0x7FC00001, 0x7F800001, 0xFFC12345, 0x80000000, 0x00000001, 0x807FFFFF], np.uint32)
    loaded = round_trip(tmp_path, jnp.asarray(patterns.view(np.float32)))
    assert np.asarray(loaded).view(np.uint32).tolist() == patterns.tolist()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_come_back_as_keys_of_the_same_kind(tmp_path, impl):
    state = {"one": jax.random.key(7, impl=impl), "many": jax.random.split(jax.random.key(1, impl=impl), (2, 3))}
    loaded = round_trip(tmp_path, state, jax.eval_shape(lambda: state))
    assert_same(loaded, state)
    assert jax.random.uniform(loaded["one"]) == jax.random.uniform(state["one"])


def test_numbers_and_numpy_values_stay_what_they_are(tmp_path):
    state = {"int": 2**62, "float": -0.0, "bool": True, "complex": 1 + 2j, "scalar": np.float32(3), "array": np.ones(2)}
    assert_same(round_trip(tmp_path, state), state)


def test_an_int64_of_a_template_of_shapes_is_not_cut_to_int32(tmp_path):
    loaded = round_trip(tmp_path, np.int64(2**40), jax.ShapeDtypeStruct((), np.int64))
    assert int(loaded) == 2**40


@pytest.mark.parametrize("state", [(), {"nothing": None}, jnp.float32(3), [[], jnp.zeros(0)]], ids=str)
def test_small_trees_come_back(tmp_path, state):
    assert_same(round_trip(tmp_path, state), state)


leaves = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    numpy_strategies.arrays(numpy_strategies.scalar_dtypes().filter(lambda d: d.kind in "biufc"), (2, 1)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
)


@hypothesis.settings(max_examples=50)
@hypothesis.given(trees)
def test_any_tree_comes_back(tmp_path_factory, tree):
    assert_same(round_trip(tmp_path_factory.mktemp("any"), tree), tree)


def test_a_state_returns_to_the_devices_of_its_template(tmp_path):
    mesh = jax.make_mesh((1,), ("envs",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("envs"))
    state = jax.device_put({"x": jnp.arange(4.0), "keys": jax.random.split(jax.random.key(0), 4)}, sharding)
    loaded = round_trip(tmp_path, state)
    assert_same(loaded, state)
    assert jax.tree.map(lambda leaf: leaf.sharding, loaded) == {"x": sharding, "keys": sharding}
    assert not round_trip(tmp_path, jnp.arange(4.0)).committed


class Trained(NamedTuple):
    params: Any
    actor: Any


def test_a_policy_is_read_without_what_belongs_to_its_environment(tmp_path):
    path = checkpoint.save(tmp_path, Trained(state_of(1), {"angle": jnp.zeros(7)}), step=1, meta={})
    here = {"board": jnp.ones((2, 2))}
    with pytest.raises(InputError, match="does not match"):
        checkpoint.load(path, Trained(state_of(0), here))
    loaded, _ = checkpoint.load(path, Trained(state_of(0), here), policy_only=True)
    assert_same(loaded, Trained(state_of(1), here))
    with pytest.raises(InputError, match="does not match"):
        checkpoint.load(path, Trained(here, here), policy_only=True)


def test_meta_comes_back_with_the_step(tmp_path):
    meta = {"best": -1.5, "names": ["a", "ü"], "nested": {"10": None, "9": float("inf")}}
    path = checkpoint.save(tmp_path, state_of(1), step=4096, meta=meta)
    assert path == tmp_path / "000000004096"
    assert checkpoint.load(path, state_of(0))[1] == meta | {"step": 4096}


def test_the_files_are_plain_arrays_and_json(tmp_path):
    state = {"key": jax.random.key(3), "half": jnp.bfloat16(1.0)}
    path = checkpoint.save(tmp_path, state, step=1, meta={})
    with np.load(path / "state.npz", allow_pickle=False) as archive:
        half, key = archive["arr_0"], archive["arr_1"]
    assert (half.dtype, half) == (np.uint16, 0x3F80)
    assert key.tolist() == [0, 3]
    described = json.loads((path / "meta.json").read_text())["leaves"]
    assert described[0] == {"path": "['half']", "shape": [], "dtype": "bfloat16"}
    assert described[1]["key_impl"] == "threefry2x32"


# Which ones stay ---------------------------------------------------------------------------------------------------


def test_the_last_ones_and_the_protected_ones_stay(tmp_path):
    for step in range(0, 70, 10):
        checkpoint.save(tmp_path, state_of(step), step, {}, keep=2, protect=[20])
    assert checkpoint.steps(tmp_path) == [20, 50, 60]
    assert len(list(tmp_path.iterdir())) == 3


def test_going_back_gives_up_the_later_ones(tmp_path):
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, state_of(step), step, {}, keep=9)
    checkpoint.save(tmp_path, state_of(20), 2, {}, keep=9, protect=[3])
    assert checkpoint.steps(tmp_path) == [1, 2]
    assert_same(checkpoint.load(tmp_path / "000000000002", state_of(0))[0], state_of(20))


def test_steps_are_in_the_order_of_numbers(tmp_path):
    for step in (5, 2 * 10**11, 10**13):
        checkpoint.save(tmp_path, state_of(1), step, {})
    assert checkpoint.steps(tmp_path) == [5, 2 * 10**11, 10**13]
    assert checkpoint.steps(tmp_path / "missing") == []


@pytest.mark.parametrize("arguments", [{"step": 1, "keep": 0}, {"step": -1}])
def test_impossible_arguments_are_refused(tmp_path, arguments):
    with pytest.raises(InputError, match="keep must be at least 1 and step at least 0"):
        checkpoint.save(tmp_path, state_of(1), meta={}, **arguments)


# Kills -------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Not an Exception, so that nobody handles it."""


def dying(operation, countdown):
    """The operation until the countdown has ended, and death in its place from then on."""

    def run(*arguments, **options):
        if next(countdown, None) is None:
            raise Killed
        return operation(*arguments, **options)

    return run


@pytest.mark.parametrize("second", [1, 2], ids=["the same step again", "the next step"])
def test_a_kill_before_any_file_operation_leaves_a_whole_checkpoint(tmp_path, monkeypatch, second):
    """With `keep=1`, so that there is never another one to fall back to."""
    operations = [(Path, "rename"), (Path, "mkdir"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (json, "dump")]
    survivors = []
    for fatal in range(100):
        directory = tmp_path / str(fatal)
        checkpoint.save(directory, state_of(1), 1, {"value": 1}, keep=1)
        countdown = iter(range(fatal))
        with monkeypatch.context() as patch:
            for owner, name in operations:
                patch.setattr(owner, name, dying(getattr(owner, name), countdown))
            try:
                checkpoint.save(directory, state_of(2), second, {"value": 2}, keep=1)
                finished = True
            except Killed:
                finished = False
        state, meta, _ = checkpoint.newest(directory, state_of(0), report=pytest.fail)
        assert_same(state, state_of(meta["value"]))
        survivors.append(meta["value"])
        for name in filter(str.isdigit, os.listdir(directory)):  # also those that were about to be removed
            checkpoint.load(directory / name, state_of(0))
        checkpoint.save(directory, state_of(3), 3, {"value": 3}, keep=1)
        assert os.listdir(directory) == ["000000000003"]
        if finished:
            break
    assert finished
    assert survivors == sorted(survivors)
    assert {1, 2} == set(survivors)
    assert len(survivors) > 10


SAVES_FOREVER = """
import sys, itertools, numpy as np
from pathlib import Path
from lehr.training import checkpoint
for value in itertools.count():
    state = {"a": np.full(50_000, value), "b": np.full(1000, -value)}
    checkpoint.save(Path(sys.argv[1]), state, value // 2, {"value": value}, keep=1)
"""


@pytest.mark.slow
def test_a_process_killed_at_random_moments_leaves_a_whole_checkpoint(tmp_path):
    template = {"a": np.zeros(50_000, int), "b": np.zeros(1000, int)}
    moments = random.Random(0)
    for number in range(4):
        directory = tmp_path / str(number)
        child = subprocess.Popen([sys.executable, "-c", SAVES_FOREVER, str(directory)])
        deadline = time.monotonic() + 60
        try:
            while not checkpoint.steps(directory):
                assert child.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.2))
        finally:
            child.kill()
        assert child.wait() == -signal.SIGKILL
        state, meta, _ = checkpoint.newest(directory, template, report=pytest.fail)
        assert set(state["a"]) == {meta["value"]}
        assert set(state["b"]) == {-meta["value"]}
        assert meta["step"] == meta["value"] // 2


# Damage ------------------------------------------------------------------------------------------------------------


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def empty(file):
    file.write_bytes(b"")


@pytest.mark.parametrize("name", ["state.npz", "meta.json"])
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, empty, Path.unlink])
def test_a_damaged_newest_is_reported_and_the_one_before_is_used(tmp_path, name, damage):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, state_of(step), step, {})
    damage(tmp_path / "000000000003" / name)
    with pytest.raises(
        CheckpointError, match=rf"^The checkpoint file '.*000000000003/{name}' (is damaged|cannot be read): .*\.$"
    ):
        checkpoint.load(tmp_path / "000000000003", state_of(0))
    reports = []
    state, meta, path = checkpoint.newest(tmp_path, state_of(0), reports.append)
    assert_same(state, state_of(2))
    assert (meta["step"], path.name) == (2, "000000000002")
    assert len(reports) == 1
    assert "000000000003" in reports[0]


@pytest.mark.parametrize("name", ["state.npz", "meta.json"])
def test_no_flipped_byte_gives_another_state(tmp_path, name):
    path = checkpoint.save(tmp_path, state_of(1), 1, {"best": 0.25})
    whole = (path / name).read_bytes()
    refused = 0
    for place in range(len(whole)):
        (path / name).write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            state, meta = checkpoint.load(path, state_of(0))
        except CheckpointError:
            refused += 1
        else:
            assert_same(state, state_of(1))
            assert meta == {"best": 0.25, "step": 1}
    assert refused > 0.9 * len(whole)


def test_when_all_are_damaged_or_there_is_none_the_error_says_so(tmp_path):
    with pytest.raises(InputError, match="There is no checkpoint in"):
        checkpoint.newest(tmp_path, state_of(0))
    for step in (1, 2):
        empty(checkpoint.save(tmp_path, state_of(step), step, {}) / "state.npz")
    with pytest.warns(UserWarning, match="is damaged") as seen, pytest.raises(CheckpointError, match="None of the 2"):
        checkpoint.newest(tmp_path, state_of(0))
    assert len(seen) == 2


def sealed(path, **changes):
    """Change the document of a checkpoint so that its checksums agree, as somebody with bad intentions would."""
    document = json.loads((path / "meta.json").read_text()) | changes
    del document["sha256"]
    (path / "meta.json").write_text(json.dumps(document | {"sha256": checkpoint_files.checksum_of(document)}))


def test_a_pickle_is_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return pytest.fail, ("code ran",)

    path = checkpoint.save(tmp_path, {"x": jnp.zeros(1)}, 1, {})
    np.savez(path / "state.npz", np.array([Bomb()], object))
    reseal(path)
    with pytest.raises(CheckpointError, match="it does not contain plain arrays"):
        checkpoint.load(path, {"x": jnp.zeros(1)})


def reseal(path, **changes):
    """Make the checksum of `state.npz` agree, too."""
    sealed(path, state_sha256=hashlib.sha256((path / "state.npz").read_bytes()).hexdigest(), **changes)


def compressed_zeros(path):
    np.savez_compressed(path / "state.npz", np.zeros(1 << 26), np.zeros((3, 2), np.float32), np.uint32(0))


def compressed_but_fitting(path):
    np.savez_compressed(path / "state.npz", np.arange(4, dtype=np.int32), np.zeros((3, 2), np.float32), np.uint32(0))


def a_header_that_lies(path):
    with zipfile.ZipFile(path / "state.npz") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path / "state.npz", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content.replace(b"(3, 2), }         ", b"(3000000000, 2), }"))


def an_array_of_another_shape(path):
    np.savez(path / "state.npz", np.arange(4, dtype=np.int32), np.zeros((2, 3), np.float32), np.uint32(0))


def an_array_of_another_dtype(path):
    np.savez(path / "state.npz", np.arange(4, dtype=np.int32), np.zeros((3, 2), np.int32), np.uint32(0))


def more_arrays(path):
    np.savez(path / "state.npz", np.arange(4, dtype=np.int32), np.zeros((3, 2), np.float32), np.uint32(0), np.zeros(3))


def no_archive(path):
    (path / "state.npz").write_bytes(b"PK" * 100)


@pytest.mark.parametrize(
    ("bomb", "cause"),
    [
        (compressed_zeros, "too many"),
        (compressed_but_fitting, "another size"),
        (a_header_that_lies, "another array"),
        (an_array_of_another_shape, "another array"),
        (an_array_of_another_dtype, "another array"),
        (more_arrays, "other arrays"),
        (no_archive, "not a zip file"),
    ],
)
def test_sizes_are_checked_before_anything_is_read(tmp_path, bomb, cause):
    """The first takes 512 MiB when it is read, from a file of 0.5 MB."""
    path = checkpoint.save(tmp_path, state_of(1), 1, {})
    whole = (path / "state.npz").read_bytes()
    bomb(path)
    assert (path / "state.npz").read_bytes() != whole
    reseal(path)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"it does not contain plain arrays|bytes are too many") as caught:
        checkpoint.load(path, state_of(0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cause in f"{caught.value} {caught.value.__cause__}"
    assert peak < 20e6


@pytest.mark.parametrize("name", ["state.npz", "meta.json"])
def test_a_file_of_a_terabyte_is_not_read(tmp_path, name):
    path = checkpoint.save(tmp_path, state_of(1), 1, {})
    os.truncate(path / name, 1 << 40)  # a hole: it takes no space
    with pytest.raises(CheckpointError, match="1099511627776 bytes are too many"):
        checkpoint.load(path, state_of(0))


HOSTILE_LEAF = {"path": ".count", "shape": [], "dtype": "uint32"}


@pytest.mark.parametrize(
    "changes",
    [
        {"leaves": None},
        {"leaves": [1, 2]},
        {"leaves": [HOSTILE_LEAF, HOSTILE_LEAF]},
        {"leaves": [HOSTILE_LEAF | {"chunks": 5}]},
        {"leaves": [HOSTILE_LEAF | {"chunks": [None]}]},
        {"leaves": [{"path": ".count"}]},
        {"meta": []},
        {"step": "1"},
        {"format": None},
        {"state_sha256": None},
    ],
    ids=str,
)
def test_a_document_with_anything_else_in_it_is_damaged(tmp_path, changes):
    path = checkpoint.save(tmp_path, state_of(1), 1, {})
    sealed(path, **changes)
    with pytest.raises(CheckpointError, match="it does not describe a checkpoint"):
        checkpoint.load(path, state_of(0))


def test_deep_json_is_damaged(tmp_path):
    path = checkpoint.save(tmp_path, state_of(1), 1, {})
    (path / "meta.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="it is not valid JSON"):
        checkpoint.load(path, state_of(0))


def test_keys_of_an_unknown_kind_are_damaged(tmp_path):
    path = checkpoint.save(tmp_path, {"key": jax.random.key(0)}, 1, {})
    leaves = json.loads((path / "meta.json").read_text())["leaves"]
    sealed(path, leaves=[leaves[0] | {"key_impl": "evil"}])
    with pytest.raises(CheckpointError, match="is not a random key"):
        checkpoint.load(path, {"key": jax.random.key(0)})


def test_another_format_is_no_damage(tmp_path):
    sealed(checkpoint.save(tmp_path, state_of(1), 1, {}), format=4)
    with pytest.raises(InputError, match="has format 4, but this version of Lehr reads formats up to 3"):
        checkpoint.newest(tmp_path, state_of(0))


# A replay ----------------------------------------------------------------------------------------------------------

CHUNK = 1 << 12
ROW = 256  # bytes of a slot in the ring, so that 16 slots are a chunk


class Run(NamedTuple):
    learner: Learner
    reward_model: Learner


@pytest.fixture
def _small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", CHUNK)
    monkeypatch.setattr(chunks, "LEAST", CHUNK)


def ring(seed, slots=320):
    return np.random.default_rng(seed).standard_normal((slots, ROW // 4)).astype(np.float32)


def with_replay(value, memory, reward_memory=()):
    learner = Learner({"w": jnp.full((3, 2), value)}, (), {"filled": jnp.int32(value)}, memory)
    return Run(learner, Learner((), (), (), reward_memory))


def files_of(directory):
    """The size of every file, by its path and time of writing: a file that is written again counts again."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {(str(path), path.stat().st_ino, path.stat().st_mtime_ns): path.stat().st_size for path in files}


@pytest.mark.usefixtures("_small_chunks")
def test_a_replay_is_written_once_and_then_only_where_it_changed(tmp_path):
    """20 chunks are written at first; later 5 slots change, in 1 chunk, or in 2 across the seam of the ring."""
    memory, template = ring(0), with_replay(0, {"obs": np.zeros((320, 64), np.float32), "at": np.int32(0)})
    states, before = {}, {}
    for step, place in enumerate([0, 3, 21, 318], start=1):  # the last slots and, after the seam, the first
        memory = memory.copy()
        if step > 1:
            memory[np.arange(place, place + 5) % 320] = ring(step, 5)
        states[step] = with_replay(step, {"obs": memory, "at": np.int32(place)})
        path = checkpoint.save(tmp_path, states[step], step, {}, keep=4)
        now = files_of(tmp_path)
        written = sum(size for file, size in now.items() if file not in before)
        chunks = {1: 20, 2: 1, 3: 1, 4: 2}[step]
        rest = sum(file.stat().st_size for file in path.iterdir())
        assert written == chunks * CHUNK + rest
        assert rest < CHUNK + 2000  # names of chunks
        before = now
    assert sum(before.values()) < memory.nbytes + 4 * CHUNK + 4 * (CHUNK + 2000)  # of four checkpoints
    for step, state in states.items():
        loaded, meta = checkpoint.load(tmp_path / f"{step:012d}", template)
        assert_same(loaded, state)
        assert meta == {"step": step}


@pytest.mark.usefixtures("_small_chunks")
def test_chunks_that_no_checkpoint_has_are_deleted(tmp_path):
    for step in range(1, 5):
        checkpoint.save(tmp_path, with_replay(step, ring(step)), step, {}, keep=2)
    assert len(list((tmp_path / "memory").iterdir())) == 2 * 20
    checkpoint.save(tmp_path, with_replay(5, ring(4)), 5, {}, keep=2)
    assert len(list((tmp_path / "memory").iterdir())) == 20
    checkpoint.save(tmp_path, with_replay(6, ()), 6, {}, keep=1)
    assert list((tmp_path / "memory").iterdir()) == []


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("dtype", ["float32", "uint8", jnp.bfloat16, "bool"], ids=str)
def test_replays_of_any_dtype_and_shape_come_back(tmp_path, dtype):
    raw = np.random.default_rng(0).integers(0, 2, (3, 1000, 7)).astype(dtype)
    state = with_replay(1, {"a": jnp.asarray(raw), "small": jnp.zeros(3)}, [jnp.asarray(raw[:2, ::-1])])
    path = checkpoint.save(tmp_path, state, 1, {})
    assert (tmp_path / "memory").is_dir()
    assert_same(checkpoint.load(path, jax.eval_shape(lambda: state))[0], state)
    with np.load(path / "state.npz") as archive:
        assert max(archive[name].nbytes for name in archive.files) < CHUNK


def test_a_small_memory_stays_in_the_state(tmp_path):
    state = with_replay(1, ring(0))
    path = checkpoint.save(tmp_path, state, 1, {})
    assert sorted(os.listdir(tmp_path)) == [path.name]
    assert json.loads((path / "meta.json").read_text())["format"] == 2
    assert_same(checkpoint.load(path, state)[0], state)


@pytest.mark.usefixtures("_small_chunks")
def test_a_kill_before_any_file_operation_leaves_every_kept_checkpoint_with_its_replay(tmp_path, monkeypatch):
    operations = [(Path, "rename"), (Path, "replace"), (Path, "mkdir"), (os, "fsync"), (Path, "unlink"), (os, "rmdir")]
    memories = {step: ring(0, 64) for step in range(5)}
    for step in memories:
        memories[step][16 * (step % 4)] = step
    template = with_replay(0, memories[0])
    for fatal in range(200):
        directory = tmp_path / str(fatal)
        for step in (1, 2):
            checkpoint.save(directory, with_replay(step, memories[step]), step, {}, keep=2)
        countdown, finished = iter(range(fatal)), True
        with monkeypatch.context() as patch:
            for owner, name in operations:
                patch.setattr(owner, name, dying(getattr(owner, name), countdown))
            try:
                checkpoint.save(directory, with_replay(3, memories[3]), 3, {}, keep=2)
            except Killed:
                finished = False
        kept = checkpoint.steps(directory)
        assert kept in ([1, 2], [1, 2, 3], [2, 3])
        for step in kept:
            assert_same(checkpoint.load(directory / f"{step:012d}", template)[0], with_replay(step, memories[step]))
        checkpoint.save(directory, with_replay(4, memories[4]), 4, {}, keep=1)
        assert sorted(os.listdir(directory)) == ["000000000004", "memory"]
        assert len(os.listdir(directory / "memory")) == 4
        if finished:
            break
    assert finished
    assert fatal > 15


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, empty, Path.unlink])
def test_a_damaged_chunk_is_noticed_and_the_checkpoint_before_is_used(tmp_path, damage):
    for step in (1, 2):
        checkpoint.save(tmp_path, with_replay(step, ring(step)), step, {})
    leaves = json.loads((tmp_path / "000000000002" / "meta.json").read_text())["leaves"]
    names = next(leaf["chunks"] for leaf in leaves if "chunks" in leaf)
    damage(tmp_path / "memory" / names[7])
    reports, lost = [], []
    state, meta, _ = checkpoint.newest(tmp_path, with_replay(0, ring(0)), reports.append)
    assert_same(state, with_replay(1, ring(1)))
    assert re.search(rf"The memory of the checkpoint '.*0002' is damaged: .*{names[7]}'", reports[0])
    state, meta, _ = checkpoint.newest(tmp_path, with_replay(0, ring(0)), pytest.fail, memory_lost=lost.append)
    assert_same(state, with_replay(2, ring(0)))  # the template's memory, if that is allowed
    assert meta == {"step": 2, "without_memory": True}
    assert len(lost) == 1
    checkpoint.save(tmp_path, with_replay(3, ring(2)), 3, {})
    if damage is not flip_a_bit:  # a chunk of the wrong size is written again
        assert_same(checkpoint.load(tmp_path / "000000000003", with_replay(0, ring(0)))[0], with_replay(3, ring(2)))


@pytest.mark.usefixtures("_small_chunks")
def test_a_checkpoint_without_memory_takes_the_one_of_the_template(tmp_path):
    path = checkpoint.save(tmp_path, with_replay(1, ring(1)), 1, {}, memory=False)
    assert sorted(os.listdir(tmp_path)) == [path.name]
    assert sum(file.stat().st_size for file in path.iterdir()) < CHUNK
    state, meta = checkpoint.load(path, with_replay(0, ring(7)))
    assert_same(state, with_replay(1, ring(7)))
    assert meta == {"step": 1, "without_memory": True}


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("names", [["../../secret"], ["0" * 64] * 20, [], ["a/b"] * 20])
def test_names_of_chunks_are_not_trusted(tmp_path, names):
    path = checkpoint.save(tmp_path, with_replay(1, ring(1)), 1, {})
    leaves = json.loads((path / "meta.json").read_text())["leaves"]
    sealed(path, leaves=[leaf | ({"chunks": names} if "chunks" in leaf else {}) for leaf in leaves])
    with pytest.raises(CheckpointError, match=r"The memory of the checkpoint .* is damaged"):
        checkpoint.load(path, with_replay(0, ring(0)))


# Templates that do not fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ({"w": jnp.zeros(3)}, "Leaf ['w'] is float32[2], expected float32[3]."),
        ({"w": jnp.zeros(2, jnp.bfloat16)}, "Leaf ['w'] is float32[2], expected bfloat16[2]."),
        ({"w": 1.0}, "Leaf ['w'] is float32[2], expected Python float."),
        ({"w": jnp.zeros(2), "b": [jnp.int32(0)]}, "Leaf ['b'][0] (int32[]) is missing."),
        ({}, "Leaf ['w'] (float32[2]) is unexpected."),
    ],
    ids=["shape", "dtype", "number", "missing", "extra"],
)
def test_each_difference_to_the_template_is_named(tmp_path, template, sentence):
    path = checkpoint.save(tmp_path, {"w": jnp.zeros(2)}, 1, {})
    with pytest.raises(InputError) as caught:
        checkpoint.newest(tmp_path, template, report=pytest.fail)
    assert str(caught.value) == (
        f"The checkpoint '{path}' does not match. {sentence} Use the settings that it was saved with."
    )


@pytest.mark.parametrize(("saves", "word"), [(True, "with"), (False, "without")])
def test_double_precision_that_is_on_or_off_is_told(tmp_path, saves, word):
    with jax.enable_x64(saves):
        path = checkpoint.save(tmp_path, {"w": jnp.zeros(2, float)}, 1, {})
    with jax.enable_x64(not saves), pytest.raises(InputError, match=f"was saved {word} JAX_ENABLE_X64=1; use it like"):
        checkpoint.load(path, {"w": jnp.zeros(2, float)})


def test_keys_of_another_kind_do_not_fit(tmp_path):
    path = checkpoint.save(tmp_path, jax.random.key(0), 1, {})
    with pytest.raises(InputError, match=r"Leaf \. is key<fry>\[\], expected key<rbg>\[\]\."):
        checkpoint.load(path, jax.random.key(0, impl="rbg"))


def test_of_many_differences_the_first_five_are_named(tmp_path):
    path = checkpoint.save(tmp_path, [jnp.zeros(2)] * 9, 1, {})
    with pytest.raises(InputError) as caught:
        checkpoint.load(path, [jnp.zeros(1)] * 9)
    assert str(caught.value).count(", expected ") == 5
    assert "4 more leaves differ." in str(caught.value)


@pytest.mark.parametrize("leaf", ["text", np.array(["text"]), np.array([{}]), 2**70])
def test_what_is_no_array_of_numbers_is_refused(tmp_path, leaf):
    with pytest.raises(
        TypeError, match=r"Leaf \['x'\] is a (str|ndarray|int); a checkpoint can only hold arrays of numbers"
    ):
        checkpoint.save(tmp_path, {"x": leaf}, 1, {})
    assert checkpoint.steps(tmp_path) == []
