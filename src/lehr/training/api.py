"""The functions `train`, `resume`, `load` and `evaluate`."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr import algorithms, config, garbage, plugins
from lehr.acting import evaluation
from lehr.acting.evaluation import EpisodeResults
from lehr.acting.policy import Policy
from lehr.envs import AnyEnvironment, HostEnvironment, make
from lehr.envs.adapters import is_factory
from lehr.envs.check import allow_own_changes, refuse_changed
from lehr.envs.registry import full_name, own_code, own_code_in, registered
from lehr.errors import InputError
from lehr.report.curves import learning_curve
from lehr.report.loggers.display import waiting
from lehr.report.loggers.jsonl import read
from lehr.training import agreement, background, settings_file
from lehr.training.directory import RunDirectory, default_path
from lehr.training.following import follow
from lehr.training.hosts import Hosts, joined, wait_for
from lehr.training.leaves import MisfitError
from lehr.training.loop import Loop, ProgressFunction, restore
from lehr.training.plan import Plan, RunConfig, make_plan, settings_classes
from lehr.types import TrainState


@dataclass(frozen=True)
class Result:
    """Result of a run: its policy, state, settings and metrics. `lehr.load` returns the same from a run directory."""

    run_dir: Path
    algorithm: str
    config: dict[str, Any]
    """Every setting by name, as in the run's `config.yaml`."""
    state: TrainState
    policy: Policy
    env: AnyEnvironment = field(repr=False)
    """The environment with its time limit, not batched."""
    env_steps: int = 0
    """Env steps of the state; the metrics of a run that was killed go on after its last checkpoint."""

    def __repr__(self) -> str:
        """Say what was trained, for how long, with which return, and where it is."""
        final = self.final
        measures = (
            ("return", "evaluate/return", ""),
            ("return", "episode/return", ""),
            ("reward", "rollout/reward", ", the mean per step: no episode has ended"),
        )
        measured = [
            f"  {what}     {final[name]:.6g} ({name}{note})"
            for what, name, note in measures
            if np.isfinite(final.get(name, np.nan))
        ]
        lines = [
            f"Result of {self.algorithm} on {self.config['env']}",
            f"  env steps  {self.env_steps:,} of {self.config['total_steps']:,}",
            *measured[:1],
            f"  run_dir    {self.run_dir}",
        ]
        return "\n".join(lines)

    @property
    def params(self) -> Any:
        """The parameters: a plain dict of arrays."""
        return self.state.learner.params

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """The whole history: one column per metric, NaN at updates where the metric was not measured."""
        return read(self.run_dir / "metrics.jsonl")

    @property
    def final(self) -> dict[str, float]:
        """The latest value of each metric that is a number, including the applied coefficients."""
        newest = {}
        for name, column in self.metrics.items():
            if column.dtype.kind in "fi":
                known = column[~np.isnan(column)]
                newest[name] = float(known[-1]) if len(known) else float("nan")
        return newest


def train(
    algorithm: Any,
    env: Any,
    *,
    run_dir: str | Path | None,
    from_run: str | Path | None,
    progress_fn: ProgressFunction | None,
    trust: bool,
    distributed: bool,
    **settings: Any,
) -> Result:
    """Train one agent and return the result; the arguments are those of `lehr.train`, which calls this."""
    with joined(distributed) as hosts:
        settings = config.merge([RunConfig], {}, settings) | ({} if hosts.leads else {"progress": False})
        env = settings.pop("env", None) if env is None else env
        instance = None if isinstance(env, str) else env
        if isinstance(env, str):
            settings["env"] = env
        if run_dir is not None and hosts.leads:
            with _writable(Path(run_dir)):
                RunDirectory(Path(run_dir)).refuse_content()  # before anything is compiled
        background.start_device()
        if from_run is None:
            with _preparing(algorithm, settings, instance):
                plan = make_plan(algorithm, settings, instance, spreads=True, begins=hosts.count == 1).on_devices(hosts)
        else:
            origin = RunDirectory.open(from_run)
            found, saved = _settings(origin, None, trust=True)  # it must match the algorithm named in this call
            if (name := algorithms.name_of(algorithm)) != found:
                raise InputError(f"'{origin.path}' is a run of {found}, not of {name}; a fork keeps the algorithm.")
            check_trust(saved, f"The run '{origin.path}'", trust, env)
            plan = _fork(algorithm, origin, saved, settings, instance, hosts)
        if not hosts.leads:
            return _follow(plan)
        path = Path(run_dir or default_path(plan.algorithm, plan.run.env.strip("<>"), plan.run.seed))
        with _writable(path):
            existed = path.is_dir()
            made = RunDirectory.create(path)
        with made as directory:
            try:
                _share_directory(plan, directory)
                loop = _begin(plan, directory, progress_fn)
            except BaseException:
                for entry in list(path.iterdir()) if existed else [path]:  # a link, or '.', stays as it is
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
                raise
            return _run(plan, directory, loop)


