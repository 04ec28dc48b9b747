"""Actors of their own: the queue they feed, those that are lost, environments that fail, and runs that go on."""

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import lehr
from lehr.acting.actors import Blueprint, Pool
from lehr.acting.actors import actor as worker_module
from lehr.acting.actors import pool as pool_module
from lehr.acting.actors.actor import ActorLost, Arrival, Weights, Worker
from lehr.acting.actors.links import LINKS, ProcessLink, _serve
from lehr.envs.host.base import EnvironmentFailed
from lehr.errors import InputError
from lehr.training import checkpoint
from lehr.training.loop import RunFailed
from lehr.training.plan import make_plan
from lehr.training.program import builder
from lehr.training.runners import Interrupted, make_runner
from lehr.training.runners.actors import ActorRunner
from tests.small import SMALL

TASKS = "gym:tests.envs.gym_tasks:"
SETTINGS = {name: value for name, value in SMALL.items() if name not in ("epochs", "minibatches")}
STEPS = SMALL["num_envs"] * SMALL["horizon"]


@pytest.fixture
def train(tmp_path):
    """`train(env, **settings)`: a small run of IMPALA with actors, in a directory of its own."""

    def run(env, name="run", **settings):
        given = {**SETTINGS, "actors": "threads", **settings}
        return lehr.train("impala", env=env, run_dir=tmp_path / name, **given)

    return run


# The pool, with actors that compute nothing ---------------------------------------------------------------------------


class FakeLink:
    """An actor whose rollouts are their weights' updates; `script` says what happens to each life, or to one's."""

    script: ClassVar[dict[object, list[Exception | None]]] = {}
    made: ClassVar[list[Blueprint]] = []

    def __init__(self, blueprint):
        self.blueprint, self.closed = blueprint, False
        self.made.append(blueprint)
        self.events = list(self.script.get(blueprint.life, self.script.get((blueprint.index, blueprint.life), [])))

    def collect(self, weights):
        time.sleep(0.001)
        if self.events and (error := self.events.pop(0)) is not None:
            raise error
        return Arrival(weights.updates, (), 0.001)

    def close(self):
        self.closed = True

    def abort(self):
        self.closed = True


@pytest.fixture
def pool(monkeypatch):
    """`pool(script, count, queue_size)`: a pool of actors that compute nothing, and what it warned of."""
    monkeypatch.setattr(FakeLink, "made", [])
    monkeypatch.setitem(LINKS, "fake", FakeLink)
    pools = []

    def make(script=None, count=1, queue_size=2):
        monkeypatch.setattr(FakeLink, "script", script or {})
        warnings: list[str] = []
        made = Pool("fake", Blueprint(None, None, 1, 1, frozenset(), 0), count, queue_size, warnings.append)
        pools.append(made)
        return made, warnings

    yield make
    for one in pools:
        one.close()


def weights(updates):
    return Weights(updates, np.zeros(1), ())


def test_actors_wait_where_the_queue_is_full_and_then_act_with_the_newest_parameters(pool):
    made, _ = pool(count=2, queue_size=3)
    made.start(weights(0))
    made.wait()
    while made.queue.qsize() < 3:
        time.sleep(0.01)
    time.sleep(0.3)  # time for more, if there were room
    assert made.queue.qsize() == 3
    made.publish(weights(7))
    taken = [made.take()[1].updates for _ in range(20)]
    # Three were in the queue and two more were made with the old ones: then it is the new ones.
    assert taken[:3] == [0, 0, 0]
    assert taken.count(0) <= 5
    assert taken[-1] == 7


def test_an_actor_that_is_lost_is_replaced_and_the_others_go_on(pool):
    made, warnings = pool({0: [None, None, ActorLost("its process 7 ended with code -9")]}, count=2)
    made.start(weights(0))
    taken = [made.take()[0] for _ in range(30)]
    assert set(taken) == {0, 1}
    assert made.lost == 2
    assert sorted(warnings) == [
        f"Actor {index} was lost (its process 7 ended with code -9) and is replaced." for index in (0, 1)
    ]
    assert sorted((one.index, one.life) for one in FakeLink.made) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_an_actor_that_is_lost_again_and_again_is_an_error(pool):
    made, warnings = pool({life: [ActorLost("MemoryError: ")] for life in range(9)})
    made.start(weights(0))
    with pytest.raises(ActorLost, match=r"Actor 0 was lost 3 times in a row \(MemoryError: \)"):
        made.take()
    assert len(warnings) == 2


