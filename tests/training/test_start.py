"""What happens between the call of `train` and its first metrics: few imports, few programs, no wait for the rest."""

import contextlib
import gc
import json
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass

import jax
import numpy as np
import pytest

import lehr
from lehr.acting.evaluation import evaluation_metrics, make_evaluator
from lehr.algorithms import ppo
from lehr.envs.builtin.classic import CartPole
from lehr.networks import NetworkConfig
from lehr.training import api, background, compile_options, run_record
from lehr.training.compilation_cache import use_compilation_cache
from lehr.training.directory import RunDirectory
from lehr.training.loop import Loop
from lehr.training.plan import make_plan
from lehr.training.program import assemble
from lehr.training.run_record import RunRecord
from lehr.training.runners.device import DeviceRunner
from lehr.types import derive

SMALL = {
    "total_steps": 512,
    "num_envs": 4,
    "horizon": 16,
    "minibatches": 2,
    "hidden_sizes": (8,),
    "progress": False,
}


def in_a_process(code: str, *arguments: str) -> list:
    """Run code in a process of its own, and return what its last line says."""
    found = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def test_train_does_not_import_what_only_its_end_or_a_sweep_needs():
    code = """
import json, sys, lehr
light = [name for name in ("jax", "flax", "matplotlib") if name in sys.modules]
lehr.train
import lehr.cli.train
print(json.dumps([light, [name for name in sys.argv[1:] if name in sys.modules]]))
"""
    heavy = ("matplotlib", "scipy", "PIL", "pandas", "tensorboard", "ray", "lehr.sweeps.api", "lehr.report.render")
    assert in_a_process(code, *heavy) == [[], []]


def test_the_public_names_are_listed_and_so_are_loaded_modules():
    code = "import json, lehr.schedules; print(json.dumps([lehr.__all__, sorted(vars(lehr)), dir(lehr)]))"
    public, loaded, listed = in_a_process(code)
    assert "train" not in loaded  # it is imported when it is first used
    assert {"schedules", "__file__"} <= {*loaded}
    assert listed == sorted({*public, *loaded})


def test_the_collector_looks_at_imported_modules_in_full_collections_only():
    code = """
import gc, json, lehr
lehr.train
young, middle, old = (len(gc.get_objects(generation)) for generation in range(3))
first = gc.get_freeze_count()
gc.freeze()
lehr.sweep
print(json.dumps([young + middle < old / 20, gc.isenabled(), first, gc.get_freeze_count() > old / 2]))
"""
    assert in_a_process(code) == [True, True, 0, True]


def test_a_run_compiles_three_programs(tmp_path):
    """Its initial state, its updates and its evaluation, each traced once; nothing else, not even a key."""
    code = f"""
import json, sys, jax, lehr
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **about: compiled.append(about["fun_name"]) if "backend_compile" in name else None
)
lehr.train("ppo", "CartPole-v1", run_dir=sys.argv[1], **{SMALL})
print(json.dumps(compiled))
"""
    assert sorted(in_a_process(code, str(tmp_path / "run"))) == ["jit(_evaluation)", "jit(begin)", "jit(chunk)"]


def test_the_second_run_of_a_process_compiles_nothing(tmp_path):
    """It has another seed and another budget; nor does going on with it, or loading it."""
    code = f"""
import json, sys, jax, lehr, numpy
from lehr.training import program, run_record
from lehr.training.runners import device
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **about: compiled.append(about["fun_name"]) if "backend_compile" in name else None
)
settings = {SMALL | {"entropy_coef": "0.01 -> 0"}}

def trained(name, **changes):
    return lehr.train("ppo", "CartPole-v1", run_dir=sys.argv[1] + name, **settings | changes)

trained("first")
first = len(compiled)
second = trained("second", seed=1, total_steps=768)
resumed = lehr.resume(sys.argv[1] + "second", total_steps=1024, progress=False)
lehr.load(sys.argv[1] + "second")
again = [name for name in compiled[first:] if name in compiled[:first]]
for latest in (program._latest, device._compiling.latest, run_record._compiling.latest):
    assert len(latest.made) == 1
    latest.made.clear()
alone = trained("alone", seed=1, total_steps=768)
pairs = zip(jax.tree.leaves(second.params), jax.tree.leaves(alone.params))
same = all(numpy.array_equal(one, other) for one, other in pairs)
print(json.dumps([first, again, same, second.final["coef/entropy_coef"] == alone.final["coef/entropy_coef"]]))
"""
    assert in_a_process(code, str(tmp_path)) == [3, [], True, True]


