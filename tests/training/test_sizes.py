"""Numbers beyond the machine are refused with one sentence, before anything is allocated."""

import contextlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import lehr
from lehr import types
from tests.small import SMALL


@pytest.mark.parametrize(
    ("algorithm", "settings", "sentence"),
    [
        ("ppo", {"seed": 2**64 - 1}, "seed is 18446744073709551615; it must be 9223372036854775807 or less."),
        ("ppo", {"seed": "18446744073709551616"}, "seed is '18446744073709551616'; give a whole number such as"),
        ("ppo", {"seed": 10**5000}, "seed is a whole number of 16610 bits; give a whole number such as"),
        ("ppo", {"num_envs": "1e30"}, "num_envs is '1e30'; give a whole number such as"),
        ("ppo", {"num_envs": "1e9"}, r"An update has 8000000000 env steps, .* it must be below 2\^32: reduce one"),
        ("ppo", {"horizon": "1e12"}, "horizon is 1000000000000; it must be 2147483647 or less."),
        ("ppo", {"horizon": "1e9", "num_envs": 2}, "The run needs 30 GiB of memory, but there are only 16 GiB; reduce"),
        ("ppo", {"epochs": 2**31}, "epochs is 2147483648; it must be 2147483647 or less."),
        ("ppo", {"hidden_sizes": ["1e30"]}, r"hidden_sizes is \['1e30'\]; give whole numbers such as"),
        ("ppo", {"hidden_sizes": "1e6,1e6"}, "The network needs 7451 GiB of memory, but there are only 16 GiB; choose"),
        ("ppo", {"critic_hidden_sizes": "1," * 1000}, "critic_hidden_sizes has 1000 layers; the maximum is 64."),
        ("ppo", {"frame_stack": "1e9"}, "frame_stack is 1000000000; it must be 1024 or less."),
        ("ppo", {"total_steps": 10**400}, "total_steps is 1000.*…0000.*; give a whole number such as"),
        ("ppo", {"total_steps": 2**49}, "total_steps is 562949953421312; it must be 281474976710656 or less."),
        ("ppo", {"evaluate_every": 10**400}, "evaluate_every is 1000.*…0000.*; give a whole number such as"),
        ("impala", {"lag": "3.5e38"}, "lag is '3.5e38'; give a whole number such as"),
        (
            "impala",
            {"lag": 2 * 10**9},
            "The run needs [0-9]+ GiB of memory, but there are only 16 GiB; reduce num_envs",
        ),
    ],
)
def test_sizes_beyond_the_machine_are_refused_before_anything_is_allocated(
    algorithm, settings, sentence, tmp_path, monkeypatch
):
    monkeypatch.setattr(types, "memory_size", lambda: 16 * 2**30)
    given = {
        name: value for name, value in SMALL.items() if algorithm == "ppo" or name not in ("epochs", "minibatches")
    }
    with pytest.raises(lehr.InputError, match=sentence):
        lehr.train(algorithm, "CartPole-v1", run_dir=tmp_path / "run", **(given | settings))
    assert not (tmp_path / "run").exists()


def test_what_several_gpus_share_may_be_larger_than_one_of_them(monkeypatch):
    """A replay of 24 GiB on GPUs of 16 GiB."""
    replay = jax.ShapeDtypeStruct((24 * 2**30,), jnp.uint8)
    monkeypatch.setattr(types, "memory_size", lambda: 16 * 2**30)
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform="gpu")])
    for devices in (1, 2):
        is_refused = pytest.raises(
            lehr.InputError, match="The replay needs 24 GiB of memory, but there are only 16 GiB"
        )
        with types.shared_between(devices), is_refused if devices == 1 else contextlib.nullcontext():
            types.check_fits("The replay", "lower replay_size", replay=replay)
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform="cpu")])  # they share one memory
    with types.shared_between(2), pytest.raises(lehr.InputError, match="The replay needs 24 GiB"):
        types.check_fits("The replay", "lower replay_size", replay=replay)