def test_losses_are_counted_anew_after_a_rollout(pool):
    made, _ = pool({life: [None, ActorLost("gone")] for life in range(6)})
    made.start(weights(0))
    assert [made.take()[0] for _ in range(8)] == [0] * 8
    assert made.lost >= 6


def test_what_an_environment_does_wrong_is_not_the_actors_fault(pool):
    made, _ = pool({0: [None, EnvironmentFailed("The environment x gave nan as reward.")]})
    made.start(weights(0))
    with pytest.raises(EnvironmentFailed, match="gave nan as reward"):
        [made.take() for _ in range(2)]  # the failure may be there before the first is taken
    assert made.lost == 0


def test_a_failure_ends_the_run_although_other_actors_go_on(pool):
    made, _ = pool({(0, 0): [None, EnvironmentFailed("The environment x is broken.")]}, count=2)
    made.start(weights(0))
    with pytest.raises(EnvironmentFailed, match="is broken"):
        [made.take() for _ in range(500)]


def test_a_pool_is_closed_in_time_although_all_actors_are_busy(pool, monkeypatch):
    class Busy(FakeLink):
        def __init__(self, blueprint):
            super().__init__(blueprint)
            self.released = threading.Event()

        def collect(self, weights):
            self.released.wait()
            raise ActorLost("it was ended")

        def abort(self):
            self.released.set()

    monkeypatch.setattr(pool_module, "PATIENCE", 0.3)
    monkeypatch.setitem(LINKS, "fake", Busy)
    made, warnings = pool(count=6)
    made.start(weights(0))
    time.sleep(0.1)
    begin = time.perf_counter()
    made.close()
    assert time.perf_counter() - begin < 20, "not 5 seconds for each, one after the other"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lehr-actor")]
    assert warnings == []


def test_a_closed_pool_leaves_no_thread_and_no_actor_behind(pool):
    made, _ = pool(count=3)
    made.start(weights(0))
    made.wait()
    links = list(made.links.values())
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lehr-actor")]
    assert all(link.closed for link in links)


def test_too_few_cpus_for_all_ray_actors_are_told_of(monkeypatch):
    monkeypatch.setattr(pool_module, "ray_cluster", lambda: contextlib.nullcontext(1.0))
    monkeypatch.setitem(LINKS, "ray", FakeLink)
    warnings: list[str] = []
    made = Pool("ray", Blueprint(None, None, 1, 1, frozenset(), 0), 2, 1, warnings.append)
    made.start(weights(0))
    made.close()
    assert warnings == ["The Ray cluster has 1 CPUs for 2 actors: some wait until more are free."]


# A worker ------------------------------------------------------------------------------------------------------------


def blueprint_of(plan, **changes):
    env, settings = plan.program.env, plan.settings
    build = builder(plan.algorithm, env, settings, plan.network)
    sizes = settings.num_envs, settings.horizon
    return Blueprint(env, build, *sizes, plan.program.needs, plan.run.seed, **changes)


@pytest.fixture(scope="module")
def plan():
    return make_plan("impala", {**SETTINGS, "env": TASKS + "Walk-v0", "total_steps": 1000})


def test_a_worker_acts_with_the_weights_it_is_given_and_no_two_do_the_same(plan):
    """The log probabilities of its rollout are those of the weights; index, life and updates change its randomness."""
    params = plan.state.learner.params
    changed = jax.tree.map(lambda x: x + 0.1, params)
    actions = []
    for changes in ({}, {}, {"index": 1}, {"life": 1}, {"updates": 5}):
        worker = Worker(blueprint_of(plan, **changes))
        packed = np.asarray(ravel_pytree(changed)[0])
        arrival = worker.collect(Weights(3, packed, ()))
        worker.close()
        rollout = arrival.collected.rollout
        assert arrival.updates == 3
        _, policy, _ = plan.program.algorithm.network.unroll(changed, rollout.carry, rollout.obs, rollout.reset)
        np.testing.assert_allclose(policy.log_prob(rollout.action), rollout.log_prob, atol=1e-5)
        actions.append(rollout.action)
    assert np.array_equal(actions[0], actions[1])
    assert all(not np.array_equal(actions[0], other) for other in actions[2:])