def test_a_sweep_compiles_three_programs_for_each_size_of_wave(tmp_path):
    code = f"""
import json, sys, jax, lehr
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **about: compiled.append(about["fun_name"]) if "backend_compile" in name else None
)
lehr.sweep(
    {{"algorithm": "ppo", "settings": {SMALL | {"evaluate_episodes": 2}}, "parameters": {{"lr": [1e-3, "1e-3 -> 0", 1]}},
      "sampler": "grid", "confirm": {{"top": 1, "seeds": 2}}}},
    out=sys.argv[1], progress=False,
)
print(json.dumps(compiled))
"""
    once = ["jit(_evaluated)", "jit(_initial)", "jit(population_chunk)"]
    assert sorted(in_a_process(code, str(tmp_path / "sweep"))) == sorted(2 * once)


def test_programs_do_not_say_which_lines_of_python_they_come_from():
    """These would be part of what a kernel is found by in the cache."""
    make_plan("ppo", SMALL, abstract=True)
    text = jax.jit(lambda x: x + 1).lower(1.0).as_text(debug_info=True)
    assert "test_start" not in text
    assert "add" in text


def test_the_updates_are_compiled_while_the_state_is_made():
    plan = make_plan("ppo", SMALL, begins=True)
    began = plan.runner.prepare(plan.state)
    assert plan.on_devices().runner is plan.runner
    plan.runner.compile(plan.state)
    assert began.done()
    state, _ = plan.runner.advance(plan.runner.begin(plan.state), 2)
    assert int(state.updates) == 2
    other = make_plan("ppo", SMALL)
    assert other.runner is None
    jax.tree.map(
        np.testing.assert_array_equal, *map(_numbers, (make_plan("ppo", SMALL, begins=True).state, other.state))
    )


def _numbers(state):
    """The arrays of a state, with keys as numbers."""
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), state)


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_evaluation_in_the_background_is_that_of_the_evaluator(tmp_path, is_busy):
    plan = make_plan("ppo", SMALL | {"evaluate_episodes": 8})
    with RunDirectory.create(tmp_path / "run") as directory:
        loop = Loop(plan, directory)
        loop.prepare()
        loop.record.prepare(plan.state, None, is_busy)
        assert loop.record.evaluation is not None
        found = loop.record.evaluate(plan.state, 3)
        evaluator = make_evaluator(plan.env, plan.policy(plan.state).program, 8)
        key = derive(plan.state.key, "evaluate", 3)
        results = [evaluator(plan.policy(plan.state).learned, key, greedy) for greedy in (True, False)]
        assert found == {name: float(value) for name, value in evaluation_metrics(*results).items()}
        background.finished(loop.runner.prepare(plan.state))
        loop.record.close()


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize(("is_scoped", "traced_aside"), [(False, True), (True, False)])
def test_while_training_is_busy_the_evaluation_is_traced_aside_unless_a_scope_changes_it(
    tmp_path, monkeypatch, is_scoped, traced_aside
):
    traced_in, evaluation = [], run_record._evaluation

    def noted(*given):
        traced_in.append(threading.current_thread() is not threading.main_thread())
        return evaluation(*given)

    monkeypatch.setattr(run_record, "_evaluation", noted)
    plan = make_plan("ppo", SMALL | {"evaluate_episodes": 8})
    with RunDirectory.create(tmp_path / "run") as directory:
        loop = Loop(plan, directory)
        with jax.default_matmul_precision("highest") if is_scoped else contextlib.nullcontext():
            loop.record.prepare(plan.state, None, is_busy=True)
        background.finished(loop.record.evaluation)
        loop.record.close()
    assert traced_in == [traced_aside]


