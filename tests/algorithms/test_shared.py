"""What holds for every algorithm: each one that exists is tested by these, found by its name."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lehr import algorithms
from lehr.acting.agent import has_memory
from lehr.acting.rollout import Collected
from lehr.config import coefficients as coefficients_of
from lehr.config import describe
from lehr.envs import TimeLimit, Wrapper
from lehr.envs.base import NEVER
from lehr.envs.builtin.probes import (
    PROBES,
    TIME_LIMIT,
    ConstantReward,
    FinalObservation,
    ObservationReward,
    PolicyObservationReward,
    PolicyReward,
    Truncated,
)
from lehr.errors import InputError
from lehr.schedules import env_steps, schedule
from lehr.schedules.bundle import bundle, population
from lehr.spaces import Spaces
from lehr.training import iteration as core
from lehr.training.iteration import iteration
from lehr.training.runners.device import chunk, metric_names
from lehr.types import Rollout
from tests.small import trial

NAMES = algorithms.names()


def slow_but_for_ppo(names):
    """The names as parameters, of which `make test` takes PPO alone."""
    return [name if name == "ppo" else pytest.param(name, marks=pytest.mark.slow) for name in names]


def learns_a_model(name):
    """Whether an algorithm takes many gradient steps on replayed data: its programs take long to compile and run."""
    return any(field.name == "train_ratio" for field in describe(algorithms.find(name).Config))


def slow_with_a_model(names):
    """The names as parameters, of which `make test` leaves out those that learn a model."""
    return [pytest.param(name, marks=pytest.mark.slow) if learns_a_model(name) else name for name in names]


every_algorithm = pytest.mark.parametrize("algorithm", slow_with_a_model(NAMES))
# Recurrent PPO is PPO with a memory: its updates are PPO's line by line, see its own tests.
WAYS_TO_LEARN = [name for name in NAMES if name != "recurrent_ppo"]
every_way_to_learn = pytest.mark.parametrize("algorithm", slow_with_a_model(WAYS_TO_LEARN))
# What all algorithms have from the same code does not know who learns from it: rollouts, memories.
one_algorithm = pytest.mark.parametrize("algorithm", ["ppo"])

DISCOUNT = 0.7
PROBE = {
    "num_envs": 16,
    "horizon": 8,
    "discount": DISCOUNT,
    "learning_rate": "0.02 -> 0",
    "entropy_coef": 0.0,
    "initial_log_std": -1.0,
    "noise_steps": 1,  # in episodes of one step, kept noise says nothing about what the next observation asks for
}
# At seven times its default learning rate, a lagging policy with standardised advantages leaves the Box, where the
# clipped actions are all alike.
PROBE_OF = {"impala": {"standardise_advantages": False}}
PROBE_UPDATES = 200
TOLERANCE = 0.08


def identical(one, other):
    """Whether two pytrees hold the same bits."""

    def bits(x):
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.all(jax.tree.map(lambda x, y: bits(x).tobytes() == bits(y).tobytes(), one, other))


def train_on(begin, advance, algorithm, env, **settings):
    given = {**PROBE, **PROBE_OF.get(algorithm, {}), **settings}
    total = PROBE_UPDATES * given["num_envs"] * given["horizon"]
    return advance(begin(algorithm, env, total_steps=total, **given), PROBE_UPDATES)


def learned(run, observations, env=None):
    """The values `[M]` and the policy that a run has learned for first observations of episodes, `[M, 1]`.

    A memory that has never seen an episode begin with an observation need not know its value: with `env`, it gets to
    the observations as episodes do.
    """
    algorithm, size = run.program.algorithm, len(observations)
    network, params = algorithm.network, run.state.learner.params
    carry, reset, obs = algorithm.initial_carry((size,)), jnp.ones(size, bool), jnp.float32(observations)
    if env is not None and has_memory(algorithm):
        key = jax.random.key(0)
        states, firsts = jax.vmap(env.reset)(jax.random.split(key, 8))
        later = ~np.isin(observations[:, 0], np.asarray(firsts))
        if later.any():  # then one step leads there from the first observation
            first, state = (jax.tree.map(lambda x: x[0], tree) for tree in (firsts, states))
            carry, action, _ = jax.jit(algorithm.act)(params, carry, jnp.broadcast_to(first, obs.shape), reset, key)
            np.testing.assert_array_equal(env.step(key, state, action[0])[1].obs, observations[later][0])
            reset = jnp.asarray(~later)
    _, policy, value = jax.jit(network.step)(params, carry, obs, reset)
    return np.asarray(value), policy


# Probe environments: values known in closed form ---------------------------------------------------------------------


def probes_of(algorithm):
    """The probes that an algorithm is tested with, and whether with continuous actions."""
    if algorithm == "ppo":
        probes = PROBES
    elif algorithm == "recurrent_ppo":  # its updates are PPO's, and with a memory one probe is enough
        probes = [FinalObservation]
    else:  # what the others show, these show together
        simple = (ConstantReward, ObservationReward, PolicyReward, Truncated)
        probes = [probe for probe in PROBES if probe not in simple]
    for probe in probes:
        yield probe, False
        if probe(continuous=True).expected_values(DISCOUNT).actions is not None:  # else what is done does not matter
            yield probe, True


BY_ROUNDING = pytest.mark.long
"""A model that has just begun to learn may lead a policy to either choice, by rounding: only as users compile it."""


@pytest.mark.parametrize(
    ("algorithm", "probe", "continuous"),
    [
        pytest.param(
            name,
            probe,
            continuous,
            id=f"{probe.__name__}-{'box' if continuous else 'discrete'}-{name}",
            marks=BY_ROUNDING
            if learns_a_model(name) and probe is PolicyObservationReward
            else ()
            if name == "ppo" or (probe is FinalObservation and not continuous and not learns_a_model(name))
            else pytest.mark.slow,
        )
        for name in NAMES
        for probe, continuous in probes_of(name)
    ],
)
def test_the_critic_learns_the_values_of_a_probe(algorithm, probe, continuous, begin, advance):
    env = probe(continuous=continuous)
    run = train_on(begin, advance, algorithm, TimeLimit(env, TIME_LIMIT))
    expected = env.expected_values(DISCOUNT)
    found, policy = learned(run, expected.observations, env)
    values = expected.values
    if expected.actions is not None:
        np.testing.assert_allclose(policy.mode(), expected.actions, atol=TOLERANCE)
        if continuous:  # a policy with deviation σ around the best action is worth σ² less
            values = values - np.square(np.asarray(policy.std()))[:, 0]
    np.testing.assert_allclose(found, values, atol=TOLERANCE)
    assert run.metrics["update/rejected"][-1] == 0


@dataclass(frozen=True)
class Endless(Wrapper):
    """Say of an environment that it does not truncate by itself."""

    truncation_gap: ClassVar[int] = NEVER

    def reset(self, key):
        return self.env.reset(key)

    def step(self, key, state, action):
        return self.env.step(key, state, action)


@one_algorithm
@pytest.mark.parametrize("probe", [Truncated, FinalObservation])
def test_a_time_limit_is_seen_through_where_it_is_met_once_per_rollout(algorithm, probe, begin, advance):
    """The rollout then keeps one final observation for each environment, instead of all."""
    run = train_on(begin, advance, algorithm, TimeLimit(Endless(probe()), TIME_LIMIT), horizon=2, num_envs=64)
    assert run.program.env.truncation_gap >= 2
    expected = probe().expected_values(DISCOUNT)
    np.testing.assert_allclose(learned(run, expected.observations)[0], expected.values, atol=TOLERANCE)


def merged(rollout: Rollout) -> Rollout:
    return rollout._replace(terminated=rollout.done)


def bootstrapped_from_the_reset(rollout: Rollout) -> Rollout:
    following = jnp.concatenate([rollout.value[1:], rollout.next_value[-1:]])
    return rollout._replace(next_value=jnp.where(rollout.done, following, rollout.next_value))


@one_algorithm
@pytest.mark.parametrize(
    ("probe", "mistake"),
    [(Truncated, merged), (FinalObservation, bootstrapped_from_the_reset)],
    ids=["merged", "reset"],
)
def test_a_time_limit_that_is_taken_for_an_end_would_be_noticed(algorithm, probe, mistake, begin, advance, monkeypatch):
    """The probes fail by a wide margin when rollouts are falsified in the two ways that are common."""

    def falsified(*arguments) -> Collected:
        collected = collect(*arguments)
        return collected._replace(rollout=mistake(collected.rollout))

    collect = core.collect
    monkeypatch.setattr(core, "collect", falsified)
    # A time limit of its own makes this another program, so that no compiled one is mistaken for it.
    run = train_on(begin, advance, algorithm, TimeLimit(probe(), TIME_LIMIT + 1))
    expected = probe().expected_values(DISCOUNT)
    assert np.abs(learned(run, expected.observations)[0] - expected.values).max() > 4 * TOLERANCE


@pytest.mark.parametrize(
    "algorithm",
    [
        *slow_but_for_ppo([name for name in WAYS_TO_LEARN if not learns_a_model(name)]),
        *(pytest.param(name, marks=BY_ROUNDING) for name in WAYS_TO_LEARN if learns_a_model(name)),
    ],
)
def test_the_policy_learns_one_of_several_discrete_choices(algorithm, match, begin, advance):
    run = train_on(begin, advance, algorithm, match)
    signs = np.array([[-1.0], [1.0]])
    values, policy = learned(run, signs)
    np.testing.assert_array_equal(policy.mode()[:, 1], [0, 2])
    np.testing.assert_allclose(values, 1.0, atol=TOLERANCE)


NOT_RECALLED = {
    "dreamer": (
        pytest.mark.xfail(
            strict=True,
            reason="the reward is an exclusive or of the sign and an action two steps later, which a model of this "
            "size does not learn; test_dreamer.py has one that does",
        ),
    )
}


@pytest.mark.parametrize(
    ("algorithm", "torso"),
    [
        pytest.param("ppo", "lstm", marks=pytest.mark.slow),
        ("ppo", "mingru"),
        ("ppo", "gru"),
        ("recurrent_ppo", "gru"),
        *(
            pytest.param(name, "gru", marks=(pytest.mark.slow, *NOT_RECALLED.get(name, ())))
            for name in WAYS_TO_LEARN
            if name != "ppo"
        ),
    ],
)
def test_a_memory_learns_what_was_shown_before(algorithm, torso, recall, begin, advance):
    run = train_on(begin, advance, algorithm, recall, torso=torso, horizon=9, learning_rate="0.01 -> 0")
    assert run.metrics["episode/return"][-20:].mean() > 0.9
    signs = np.array([[-1.0], [1.0]])
    np.testing.assert_allclose(learned(run, signs)[0], DISCOUNT**2, atol=TOLERANCE)


@one_algorithm
def test_without_a_memory_what_was_shown_before_is_lost(algorithm, recall, begin, advance):
    run = train_on(begin, advance, algorithm, recall, horizon=9)
    assert abs(run.metrics["episode/return"][-20:].mean()) < 0.2


# One program ---------------------------------------------------------------------------------------------------------


@every_algorithm
def test_a_run_is_traced_once_and_its_updates_in_pieces_are_the_same_updates(algorithm, begin, count_traces, quickly):
    """A run can be stopped after any update: all that it remembers is in its state."""

    def run(*counts):
        begun = begin(algorithm, "CartPole-v1", seed=3)
        state, metrics = begun.state, []
        for count in counts:
            state, rows = advance(state, jnp.int32(count))
            metrics.append(np.asarray(rows)[:count])
        return state, np.concatenate(metrics)

    counted = count_traces(partial(chunk, begin(algorithm, "CartPole-v1").program, 8))
    advance = jax.jit(counted, donate_argnums=0, compiler_options=quickly)
    whole, pieces = run(6), run(2, 1, 3)
    assert int(whole[0].updates) == 6
    assert identical(whole, pieces)
    assert counted.traces == 1


def every_coefficient(algorithm, scale=1.0, only=None):
    """A schedule of its own for each coefficient, all within their ranges; one of them scaled."""
    shapes = ("", " cosine", " exponential", " polynomial(2)")
    names = [field.name for field in describe(algorithms.find(algorithm).Config) if field.is_coefficient]
    given = {}
    for index, name in enumerate(names):
        size = 0.01 if name.endswith("learning_rate") else 1.0
        factor = size * (scale if name == only else 1.0)
        given[name] = (
            f"{(0.95 - 0.01 * index) * factor:.10g} -> {(0.5 + 0.01 * index) * factor:.10g}{shapes[index % 4]}"
        )
    return given


@pytest.mark.parametrize(
    "algorithm",
    [name if name == "ppo" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_every_coefficient_is_applied_as_its_schedule_says_to_the_last_bit(algorithm, everything_on, begin):
    given, updates, total = every_coefficient(algorithm), 12, 12 * 64
    run = begin(algorithm, "CartPole-v1", total_steps=total, **everything_on.get(algorithm, {}), **given)
    # Compiled as users' programs are: the last bit depends on it.
    options = {"xla_backend_optimization_level": 3}
    advance = jax.jit(partial(chunk, run.program, updates), compiler_options=options)
    _, rows = advance(run.state, jnp.int32(updates))
    metrics = dict(zip(metric_names(run.program, run.state), np.asarray(rows).T, strict=True))
    assert {f"coef/{name}" for name in given} == {name for name in metrics if name.startswith("coef/")}
    clock = env_steps(jnp.arange(updates, dtype=jnp.uint32), run.program.steps_per_update)
    for name, text in given.items():
        one, applied = schedule(text).bind(total), metrics[f"coef/{name}"]
        evaluated = jax.jit(lambda one, clock: one(clock), compiler_options=options)(one, clock)
        np.testing.assert_array_equal(applied, evaluated, err_msg=name)
        np.testing.assert_allclose(applied, one(64 * np.arange(updates)), rtol=1e-6, err_msg=name)
        assert applied[0] == np.float32(one(0)), "the first update sees the start value"
        assert len(np.unique(applied)) == updates


@every_way_to_learn
def test_every_coefficient_changes_what_is_learned_and_recompiles_nothing(
    algorithm, everything_on, configs, begin, count_traces, quickly
):

    def coefficients(**scaled):
        given = {**everything_on.get(algorithm, {}), **every_coefficient(algorithm, **scaled)}
        return bundle(coefficients_of(configs(algorithm, given)[0], total_steps=10_000))

    run = begin(algorithm, "CartPole-v1", **everything_on.get(algorithm, {}), **every_coefficient(algorithm))
    counted = count_traces(partial(chunk, run.program, 4))
    advance = jax.jit(counted, compiler_options=quickly)

    def learned_with(**scaled):
        return advance(run.state._replace(coefficients=coefficients(**scaled)), jnp.int32(4))[0].learner.params

    before = learned_with()
    unchanged = []
    for name in every_coefficient(algorithm):
        if identical(before, learned_with(scale=1e-4, only=name)):
            unchanged.append(name)
    assert unchanged == []
    assert counted.traces == 1


@every_algorithm
def test_a_coefficient_out_of_its_range_is_refused_before_anything_is_compiled(algorithm, everything_on, begin):
    for field in describe(algorithms.find(algorithm).Config):
        if field.is_coefficient and np.isfinite(field.coefficient.minimum):
            with pytest.raises(InputError, match=f"{field.name} is .* must stay in"):
                begin(algorithm, "CartPole-v1", **everything_on.get(algorithm, {}), **{field.name: "0.5 -> -0.5"})


# The same again ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", slow_but_for_ppo(WAYS_TO_LEARN))
def test_a_seed_decides_everything(algorithm, begin, advance):
    first, again, other = (advance(begin(algorithm, "CartPole-v1", seed=seed), 5) for seed in (1, 1, 2))
    assert identical(first.state, again.state)
    assert identical(first.metrics, again.metrics)
    assert not identical(first.state.learner.params, other.state.learner.params)
    assert not identical(first.metrics["loss/total"], other.metrics["loss/total"])


# Numbers that are not finite -----------------------------------------------------------------------------------------


def poisoned(run, index):
    """The run with a NaN reward ahead of one of its environments."""
    env_state = run.state.actor.env_state
    env_state = env_state._replace(poisoned=env_state.poisoned.at[index].set(True))
    return run._replace(state=run.state._replace(actor=run.state.actor._replace(env_state=env_state)))


@pytest.mark.parametrize("algorithm", slow_but_for_ppo(WAYS_TO_LEARN))
def test_an_update_on_a_nan_reward_is_not_applied_and_training_goes_on(algorithm, poison, begin, advance):
    switches = {"normalise_observations": True, "normalise_rewards": True}
    sound = advance(begin(algorithm, poison, entropy_coef="auto(target_entropy=0.5)", **switches), 2)
    assert sound.metrics["update/rejected"].tolist() == [0, 0]

    hurt = advance(poisoned(sound, 3), 1)
    assert hurt.metrics["update/rejected"].tolist() == [1]
    assert int(hurt.state.rejected) == 1
    assert int(hurt.state.updates) == 3
    for part in ("observation_statistics", "reward_scaling", "controllers"):
        assert identical(getattr(hurt.state, part), getattr(sound.state, part)), part
    learned, before = (state.learner._replace(memory=()) for state in (hurt.state, sound.state))
    assert identical(learned, before), "data may have been written, what was learned stays"
    assert not hurt.state.actor.env_state.poisoned.any()

    healed = advance(hurt, 3)
    assert healed.metrics["update/rejected"].tolist() == [1, 1, 1]
    assert not identical(healed.state.learner.params, sound.state.learner.params)
    for name, column in healed.metrics.items():
        assert np.isfinite(column).all(), name


# Populations ---------------------------------------------------------------------------------------------------------


@jax.jit
def stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@jax.jit
def member(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


# What APPO and PPG remember is shown by IMPALA's lag, and by PPG's own test of a population.
@pytest.mark.parametrize("algorithm", slow_but_for_ppo([name for name in WAYS_TO_LEARN if name not in ("appo", "ppg")]))
def test_a_population_learns_as_its_members_would_alone_and_a_broken_one_is_frozen_alone(
    algorithm, poison, configs, begin, advance, quickly, rates
):
    """Each has a seed and a schedule of its own, of any number of phases; all are one program."""
    schedules = ("0.001 -> 0.01", "0.003", "0.001 -> 0.02 over 1%, 0.02 -> 0.001 cosine")
    runs = [begin(algorithm, poison, seed=seed, learning_rate=text) for seed, text in enumerate(schedules)]
    together = jax.jit(jax.vmap(partial(iteration, runs[0].program)), compiler_options=quickly)
    chosen = [{**trial(algorithm, poison), "learning_rate": text} for text in schedules]
    spaces = Spaces(poison.observation_space, poison.action_space)
    found = [coefficients_of(configs(algorithm, settings)[0].for_spaces(spaces), 10_000) for settings in chosen]
    used = runs[0].state.coefficients.names
    coefficients = population([{name: given[name] for name in used} for given in found])

    bare = [run.state._replace(coefficients=()) for run in runs]
    states = stacked(bare)._replace(coefficients=coefficients)
    for _ in range(3):
        states, metrics = together(states)
    for index, run in enumerate(runs):
        alone = advance(run, 3)
        found, expected = (
            (state.learner, state.reward_model, state.actor, state.updates)
            for state in (member(states._replace(coefficients=()), index), alone.state)
        )
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), found, expected)
        for name, column in alone.metrics.items():
            np.testing.assert_allclose(metrics[name][index], column[-1], rtol=1e-2, atol=1e-4, err_msg=name)
    assert len(np.unique(metrics[f"coef/{rates.get(algorithm, 'learning_rate')}"])) == 3

    bare[1] = poisoned(runs[1], 0).state._replace(coefficients=())
    before = stacked(bare)._replace(coefficients=coefficients)
    after, metrics = together(before)
    assert metrics["update/rejected"].tolist() == [0, 1, 0]
    learned = [state.learner._replace(memory=()) for state in (before, after)]
    kept = [identical(*(member(learner, index) for learner in learned)) for index in range(3)]
    assert kept == [False, True, False]