def test_what_goes_wrong_in_a_thread_is_a_lost_actor_and_no_lost_run(plan, monkeypatch):
    link = LINKS["threads"](blueprint_of(plan))
    packed = np.asarray(ravel_pytree(plan.state.learner.params)[0])
    link.collect(Weights(0, packed, ()))

    def collect(*arguments):
        raise MemoryError("no more")

    monkeypatch.setattr(link.collector, "collect", collect)
    with pytest.raises(ActorLost, match="MemoryError: no more"):
        link.collect(Weights(0, packed, ()))
    link.close()


def test_an_environment_that_cannot_be_sent_to_a_process_is_explained():
    env = SimpleNamespace(name="gym:Mine-v0", make=lambda: None)
    with pytest.raises(EnvironmentFailed, match=r"gym:Mine-v0 cannot be pickled for another process .* set actors to"):
        ProcessLink(Blueprint(env, None, 1, 1, frozenset(), 0))


def test_what_cannot_be_sent_by_a_process_is_told_under_its_name(monkeypatch):
    sent, asked = [], [weights(0), None]

    def send(answer):
        if not isinstance(answer, Exception):
            raise TypeError("cannot pickle it")
        sent.append(str(answer))

    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    monkeypatch.setattr(Worker, "collect", lambda self, weights: Arrival(0, (), 0.0))
    _serve(SimpleNamespace(recv=lambda: asked.pop(0), send=send), Blueprint(None, None, 1, 1, frozenset(), 0))
    assert sent == ["TypeError: cannot pickle it"]


def test_the_time_of_a_rollout_is_that_of_acting_alone(plan, monkeypatch):
    happened, begin, clock = [], Worker._begin, time.perf_counter
    monkeypatch.setattr(Worker, "_begin", lambda self: (happened.append("begun"), begin(self)))
    watch = SimpleNamespace(perf_counter=lambda: (happened.append("clock"), clock())[1])
    monkeypatch.setattr(worker_module, "time", watch)
    worker = Worker(blueprint_of(plan))
    packed = np.asarray(ravel_pytree(plan.state.learner.params)[0])
    assert worker.collect(Weights(0, packed, ())).seconds > 0
    worker.close()
    assert happened == ["begun", "clock", "clock"]