@pytest.mark.parametrize("is_read", [True, False])
def test_the_first_updates_wait_for_the_evaluation_only_while_they_are_compiled(tmp_path, monkeypatch, is_read):
    monkeypatch.setattr(background, "is_done_within", lambda future, seconds: is_read)
    prepared, metrics = [], []
    prepare = RunRecord.prepare

    def noted(self, state, after, is_busy=False):
        prepared.append((len(metrics), is_busy))
        prepare(self, state, after, is_busy)

    monkeypatch.setattr(RunRecord, "prepare", noted)
    lehr.train("ppo", "CartPole-v1", run_dir=tmp_path, progress_fn=lambda step, found: metrics.append(step), **SMALL)
    assert prepared == [(1, True) if is_read else (0, False)]


@dataclass(frozen=True)
class SeesNumbers(ppo.Algorithm):
    """An algorithm whose network depends on the value of its key."""

    @classmethod
    def build(cls, spaces, config, network_config, key):
        """Scale the parameters by a number that Python draws."""
        drawn = np.random.default_rng(int(jax.random.bits(key))).uniform()
        built, params = super().build(spaces, config, network_config, key)
        return built, jax.tree.map(lambda x: drawn * x, params)


@dataclass(frozen=True)
class BringsWeights(ppo.Algorithm):
    """An algorithm whose parameters are arrays from elsewhere, too large to be constants of a program."""

    @classmethod
    def build(cls, spaces, config, network_config, key):
        """Return parameters that are all the same number."""
        built, params = super().build(spaces, config, network_config, key)
        return built, jax.tree.map(lambda x: np.full(x.shape, 0.25, x.dtype), params)


def test_an_algorithm_may_build_its_network_from_numbers():
    config, network, seed = ppo.Config(num_envs=4, horizon=8, minibatches=2), NetworkConfig(hidden_sizes=(8,)), 5
    _, state = assemble(SeesNumbers, "CartPole-v1", config, network, 1000, seed)
    _, plain = assemble("ppo", "CartPole-v1", config, network, 1000, seed)
    key = derive(jax.random.key(seed), "network")
    drawn = np.random.default_rng(int(jax.random.bits(key))).uniform()
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, drawn * y, rtol=1e-6), state.learner.params, plain.learner.params
    )


def test_weights_from_elsewhere_are_not_constants_of_the_program():
    config, network = ppo.Config(num_envs=4, horizon=8, minibatches=2), NetworkConfig(hidden_sizes=(512, 512))
    _, state = assemble(BringsWeights, "CartPole-v1", config, network, 1000)
    assert all(np.all(np.asarray(leaf) == 0.25) for leaf in jax.tree.leaves(state.learner.params))


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**32 + 5, -(2**63), 2**63 - 1])
def test_the_key_of_a_run_is_that_of_its_seed(seed):
    config, network = ppo.Config(num_envs=4, horizon=8, minibatches=2), NetworkConfig(hidden_sizes=(8,))
    _, state = assemble("ppo", "CartPole-v1", config, network, 1000, seed)
    assert np.array_equal(jax.random.key_data(state.key), jax.random.key_data(jax.random.key(seed)))