def resume(
    run: str | Path,
    *,
    env: Any = None,
    algorithm: Any = None,
    progress_fn: ProgressFunction | None = None,
    trust: bool = False,
    distributed: bool = False,
    **settings: Any,
) -> Result:
    """Continue a stopped run as if it had never stopped.

    Args:
        run: run directory, or its name under `runs/`.
        env: the environment, as in `train`, if the run could not save how to create it; or its name, to allow its code.
        algorithm: the class, if the run was given one of your own; or its name, to allow its code.
        progress_fn: as in `train`.
        trust: allow the run to run code from outside Lehr.
        distributed: as in `train`.
        settings: settings to change; `total_steps` extends the run, and shares of the budget then refer to the new
            budget.
    """
    with joined(distributed) as hosts:
        settings = config.merge([RunConfig], {}, settings) | ({} if hosts.leads else {"progress": False})
        env = settings.pop("env", None) if env is None else env
        directory = RunDirectory.open(run)
        if hosts.leads:
            with _writable(directory.path):
                directory.lock()
        with directory if hosts.leads else contextlib.nullcontext():
            algorithm, saved = _settings(directory, algorithm, trust, settings)
            kept = saved.get("env")
            if isinstance(env, str) and full_name(env) != kept:
                if kept is not None and not plugins.is_placeholder(kept):
                    raise InputError(
                        f"env is {env!r}, but a resumed run keeps its environment ({kept}); drop the option."
                    )
                saved["env"] = env
            check_trust(saved, f"The run '{directory.path}'", trust, env)
            background.start_device()
            changed = _changed(algorithm, saved, settings)
            instance = None if isinstance(env, str) else env
            begins = hosts.count == 1 and "seed" not in settings  # another seed is refused below
            if "total_steps" not in settings:
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    begins &= directory.read_status()["status"] != "finished"
            with _preparing(algorithm, changed, instance):
                plan = make_plan(algorithm, changed, instance, spreads=True, begins=begins).on_devices(hosts)
            if plan.run.seed != saved["seed"]:
                raise InputError(
                    f"seed is {plan.run.seed}, but a resumed run keeps its seed ({saved['seed']}); drop the option, or "
                    "fork the run with train(from_run=...)."
                )
            if not hosts.leads:
                return _follow(plan, resumes=True)
            _share_directory(plan, directory, resumes=True)
            loop = _begin(plan, directory, progress_fn, resumes=True)
            if (before := saved["total_steps"]) != (now := plan.run.total_steps):
                loop.warn(
                    f"The budget changes from {before} to {now} env steps: schedules relative to the budget are "
                    f"{'stretched' if now > before else 'shortened'} to the new one."
                )
            if loop.is_over:
                loop.warn(
                    "The run is already finished, and nothing is left to train; a larger budget extends it: "
                    "--total-steps, in Python total_steps."
                )
            return _run(plan, directory, loop)


