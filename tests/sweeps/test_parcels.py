"""Copies of a wave's directory."""

import itertools
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from lehr.sweeps.parcels import marks, pack, unpack
from lehr.training import checkpoint, columns

TEMPLATE = {"x": jnp.zeros(4), "step": 0}


def save(path, begin, step, keep=2):
    """What a population writes with a checkpoint: the rows since the one before, and the state."""
    updates = np.arange(begin + 1, step + 1)
    columns.write(path / "metrics", begin, {"update": updates, "loss": updates[:, None] * 0.5})
    state = {"x": jnp.full(4, float(step)), "step": step}
    checkpoint.save(path / "checkpoints", state, step, {"of": step}, keep)


def content(path):
    return {name: (path / name).read_bytes() for name in marks(path)}


def test_a_copy_is_kept_up_to_date_by_what_changed(tmp_path):
    origin, copy = tmp_path / "origin", tmp_path / "copy"
    known = {}
    for begin, step in itertools.pairwise([0, 10, 20, 30]):
        save(origin, begin, step)
        (origin / "status.json").write_text(f'{{"status": "{step}"}}')
        (origin / ".lock").write_text("1")
        parcel = pack(origin, known)
        known = marks(origin)
        assert sorted(parcel.files) == [
            *(f"checkpoints/{step:012d}/{part}" for part in ("meta.json", "state.npz")),
            f"metrics/{begin:012d}.npz",
            "status.json",
        ]
        unpack(copy, parcel)
        assert content(copy) == content(origin)
    assert checkpoint.steps(copy / "checkpoints") == [20, 30]


def test_parcels_that_wait_become_one(tmp_path):
    origin, copy = tmp_path / "origin", tmp_path / "copy"
    save(origin, 0, 10)
    first, known = pack(origin, {}), marks(origin)
    save(origin, 10, 20, keep=1)
    both = first.followed_by(pack(origin, known))
    assert f"checkpoints/{10:012d}/state.npz" not in both.files
    unpack(copy, both)
    assert content(copy) == content(origin)


def test_rows_that_were_made_again_replace_those_before(tmp_path):
    """A lost worker sent rows up to update 20, and the next one goes on from the checkpoint of update 10."""
    origin, copy = tmp_path / "origin", tmp_path / "copy"
    save(origin, 0, 10)
    unpack(copy, pack(origin, {}))
    save(copy, 10, 20)
    save(copy, 20, 25)
    unpack(copy, pack(origin, {}))
    assert content(copy) == content(origin)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_copy_that_is_killed_at_any_moment_can_be_resumed_from(keep, tmp_path, monkeypatch):
    """Stop before each operation that changes files: the newest checkpoint is whole, with all rows before it."""
    origin = tmp_path / "origin"
    save(origin, 0, 10, keep)
    first, known = pack(origin, {}), marks(origin)
    save(origin, 10, 20, keep)
    second = pack(origin, known)
    places = [*((Path, name) for name in ("replace", "rename", "unlink", "mkdir")), (shutil, "rmtree")]
    found = set()
    for moment in itertools.count():
        copy = tmp_path / f"copy-{moment}"
        unpack(copy, first)
        calls = itertools.count()
        with monkeypatch.context() as patched:
            for owner, name in places:
                patched.setattr(owner, name, killed(getattr(owner, name), calls, moment))
            try:
                unpack(copy, second)
                is_whole = True
            except KeyboardInterrupt:
                is_whole = False
        state, meta, _ = checkpoint.newest(copy / "checkpoints", TEMPLATE, report=pytest.fail)
        step = meta["step"]
        found.add(step)
        assert meta["of"] == state["step"] == step
        columns.cut(copy / "metrics", step)
        assert columns.read(copy / "metrics", ["update"])["update"].tolist() == list(range(1, step + 1))
        unpack(copy, pack(origin, {}))
        assert content(copy) == content(origin)
        if is_whole:
            break
    assert moment > 5
    assert found == {10, 20}


def killed(function, calls, moment):
    """The function, but the process is killed when it is called at a moment."""

    def call(*arguments, **options):
        if next(calls) == moment:
            raise KeyboardInterrupt
        return function(*arguments, **options)

    return call
