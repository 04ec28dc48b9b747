"""Demonstrations: what is recorded is what happened, a file holds it without loss, and what does not fit is refused."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lehr
from lehr.acting.demonstrations import Demonstrations, checked, read_demonstrations
from lehr.acting.policy import Policy, PolicyParameters, PolicyProgram
from lehr.acting.recording import record
from lehr.envs import make
from lehr.errors import InputError
from lehr.spaces import Box, Dict, Discrete, MultiDiscrete, Spaces

SPACES = Spaces(Box(-5, 5, (2,)), Discrete(3))


def small(**changes):
    """Three episodes of two, one and three steps."""
    given = Demonstrations(
        obs=np.arange(12, dtype=np.float32).reshape(6, 2) / 4,
        actions=np.array([0, 1, 2, 0, 1, 2]),
        rewards=np.array([1, 2, 4, 8, 16, 32], np.float32),
        terminated=np.array([0, 1, 0, 0, 0, 0], bool),
        truncated=np.array([0, 0, 1, 0, 0, 1], bool),
        final_obs=np.array([[-1, -1], [-2, -2], [-3, -3]], np.float32),
        lengths=np.array([2, 1, 3]),
    )
    return replace(given, **changes)


def test_returns_and_following_observations():
    demos = checked(small(), SPACES, "here")
    assert demos.returns.tolist() == [3, 4, 56]
    assert demos.next_obs[:, 0].tolist() == [0.5, -1, -2, 2, 2.5, -3]
    few = demos.first(2)
    assert few.returns.tolist() == [3, 4]
    assert few.obs.shape == (3, 2)
    assert few.final_obs[:, 0].tolist() == [-1, -2]
    assert demos.summary == "3 episodes of 1 to 3 steps (1 terminated), mean return 21 (3 to 56)"


def test_a_file_holds_all_of_it(tmp_path):
    path = small().save(tmp_path / "new" / "demos.npz")
    found, digest = read_demonstrations(str(path), SPACES)
    jax.tree.map(np.testing.assert_array_equal, vars(found), vars(checked(small(), SPACES, "")))
    with np.load(path, allow_pickle=False) as archive:
        names = {"obs", "actions", "rewards", "terminated", "truncated", "final_obs", "lengths"}
        assert set(archive.files) == names
    small(rewards=np.zeros(6, np.float32)).save(path)
    assert read_demonstrations(str(path), SPACES)[1] != digest


def test_a_link_is_replaced_and_what_was_there_stays_if_writing_fails(tmp_path, monkeypatch):
    outside, path = tmp_path / "outside.npz", tmp_path / "demos.npz"
    outside.write_bytes(b"mine")
    path.symlink_to(outside)
    small().save(path)
    assert outside.read_bytes() == b"mine"
    assert not path.is_symlink()
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(InputError, match=r"Cannot write '.*demos\.npz': No space left on device"):
        small().save(path)
    assert path.read_bytes() == before
    assert sorted(x.name for x in tmp_path.iterdir()) == ["demos.npz", "outside.npz"]


def test_a_dict_of_observations_has_an_array_for_each_key(tmp_path):
    space = Dict({"image": Box(0, 255, (2, 2, 1), np.uint8), "speed": Box(-1, 1, (1,))})

    def seen(size):
        image = np.arange(4 * size, dtype=np.uint8).reshape(size, 2, 2, 1)
        return {"image": image, "speed": np.linspace(-1, 1, size, dtype=np.float32)[:, None]}

    demos = small(obs=seen(6), final_obs=seen(3))
    path = demos.save(tmp_path / "demos.npz")
    with np.load(path) as archive:
        assert {"obs/image", "obs/speed", "final_obs/image", "final_obs/speed"} < set(archive.files)
    found, _ = read_demonstrations(str(path), Spaces(space, Discrete(3)))
    jax.tree.map(np.testing.assert_array_equal, found.obs, seen(6))
    with pytest.raises(InputError, match="have no obs, final_obs, but actions"):
        read_demonstrations(str(path), SPACES)


BAD = [
    ({"obs": np.zeros((6, 3), np.float32)}, "float32.6, 3. as obs, but the environment's space requires float32.2."),
    ({"obs": np.zeros((5, 2), np.float32)}, "have 5 obs, but lengths say 6 steps of 3 episodes"),
    ({"obs": np.full((6, 2), np.nan, np.float32)}, "have obs that are not finite"),
    ({"obs": {"a": np.zeros((6, 2))}}, "have other obs than the environment's space"),
    ({"final_obs": np.zeros((2, 2), np.float32)}, "have 2 final_obs, but lengths say 6 steps of 3 episodes"),
    ({"actions": np.full(6, 0.5)}, "float64.6. as actions, but the environment's space requires int32.. at each"),
    ({"actions": np.full(6, 3)}, "have actions from 3 to 3, outside of the environment's space, Discrete.n=3."),
    ({"rewards": np.zeros(4)}, "have float64.4. as rewards, but lengths require 6 numbers"),
    ({"rewards": np.full(6, np.inf)}, "have rewards that are not finite"),
    ({"terminated": np.zeros(6)}, "as terminated, but lengths require 6 bools"),
    ({"truncated": np.ones(6, bool)}, "have an episode that ends before its last step"),
    ({"lengths": np.array([], int)}, "are empty: lengths is int64.0."),
    ({"lengths": np.array([6, 0, 0])}, "are empty: .* without a step in every episode"),
]


@pytest.mark.parametrize(("changes", "sentence"), BAD)
def test_what_does_not_fit_is_refused_in_one_sentence(changes, sentence):
    with pytest.raises(InputError, match=sentence) as found:
        checked(small(**changes), SPACES, "demos.npz")
    assert str(found.value).startswith("The demonstrations 'demos.npz' ")
    assert "lehr record" in str(found.value)


def test_actions_outside_of_their_space_are_refused():
    for space, actions in (
        (Box(-1, 1, (1,)), np.full((6, 1), 1.5, np.float32)),
        (MultiDiscrete((2, 3)), np.tile([2, 0], (6, 1))),
        (Discrete(3, start=5), np.arange(6) % 3),  # as versions recorded them that counted from 0
    ):
        with pytest.raises(InputError, match="outside of the environment's space"):
            checked(small(actions=actions), Spaces(SPACES.observation, space), "demos.npz")


def test_integers_that_do_not_fit_are_refused():
    spaces, obs = Spaces(Box(-9, 9, (2,), np.int32), Discrete(3)), np.arange(12).reshape(6, 2)
    final = np.zeros((3, 2), int)
    assert checked(small(obs=obs, final_obs=final), spaces, "demos.npz").obs.dtype == np.int32
    with pytest.raises(InputError, match="have 4294967296 in obs, which does not fit into int32; give a file"):
        checked(small(obs=obs + 2**32 - 11, final_obs=final), spaces, "demos.npz")


def test_what_is_no_file_of_demonstrations_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file or directory; record some with 'lehr record"):
        read_demonstrations(str(tmp_path / "none.npz"), SPACES)
    text, array, pickled = tmp_path / "text.npz", tmp_path / "array.npz", tmp_path / "pickled.npz"
    text.write_text("obs: none")
    with array.open("wb") as file:
        np.save(file, np.zeros(3))
    np.savez(pickled, obs=np.array([{}], object))
    for path in (text, array, pickled):
        with pytest.raises(InputError, match="are not a file of plain arrays in NumPy's format"):
            read_demonstrations(str(path), SPACES)
    with pytest.raises(InputError, match=r"give a file name that ends in \.npz"):
        small().save(tmp_path / "demos.pkl")


# Recording -----------------------------------------------------------------------------------------------------------


def acting(env, rule):
    """A policy that follows a rule from observations `[N, ...]` to actions."""
    agent = SimpleNamespace(
        initial_carry=lambda shape: (), act=lambda params, carry, obs, reset, key, greedy: (carry, rule(obs), {})
    )
    agent = type("Rule", (), vars(agent))
    return Policy(PolicyProgram(agent, env.observation_space, env.action_space), PolicyParameters((), ()))


def lean(obs):
    """Push the cart to where the pole falls, but not well."""
    return (obs[:, 2] > 0).astype(jnp.int32)


@pytest.mark.parametrize("name", ["CartPole-v1", "gym:CartPole-v1"])
def test_recorded_episodes_are_those_of_an_evaluation(name, tmp_path):
    if name.startswith("gym"):
        pytest.importorskip("gymnasium")
    env = make(name)
    policy = acting(env, lean)
    demos = record(policy, env, episodes=5, seed=3, out=tmp_path / "demos.npz")
    expected = lehr.evaluate(policy, env, episodes=5, seed=3)
    assert sorted(demos.returns.tolist()) == sorted(expected.returns.tolist())
    assert sorted(demos.lengths.tolist()) == sorted(expected.lengths.tolist())
    assert demos.terminated[demos.last].all()
    assert not demos.truncated.any()
    np.testing.assert_array_equal(demos.actions, lean(demos.obs))
    # Each following observation is where CartPole's own dynamics lead, the final one included.
    np.testing.assert_allclose(demos.next_obs[:, 0], demos.obs[:, 0] + 0.02 * demos.obs[:, 1], atol=1e-5)
    assert (np.abs(demos.final_obs[:, 2]) > 12 * np.pi / 180).all()
    found, _ = read_demonstrations(str(tmp_path / "demos.npz"), Spaces(env.observation_space, env.action_space))
    jax.tree.map(np.testing.assert_array_equal, vars(found), vars(demos))


def test_an_end_by_a_time_limit_is_kept_apart():
    env = make("Pendulum-v1")
    demos = record(acting(env, lambda obs: jnp.zeros((len(obs), 1))), env, episodes=2)
    assert demos.lengths.tolist() == [200, 200]
    assert demos.truncated[demos.last].all()
    assert not demos.terminated.any()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_minari_data_set_is_read(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env = minari.DataCollector(gymnasium.make("CartPole-v1"), record_infos=False)
    totals, last = [], []
    for seed in range(3):
        obs, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(int(obs[2] > 0))
            total, over = total + reward, terminated or truncated
        totals.append(total)
        last.append(obs)
    env.create_dataset("cartpole/lean-v0", author="a test", algorithm_name="lean", code_permalink="none")
    env.close()
    ours = make("CartPole-v1")
    spaces = Spaces(ours.observation_space, ours.action_space)
    demos, digest = read_demonstrations("minari:cartpole/lean-v0", spaces)
    assert demos.returns.tolist() == totals
    np.testing.assert_array_equal(demos.final_obs, np.stack(last))
    np.testing.assert_array_equal(demos.actions, demos.obs[:, 2] > 0)
    assert digest == read_demonstrations("minari:cartpole/lean-v0", spaces)[1]
    with pytest.raises(InputError, match="Minari cannot load 'cartpole/none-v0'"):
        read_demonstrations("minari:cartpole/none-v0", spaces)