def load(run: str | Path, env: Any = None, *, algorithm: Any = None, trust: bool = False) -> Result:
    """Load a run: its latest state, its policy, its settings and its metrics.

    Args:
        run: run directory, or its name under `runs/`.
        env: environment to use instead of the run's, as in `train`, with the same spaces.
        algorithm: as in `resume`.
        trust: allow the run to run code from outside Lehr; see SECURITY.md.
    """
    directory = RunDirectory.open(run)
    algorithm, saved = _settings(directory, algorithm, trust)
    kept = saved.get("env")
    replaces = env is not None and not plugins.is_placeholder(kept)
    if replaces and not _is_named(env, kept):
        saved |= {"env_parameters": {}}
    if isinstance(env, str):
        saved |= {"env": env}
    check_trust(saved, f"The run '{directory.path}'", trust, env)
    background.take_memory_as_needed()
    plan = make_plan(algorithm, _without_placeholders(saved), None if isinstance(env, str) else env, loads=False)
    try:
        state, meta = restore(directory, plan, needs_memory=False)
    except MisfitError:
        if not replaces:
            raise
        state, meta = _restore_policy(directory, plan)
    result = _result(plan, directory, state)
    lost = {name: value for name, value in saved.items() if _has_placeholder(value) and name != "env"}
    return replace(result, config=result.config | lost, env_steps=meta["env_steps"])


def evaluate(
    policy: Policy | Result | str | Path,
    env: Any = None,
    episodes: int = 100,
    seed: int = 0,
    greedy: bool = True,
    trust: bool = False,
) -> EpisodeResults:
    """Evaluate a policy over whole episodes, in parallel.

    Args:
        policy: from `lehr.train` or `lehr.load`; or their result, or a run, with its policy and its environment.
        env: the environment with its time limit, as in `train`; by default that of the run.
        episodes: number of episodes.
        seed: random seed of the environments and of sampled actions.
        greedy: take the most likely action instead of sampling.
        trust: allow the run to run code from outside Lehr.
    """
    found = load(policy, env, trust=trust) if isinstance(policy, str | Path) else policy
    if isinstance(found, Result):
        env = found.env if env is None or found is not policy else env
        found = found.policy
    if env is None:
        raise InputError("Got a policy without an environment; pass env, for example env='CartPole-v1'.")
    made = make(env)
    if isinstance(made, HostEnvironment):
        made = made.for_evaluation() or made
    else:
        refuse_changed(made)
    results = evaluation.evaluate(found, made, episodes, seed, greedy)
    if not isinstance(made, HostEnvironment):
        allow_own_changes(made)
    return results


def _is_named(env: Any, name: str | None) -> bool:
    """Whether an environment that the user gave, a name, a class or a function, is the one with this full name."""
    if isinstance(env, str):
        return full_name(env) == name
    return is_factory(env) and name in (plugins.text_of(env), *map(full_name, registered(env)))


def _restore_policy(directory: RunDirectory, plan: Plan) -> tuple[TrainState, dict[str, Any]]:
    """Return the plan's own state with the policy of a run on another environment, and the metadata."""
    try:
        return restore(directory, plan, needs_memory=False, policy_only=True)
    except MisfitError:
        raise InputError(
            f"The observations of {plan.run.env.strip('<>')} are in {plan.env.observation_space} and its actions in "
            f"{plan.env.action_space}, for which the policy of '{directory.path}' was not trained; give an environment "
            "with the spaces of its run."
        ) from None


def _settings(
    directory: RunDirectory, named: Any, trust: bool, given: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Any, dict[str, Any]]:
    """Return the algorithm of a run, and its other settings.

    Args:
        directory: the run directory.
        named: the algorithm given by the user: its class, its name, or `None`.
        trust: allow code that the run names.
        given: settings to change on purpose, which may differ in the run's `config.yaml`.
    """
    found = settings_file.read(directory)
    saved = config.merge([RunConfig], {}, found.values)
    algorithm = _algorithm(directory, str(saved.pop("algorithm")), named, trust)
    saved.setdefault("noise_steps", 1)  # runs of a version without it
    own = algorithms.find(algorithm, saved)
    if "action_mask" not in saved and hasattr(own.NetworkConfig, "action_mask"):
        saved["action_mask"] = False  # a run of a version to which the mask was an entry like any other
    if "window" not in saved and hasattr(own.Config, "window"):
        saved |= {"window": None, "burn_in": 0}  # a run of a version whose segments were whole
    found.check(_changed(algorithm, {}, dict(given)) if found.differences and given else ())
    return algorithm, saved


