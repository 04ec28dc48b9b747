"""The options with which programs are compiled for a CPU."""

import jax
import jax.numpy as jnp
import pytest

from lehr.training import compile_options


class Lowered:
    """A program that notes the options it is compiled with; XLA knows only some."""

    def __init__(self, known):
        self.known, self.tried = known, []

    def compile(self, options=None):
        self.tried.append(options or {})
        for name in options or {}:
            if name not in self.known:
                raise jax.errors.JaxRuntimeError(f"INVALID_ARGUMENT: No such compile option: '{name}'")
        return "compiled"


@pytest.fixture(autouse=True)
def _no_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")


def test_this_jax_knows_the_options():
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(2))
    for options in (compile_options.UPDATES, compile_options.ONCE):
        assert lowered.compile(options)(jnp.zeros(2)).tolist() == [1, 1]


def test_what_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--one=256")
    lowered = Lowered({"two"})
    assert compile_options.compiled(lowered, {"one": 512, "two": 1}) == "compiled"
    assert lowered.tried == [{"two": 1}]


def test_another_xla_may_not_know_them():
    lowered = Lowered({"one"})
    assert compile_options.compiled(lowered, {"one": 512, "two": 1}) == "compiled"
    assert lowered.tried == [{"one": 512, "two": 1}, {}]


def test_other_errors_are_raised():
    class Broken(Lowered):
        def compile(self, options=None):
            raise jax.errors.JaxRuntimeError("out of memory")

    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        compile_options.compiled(Broken(set()), {})