def test_a_script_that_a_process_runs_again_does_not_train_again(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(InputError, match="train under if __name__ == '__main__'"):
        make_plan("impala", {**SETTINGS, "env": TASKS + "Walk-v0", "actors": "processes"})


def test_coefficients_that_are_functions_stay_with_the_learner():
    settings = {**SETTINGS, "env": TASKS + "Walk-v0", "actors": "processes", "entropy_coef": lambda step: 0.01}
    runner = make_runner(make_plan("impala", settings), warn=print)
    agent, _ = pickle.loads(pickle.dumps(runner.pool.blueprint)).build(jax.random.key(0))
    assert agent.config.entropy_coef == "0.1 -> 0"  # the default, for these actions


def test_rewards_are_scaled_by_the_returns_of_the_actors_own_environments(monkeypatch):
    """Two actors in turn: the returns under way of one are not mistaken for those of the other."""
    settings = {**SETTINGS, "env": TASKS + "Walk-v0", "total_steps": 1000, "normalise_rewards": True}
    plan = make_plan("impala", {**settings, "actors": "threads", "discount": 0.99})
    runner = make_runner(plan, warn=print)
    assert isinstance(runner, ActorRunner)
    workers = [Worker(blueprint_of(plan, index=index)) for index in range(2)]
    turns = [0, 1, 1, 0]
    begun = runner._weights(plan.state, 0)
    arrivals = [(index, workers[index].collect(begun)) for index in turns]
    queue = iter(arrivals)
    monkeypatch.setattr(runner.pool, "take", lambda: next(queue))
    runner.compile(plan.state)
    state, _ = runner.advance(plan.state, 4)
    for worker in workers:
        worker.close()
    discount = 0.99
    for index in range(2):
        returns = np.zeros(SMALL["num_envs"])
        for whose, arrival in arrivals:
            if whose == index:
                for reward, done in zip(arrival.collected.rollout.reward, arrival.collected.rollout.done, strict=True):
                    returns = np.where(done, 0.0, discount * returns + reward)
        np.testing.assert_allclose(runner._returns[index, 0], returns, rtol=1e-4, atol=1e-5)
    assert int(state.updates) == 4


# Runs ----------------------------------------------------------------------------------------------------------------


def test_a_run_with_actors_says_how_far_they_are_behind(train):
    result = train(TASKS + "Walk-v0", total_steps=40 * STEPS, num_actors=1, queue_size=2)
    metrics = result.metrics
    assert result.final["env_steps"] == 40 * STEPS
    lag = metrics["rollout/lag"]
    assert lag[0] == 0
    assert lag.max() >= 1
    assert lag.max() <= 3, "behind two that wait and the one that is being learned from"
    assert metrics["actors/queue"].max() <= 2
    assert (metrics["actors/lost"] == 0).all()
    assert (metrics["actors/steps_per_second"] > 0).all()
    assert (metrics["learner/waited"] >= 0).all()
    # V-trace has something to make up for exactly where the policy was behind.
    distance = metrics["vtrace/ratio_distance"]
    assert distance[lag == 0].max(initial=0) < 1e-5
    assert distance[lag > 0].min() > 1e-5


def test_a_run_with_actors_goes_on_from_what_was_learned_and_begins_new_episodes(train, tmp_path, caplog):
    """The weaker promise: all that was learned is there to the bit, but environments begin anew."""
    settings = {"total_steps": 60 * STEPS, "normalise_observations": True, "normalise_rewards": True}
    stopped = train(TASKS + "Walk-v0", progress_fn=lambda steps, _: steps >= 10 * STEPS, **settings)
    made = int(stopped.final["update"])
    assert 10 <= made < 60
    plan = make_plan("impala", {**SETTINGS, "actors": "threads", "env": TASKS + "Walk-v0", **settings})
    saved, _, _ = checkpoint.newest(tmp_path / "run" / "checkpoints", plan.state.saved, report=print)
    assert int(saved.updates) == made
    same = jax.tree.map(lambda x, y: np.array_equal(x, y), saved.learner.params, stopped.params)
    assert all(jax.tree.leaves(same))
    with caplog.at_level(logging.WARNING, "lehr"):
        resumed = lehr.resume(tmp_path / "run", trust=True)
    assert [record.message for record in caplog.records] == [
        "The environments of gym:tests.envs.gym_tasks:Walk-v0 restart: with actors, their state is not saved."
    ]
    assert resumed.metrics["update"].tolist() == list(range(1, 61))
    with caplog.at_level(logging.WARNING, "lehr"):
        alone = lehr.resume(tmp_path / "run", trust=True, actors="none", total_steps=62 * STEPS)
    assert "restart, because their state cannot be restored: the run used asynchronous actors before." in caplog.text
    assert alone.final["update"] == 62
    # The first rollout after the stop was made with what was saved: it does not lag.
    assert resumed.metrics["rollout/lag"][made] == 0
    assert resumed.metrics["vtrace/ratio_distance"][made] < 1e-5


def _children(name):
    return [child for child in multiprocessing.active_children() if child.name.startswith(name)]


@pytest.mark.slow
def test_a_process_that_is_killed_is_replaced_and_the_run_ends_well(train, caplog):
    killed = []

    def kill(steps, metrics):
        if not killed and metrics["update"] >= 5:
            killed.append(_children("lehr-actor")[0].pid)
            os.kill(killed[0], signal.SIGKILL)
        return bool(killed) and metrics["actors/lost"] >= 1 and metrics["update"] >= 100

    with caplog.at_level(logging.WARNING, "lehr"):
        result = train("gym:CartPole-v1", actors="processes", total_steps=10**9, progress_fn=kill)
    assert result.metrics["actors/lost"][-1] == 1
    message = f"(its process {killed[0]} ended with code -9) and is replaced."
    assert [record.message for record in caplog.records if message in record.message]
    assert not _children("lehr-actor")
    assert np.isfinite(result.final["loss/total"])


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_an_environment_that_fails_in_an_actor_stops_the_run_with_a_sentence(kind, train, tmp_path):
    env = {"env_parameters": {"fault": "nan reward"}}
    with pytest.raises(RunFailed, match=r"Faulty-v0 gave nan as reward.*The last good state is saved in"):
        train(TASKS + "Faulty-v0", actors=kind, total_steps=10_000, **env)
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert not _children("lehr-actor")


@pytest.mark.parametrize(
    ("kind", "fault", "sentence"),
    [
        ("threads", "exits", r"Breaking-v0 failed in step \(SystemExit: 3\)"),
        ("threads", "interrupts", r"Breaking-v0 failed in step \(KeyboardInterrupt\)"),
        ("threads", "hangs", "Breaking-v0 did not answer step within step_timeout=1 seconds"),
        pytest.param("processes", "exits", r"Breaking-v0 failed in step \(SystemExit: 3\)", marks=pytest.mark.slow),
    ],
)
def test_an_environment_that_exits_or_hangs_in_an_actor_stops_the_run(kind, fault, sentence, train):
    env = {"env_parameters": {"fault": fault, "every": True, "after": 20}}
    with pytest.raises(RunFailed, match=sentence):
        train(TASKS + "Breaking-v0", actors=kind, total_steps=10_000, step_timeout=1, **env)


def test_whatever_ends_the_thread_of_an_actor_ends_the_run(pool):
    made, _ = pool({0: [None, SystemExit(3)]})
    made.start(weights(0))
    with pytest.raises(SystemExit):
        [made.take() for _ in range(500)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_ray_actor_that_is_killed_is_replaced_and_the_run_ends_well(train, caplog):
    """On a local cluster. Ray's own processes warn of what is not ours."""
    ray = pytest.importorskip("ray")
    killed = []

    def kill(steps, metrics):
        if not killed and metrics["update"] >= 5:
            lines = {path: (path / "cmdline").read_bytes() for path in Path("/proc").glob("[0-9]*")}
            killed.append(int(next(path.name for path, line in lines.items() if line.startswith(b"ray::_RayWorker"))))
            os.kill(killed[0], signal.SIGKILL)
        return bool(killed) and metrics["actors/lost"] >= 1 and metrics["update"] >= 50

    with caplog.at_level(logging.WARNING, "lehr"):
        result = train("gym:CartPole-v1", actors="ray", total_steps=10**9, progress_fn=kill)
    assert result.metrics["actors/lost"][-1] == 1
    assert [record for record in caplog.records if "and is replaced." in record.message]
    assert not ray.is_initialized()


def test_an_interrupted_chunk_keeps_the_updates_before(plan, monkeypatch):
    runner = make_runner(make_plan("impala", {**SETTINGS, "env": TASKS + "Walk-v0", "actors": "threads"}), warn=print)
    worker = Worker(blueprint_of(plan))
    arrival = worker.collect(runner._weights(plan.state, 0))
    worker.close()
    turns = iter([(0, arrival), (0, arrival)])

    def take():
        for turn in turns:
            return turn
        raise ActorLost("Actor 0 was lost 3 times in a row (gone).")

    monkeypatch.setattr(runner.pool, "take", take)
    runner.compile(plan.state)
    with pytest.raises(Interrupted, match="lost 3 times") as caught:
        runner.advance(plan.state, 5)
    assert int(caught.value.state.updates) == 2
    assert caught.value.rows.shape == (2, len(runner.names))
    assert caught.value.rows[:, runner.names.index("rollout/lag")].tolist() == [0, 1]
    assert jnp.asarray(caught.value.state.actor.reset).shape == (SMALL["num_envs"],)


@pytest.mark.parametrize(
    ("algorithm", "settings", "message"),
    [
        (
            "ppo",
            {"env": TASKS + "Walk-v0"},
            "but ppo does not correct for the lag of asynchronous actors; train appo or",
        ),
        ("impala", {"env": "CartPole-v1"}, "CartPole-v1 is compiled and runs on the device.*set lag"),
        ("impala", {"env": TASKS + "Walk-v0", "overlap": True}, "which already overlap with learning; drop overlap"),
        ("impala", {"actors": "proceses"}, "actors is 'proceses'; did you mean 'processes'"),
        ("impala", {"num_actors": 0}, "num_actors is 0; it must be 1 or more"),
        ("impala", {"queue_size": 0}, "queue_size is 0; it must be 1 or more"),
    ],
)
def test_mistakes_are_explained(algorithm, settings, message):
    with pytest.raises(InputError, match=message):
        make_plan(algorithm, {"actors": "threads", **settings})