def _algorithm(directory: RunDirectory, algorithm: str, named: Any, trust: bool) -> Any:
    """Return the algorithm of a run, or the one that the user named."""
    if named is not None:
        if isinstance(named, str) and named != algorithm:
            raise InputError(f"algorithm is {named!r}, but '{directory.path}' is a run of {algorithm}; drop it.")
        return named
    if plugins.is_placeholder(algorithm):
        raise InputError(
            f"The algorithm of '{directory.path}' was {algorithm}, which cannot be saved in a file; pass it as "
            "algorithm=."
        )
    check_trust({"algorithm": algorithm}, f"The run '{directory.path}'", trust)
    return algorithm


def check_trust(
    found: Mapping[str, Any], where: str, trust: bool, named: Any = None, *, options: Sequence[str] = ("env",)
) -> None:
    """Refuse settings from a file that would run code from outside Lehr and its suites.

    What runs in this process already, because the user gave it to `lehr.train` for example, is not refused.

    Args:
        found: the settings.
        where: the file or the run, for the error message.
        trust: whether the user trusts all of them.
        named: the environment or its name, if the user gave it.
        options: the settings that the user can give instead, in Python and as options of a command.
    """
    if trust:
        return
    for what, text, module in own_code_in_settings(found, named):
        if not plugins.is_in_use(text, module):
            plugins.refuse_untrusted(what, text, module, where, is_option=what in options)


def own_code_in_settings(
    found: Mapping[str, Any], named: Any = None, elsewhere: bool = False
) -> Iterator[tuple[str, str, str]]:
    """Find the settings that would run code from outside Lehr and its suites: their name, their text, and the module.

    Args:
        found: the settings.
        named: the environment or its name, if the user gave it.
        elsewhere: in another process, which has not registered the environments of this one.
    """
    settings = config.merge([RunConfig], {}, found)  # as `build` reads them
    env, parameters = str(settings.pop("env", "")), settings.pop("env_parameters", None)
    is_other = named is None or (isinstance(named, str) and named != env)
    if is_other and (module := own_code(env, elsewhere)) is not None:
        yield "env", env, module
    if (module := own_code_in(parameters)) is not None:
        yield "env_parameters", str(parameters), module
    for name, value in settings.items():
        for text in value if isinstance(value, list) else [value]:
            if (module := plugins.own_code(text)) is not None:
                yield name, str(text), module


def _changed(algorithm: Any, saved: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return a run's settings with the given ones changed."""
    if "preset" in settings:
        raise InputError(
            f"preset is {settings['preset']!r}, but a preset only fills in missing settings and this run already has "
            "all of them; pass the settings to change by name."
        )
    given = {config.underscored(name): value for name, value in settings.items()}
    return config.merge(settings_classes(algorithm, saved | given), saved, settings)


def _without_placeholders(saved: dict[str, Any]) -> dict[str, Any]:
    """Drop settings that were functions or objects, which cannot be saved as text; the state's shapes do not change.

    Without its environment, however, a run cannot be loaded.
    """
    return {name: value for name, value in saved.items() if name == "env" or not _has_placeholder(value)}


def _has_placeholder(value: Any) -> bool:
    return any(plugins.is_placeholder(item) for item in (value if isinstance(value, list) else [value]))


def _preparing(algorithm: Any, settings: Mapping[str, Any], env: Any) -> contextlib.AbstractContextManager[None]:
    """Show that a run is assembled, which takes seconds, unless it shows no progress."""
    given = None if env is None else getattr(env, "__name__", type(env).__name__).strip("<>")
    what = f"preparing {algorithms.name_of(algorithm)} on {given or settings.get('env', RunConfig.env)}"
    return waiting(what, enabled=settings.get("progress", True) is not False)


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a one-sentence error."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"Cannot write the run '{path}': {error.strerror or error}; fix that, or choose another directory."
        ) from error


@garbage.paused()
def _begin(plan: Plan, directory: RunDirectory, progress_fn: ProgressFunction | None, resumes: bool = False) -> Loop:
    """Create the loop of a run and write everything that a resume needs to its directory."""
    config.checked_yaml(plan.mapping)  # or the run could be trained, and never read again
    plugins.remember(text for _, text, _ in own_code_in_settings(plan.mapping))
    with _writable(directory.path), contextlib.ExitStack() as undo:
        loop = Loop(plan, directory, progress_fn, resumes)
        undo.callback(loop.record.close)
        loop.prepare()
        loop.save()
        settings_file.write(directory, plan.mapping)  # written last: if it exists, so do the other files
        undo.pop_all()
    return loop