def test_a_directory_with_a_run_is_refused_before_anything_is_compiled(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("algorithm: ppo")
    monkeypatch.setattr("lehr.training.api.make_plan", lambda *given, **named: pytest.fail("it is assembled"))
    with pytest.raises(lehr.InputError, match="is not empty"):
        lehr.train("ppo", run_dir=tmp_path, **SMALL)


KEY = jax.random.key(3)


@dataclass(frozen=True)
class Keyed(CartPole):
    """An environment with a random key of its own, which is a constant of every program."""

    def reset(self, key):
        state, obs = super().reset(key)
        return state, obs + 0.01 * jax.random.uniform(jax.random.fold_in(KEY, 1), obs.shape)


def test_a_key_may_be_a_constant_of_the_environment():
    settings = ppo.Config(num_envs=2, horizon=4, minibatches=1)
    _, state = assemble("ppo", Keyed(), settings, NetworkConfig(hidden_sizes=(8,)), 1000)
    assert np.isfinite(state.actor.obs).all()


def test_a_network_may_be_built_from_numbers_that_are_chosen_by_other_numbers(monkeypatch):
    """A trace cannot select by a mask, so such a network is built before."""
    build = ppo.Algorithm.build.__func__
    seen = []

    def chosen(cls, *given):
        key = given[-1]
        drawn = jax.random.uniform(key, (8,))
        seen.append(len(drawn[drawn > 0.5]))
        return build(cls, *given)

    monkeypatch.setattr(ppo.Algorithm, "build", classmethod(chosen))
    settings = ppo.Config(num_envs=2, horizon=4, minibatches=1)
    _, state = assemble("ppo", "CartPole-v1", settings, NetworkConfig(hidden_sizes=(8,)), 1000)
    assert len(seen) == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.learner.params))


def test_nothing_keeps_a_run_alive_that_is_over(tmp_path, monkeypatch):
    loops = []

    class Watched(Loop):
        def __init__(self, *given):
            super().__init__(*given)
            loops.append(weakref.ref(self))

    monkeypatch.setattr(api, "Loop", Watched)
    lehr.train("ppo", "CartPole-v1", run_dir=tmp_path / "run", **SMALL)
    gc.collect()
    assert [loop() for loop in loops] == [None]


def test_the_time_of_a_run_begins_with_the_compilation_of_its_updates(tmp_path):
    """It begins while the state is made, before the loop is."""
    plan = make_plan("ppo", SMALL, begins=True)
    plan.runner.since -= 100.0
    with RunDirectory.create(tmp_path / "run") as directory:
        loop = Loop(plan, directory)
        loop._compile()
        loop.record.close()
    assert loop.compile_seconds >= 100.0
    assert loop.elapsed >= loop.compile_seconds


def test_a_finished_run_is_not_compiled_again(tmp_path, monkeypatch):
    lehr.train("ppo", "CartPole-v1", run_dir=tmp_path / "run", **SMALL)
    begun = []
    monkeypatch.setattr(DeviceRunner, "prepare", lambda self, state: begun.append(self))
    lehr.resume(tmp_path / "run", progress=False)
    assert begun == []


@pytest.mark.usefixtures("nothing_is_compiled")
def test_the_updates_of_a_run_are_compiled_with_the_options_for_updates(tmp_path, monkeypatch):
    used = []
    compiled = compile_options.compiled

    def noted(lowered, options):
        used.append(options)
        return compiled(lowered, options)

    monkeypatch.setattr(compile_options, "compiled", noted)
    lehr.train("ppo", "CartPole-v1", run_dir=tmp_path / "run", **SMALL)
    assert sorted(map(str, used)) == sorted(map(str, [compile_options.ONCE, compile_options.UPDATES]))


def test_programs_keep_their_lines_of_python_if_none_is_cached(monkeypatch):
    monkeypatch.setenv("LEHR_CACHE", "off")
    folder, frames = jax.config.jax_compilation_cache_dir, jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_traceback_in_locations_limit", 100)
    try:
        use_compilation_cache()
        assert jax.config.jax_traceback_in_locations_limit == 100
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_traceback_in_locations_limit", frames)
