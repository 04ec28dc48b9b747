"""Which kernels JAX has lowered before."""

import jax
import pytest

from lehr.kernels import lowered, mlp
from lehr.kernels.mlp_programs import Plan

PLAN = Plan(64, 0, 4, (8, 8), (2, 1), "tanh", None, 64, 4, 64, 4, 1, False)


@pytest.fixture
def folder(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    mlp._refusal.cache_clear()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    mlp._refusal.cache_clear()


def test_a_kernel_is_lowered_alone_once_for_all_processes(folder, monkeypatch):
    tried = []
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda *given: tried.append(1) or forward(*given))
    for _ in range(2):
        mlp._refusal.cache_clear()  # as in another process
        assert mlp._refusal(PLAN) == ""
    assert tried == [1]


def test_a_kernel_that_is_refused_is_tried_again(folder, monkeypatch):
    def refuse(*given):
        raise ValueError("no such operation")

    monkeypatch.setattr(mlp, "forward", refuse)
    for _ in range(2):
        mlp._refusal.cache_clear()
        assert mlp._refusal(PLAN) == "ValueError: no such operation"
    assert not (folder / "kernels.json").exists()


def test_another_source_or_a_damaged_file_knows_nothing(folder, monkeypatch):
    lowered.remember("loop at 0x7f01")
    assert lowered.is_known("loop at 0x7f02")
    assert not lowered.is_known("another loop at 0x7f01")
    with monkeypatch.context() as changed:
        changed.setattr(lowered, "_source", lambda: "changed")
        assert not lowered.is_known("loop at 0x7f01")
    (folder / "kernels.json").write_text("{")
    assert not lowered.is_known("loop at 0x7f01")
