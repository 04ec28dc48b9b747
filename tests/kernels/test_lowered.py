"""Which kernels JAX has lowered before."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr.kernels import lowered, mlp
from lehr.kernels.mlp_programs import Plan

PLAN = Plan(
    rows=64,
    first=0,
    inputs=4,
    hidden=(8, 8),
    widths=(2, 1),
    activation="tanh",
    block_rows=64,
    num_warps=4,
    backward_block_rows=64,
    backward_num_warps=4,
    interpret=False,
    precision=None,
    is_half=True,
    forward_programs=1,
    programs=1,
)


@pytest.fixture
def folder(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    forget()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    forget()


def forget():
    """As in another process."""
    mlp._refused.cache_clear()
    lowered._lowered.clear()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_a_kernel_is_lowered_alone_once_for_all_processes(folder, monkeypatch, lowers_for_cuda):
    tried = []
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda *given: tried.append(1) or forward(*given))
    for _ in range(2):
        forget()
        assert mlp._refusal(PLAN) == ""
    assert tried == [1]


def test_a_kernel_is_tried_again_with_other_options_of_jax_in_the_same_process(folder, monkeypatch):
    tried = []
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda *given: tried.append(1) or forward(*given))
    for precision in (None, "highest", None):
        with jax.default_matmul_precision(precision):
            mlp._refusal(PLAN)
    assert tried == [1, 1]


def test_a_kernel_that_is_refused_is_tried_again(folder, monkeypatch):
    def refuse(*given):
        raise ValueError("no such operation")

    monkeypatch.setattr(mlp, "forward", refuse)
    for _ in range(2):
        forget()
        assert mlp._refusal(PLAN) == "ValueError: no such operation"
    assert not (folder / "kernels.json").exists()


def test_another_source_other_shapes_or_a_damaged_file_know_nothing(folder, monkeypatch):
    tried = []

    def is_tried(description, size=1):
        """Whether JAX lowers such a kernel, in another process."""
        forget()
        before = len(tried)
        lowered.check(description, lambda x: tried.append(1) or x + 1, jnp.zeros(size))
        return len(tried) > before

    assert is_tried("loop at 0x7f01")
    assert not is_tried("loop at 0x7f02")
    assert is_tried("another loop at 0x7f01")
    assert is_tried("loop at 0x7f01", size=2)
    with monkeypatch.context() as changed:
        changed.setattr(lowered, "_source", lambda: "changed")
        assert is_tried("loop at 0x7f01")
    with jax.default_matmul_precision("highest"):
        assert is_tried("loop at 0x7f01")
    with monkeypatch.context() as changed:
        changed.setattr(lowered, "settings", lambda: "another GPU")
        assert is_tried("loop at 0x7f01")
    (folder / "kernels.json").write_text("{")
    assert is_tried("loop at 0x7f01")
    assert not is_tried("loop at 0x7f01")  # the file is whole again


def test_a_process_tries_a_kernel_once_even_without_a_cache(folder):
    jax.config.update("jax_compilation_cache_dir", None)
    tried = []
    for _ in range(2):
        lowered.check("loop", lambda x: tried.append(1) or x + 1, jnp.zeros(1))
    assert tried == [1]


@pytest.mark.parametrize(("factor", "passes"), [(2.0, True), (2.01, True), (2.2, False), (float("nan"), False)])
def test_a_kernel_is_compared_with_plain_jax_where_it_runs_also_while_something_is_traced(
    folder, monkeypatch, factor, passes
):
    monkeypatch.setattr(lowered, "LOWERED_FOR", "cpu")
    monkeypatch.setattr(lowered, "RUN_ON", "cpu")
    numbers = [np.arange(4, dtype=np.float32), {"other": np.ones((2, 3), np.float32)}]

    def traced(x):
        lowered.check("doubles", lambda given: jax.tree.map(lambda x: factor * x, given), numbers, plain=doubled)
        return x

    def doubled(given):
        return jax.tree.map(lambda x: 2.0 * x, given)

    if passes:
        jax.jit(traced)(1.0)
    else:
        with pytest.raises(ValueError, match="differ from plain JAX's by"):
            jax.jit(traced)(1.0)


@pytest.mark.parametrize(
    ("names", "lowest"),
    [
        (["9.0"], (9, 0)),
        (["10.0", "8.6"], (8, 6)),
        (["gfx942:sramecc+:xnack-"], ()),
        ([None], ()),
    ],
)
def test_the_capability_is_the_lowest_of_all_gpus(monkeypatch, names, lowest):
    devices = [SimpleNamespace(compute_capability=name) for name in names]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert lowered.capability.__wrapped__() == lowest


@pytest.mark.parametrize(
    ("platforms", "plugin", "is_loaded"),
    [(None, True, True), ("cuda,cpu", True, True), ("gpu", True, True), ("cpu", True, False), (None, False, False)],
)
def test_what_lowers_for_a_gpu_is_imported_where_there_may_be_one(monkeypatch, platforms, plugin, is_loaded):
    imported = []
    monkeypatch.setattr(lowered.jax, "config", SimpleNamespace(jax_platforms=platforms))
    monkeypatch.setattr(lowered.importlib, "import_module", imported.append)
    monkeypatch.setattr(lowered.importlib.util, "find_spec", lambda name: plugin or None)
    lowered.load()
    assert ("jax.experimental.pallas.mosaic_gpu" in imported) == is_loaded


def test_a_machine_without_plugins_of_jax_imports_nothing(monkeypatch):
    def fail(name):
        raise ImportError(name)

    monkeypatch.setattr(lowered.importlib, "import_module", fail)
    lowered.load()