def _fork(
    algorithm: Any,
    origin: RunDirectory,
    saved: dict[str, Any],
    settings: dict[str, Any],
    env: Any,
    hosts: Hosts,
) -> Plan:
    """Plan a new run that starts from another run's state, with changed settings."""
    old = make_plan(algorithm, _without_placeholders(saved), env, loads=False)
    state, meta = restore(origin, old)
    plan = make_plan(algorithm, _changed(algorithm, saved, settings), env)
    # Controllers restart, since they may differ, and the key comes from the fork's own seed.
    state = state.completed(plan.state)._replace(
        controllers=plan.state.controllers,
        rejected=jnp.uint32(0),
        key=plan.state.key,
    )
    wanted, given = _shapes(plan.state), _shapes(state)
    for name in [*wanted, *given]:
        if wanted.get(name) != given.get(name):
            raise InputError(
                f"With these settings {name} is {wanted.get(name, 'absent')}, but in '{origin.path}' it is "
                f"{given.get(name, 'absent')}; a fork may change coefficients, but not the shapes of arrays."
            )
    plan.check_clock(int(state.updates), meta["env_steps"])
    if int(state.updates) >= plan.updates:
        raise InputError(
            f"total_steps is {plan.run.total_steps}, but the original run has already made {meta['env_steps']} env "
            "steps, which count toward the budget; give more."
        )
    return replace(plan, state=state).on_devices(hosts)


def _shapes(state: TrainState) -> dict[str, str]:
    """Return the dtype and shape of every array by path, such as `float32[4, 64]`."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _run(plan: Plan, directory: RunDirectory, loop: Loop) -> Result:
    size = sum(leaf.size for leaf in jax.tree.leaves(plan.state.learner.params))
    loop.say(f"{plan.algorithm} on {plan.run.env.strip('<>')}, {size} parameters, saved in {directory.path}")
    for note in (*plan.notes, *plan.schedule_notes):
        loop.warn(note)
    if plan.loaded.summary:
        loop.say(plan.loaded.summary)
    data = plan.state.learner.memory, plan.state.reward_model.memory
    if plan.run.checkpoint_replay == "off" and jax.tree.leaves(data):
        loop.warn(
            "checkpoint_replay is off: checkpoints leave out the replay and stored rollouts, so a run that is stopped "
            "and resumed differs from one that is not."
        )
    hosts = plan.sharding.hosts
    hosts.run = directory.path
    hosts.when_stopped(loop.stop)
    result = _result(plan, directory, loop.run())
    hosts.order("end")
    try:
        if result.metrics:  # empty if the run was stopped while compiling
            learning_curve({directory.path.name: result.metrics}, directory.curve, texts=plan.coefficient_texts)
    except Exception as error:  # the run is complete, whatever becomes of its picture
        loop.warn(f"The learning curve could not be drawn ({type(error).__name__}: {error}); the run is complete.")
    return result


def _share_directory(plan: Plan, directory: RunDirectory, resumes: bool = False) -> None:
    """Tell all processes what the run is and where, and wait until they agree and see it."""
    if (hosts := plan.sharding.hosts).count == 1:
        return
    run, status = str(directory.path.absolute()), directory.status.read_text()
    hosts.order("see", run=run, status=status, premises=agreement.premises(plan, resumes))
    hosts.answers()


def _follow(plan: Plan, resumes: bool = False) -> Result:
    """Take part in a run that process 0 of several leads."""
    hosts = plan.sharding.hosts
    order = hosts.next_order()
    agreement.check(agreement.premises(plan, resumes), order["premises"], hosts.index)
    directory = RunDirectory(Path(order["run"]))
    wait_for(directory.status, order["status"])
    hosts.answer()
    hosts.run = directory.path
    return _result(plan, directory, follow(plan, directory, resumes))


def _result(plan: Plan, directory: RunDirectory, state: TrainState) -> Result:
    steps = int(state.updates) * plan.program.steps_per_update
    return Result(directory.path, plan.algorithm, plan.mapping, state, plan.policy(state), plan.env, steps)
