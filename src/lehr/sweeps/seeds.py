"""Train one configuration with several seeds at once: a sweep that sweeps nothing.

Its directory is that of a sweep, which is stopped and resumed like any other, and which `lehr pick` and `lehr sweep
report` take; `lehr.sweeps.seed_files` says what else is in it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from lehr import algorithms, config, zoo
from lehr.envs import AnyEnvironment, HostEnvironment, make
from lehr.errors import InputError, quoted
from lehr.report.loggers.display import Display
from lehr.training import api
from lehr.training.directory import unused_path
from lehr.training.loop import ProgressFunction
from lehr.training.plan import RunConfig

if TYPE_CHECKING:  # imported where it is needed: a single run does without
    from lehr.sweeps.api import SweepResult


@overload
def train(
    algorithm: Any = ...,
    env: Any = ...,
    *,
    seeds: None = ...,
    tuned: bool = ...,
    run_dir: str | Path | None = ...,
    from_run: str | Path | None = ...,
    progress_fn: ProgressFunction | None = ...,
    trust: bool = ...,
    distributed: bool = ...,
    **settings: Any,
) -> api.Result: ...


@overload
def train(
    algorithm: Any = ...,
    env: Any = ...,
    *,
    seeds: int | Sequence[int],
    tuned: bool = ...,
    run_dir: str | Path | None = ...,
    trust: bool = ...,
    distributed: bool = ...,
    **settings: Any,
) -> "SweepResult": ...


def train(
    algorithm: Any = "ppo",
    env: Any = None,
    *,
    seeds: int | Sequence[int] | None = None,
    tuned: bool = False,
    run_dir: str | Path | None = None,
    from_run: str | Path | None = None,
    progress_fn: ProgressFunction | None = None,
    trust: bool = False,
    distributed: bool = False,
    **settings: Any,
) -> "api.Result | SweepResult":
    """Train an agent, or one for each of several seeds at once, and return the result.

    Args:
        algorithm: its name, `module:Name`, or your own class; see `lehr.algorithms.base`.
        env: the environment: a name, an object of Lehr or another suite (a `gymnasium.Env` or `VectorEnv`, for
            example), or a class or function that creates one; CartPole-v1 by default.
        seeds: a number of seeds, or a list of them, to train at once as one program, for compiled environments only.
            The result is then a `SweepResult`: see docs/runs.md. By default one agent is trained, with the setting
            `seed`.
        tuned: use the tuned settings of the zoo for this algorithm and environment, except those given here; see
            docs/zoo.md.
        run_dir: directory of the run; by default `runs/<algorithm>-<env>-s<seed>-<time>`.
        from_run: run to fork: start from its state and clock, with its settings except those given here.
        progress_fn: called with the env steps so far and the latest metrics; if it returns `True`, the run stops.
        trust: allow `from_run` to run code from outside Lehr; code that you name in this call is always allowed.
        distributed: be one of several processes that make one run together, such as one on each host of a cluster; all
            call this with the same arguments. See docs/scale.md.
        settings: fields of `RunConfig`, the algorithm's `Config`, `NetworkConfig` and the reward model's `Config`, in
            one namespace; every coefficient accepts any schedule.
    """
    if tuned:
        settings = _with_tuned(algorithm, env, from_run, settings)
    if seeds is None:
        return api.train(
            algorithm,
            env,
            run_dir=run_dir,
            from_run=from_run,
            progress_fn=progress_fn,
            trust=trust,
            distributed=distributed,
            **settings,
        )
    for name, given in (("from_run", from_run), ("progress_fn", progress_fn), ("distributed", distributed or None)):
        if given is not None:
            raise InputError(f"{name} is for a single run, but seeds is {seeds}; drop one of them.")
    return train_seeds(algorithm, env, seeds, run_dir, settings)


def _with_tuned(algorithm: Any, env: Any, from_run: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the zoo's where none is given, which are shown."""
    if from_run is not None:
        raise InputError(f"tuned is true, but a fork keeps the settings of its origin, '{from_run}'; drop one of them.")
    settings = config.merge([RunConfig], {}, settings)
    name = settings.get("env", RunConfig.env) if env is None else env
    if not isinstance(name, str):
        raise InputError(
            f"tuned is true, but env is {quoted(name)}, and the zoo knows environments by name; give one, such "
            "as 'CartPole-v1', or drop tuned."
        )
    entry, found = zoo.find(algorithms.name_of(algorithm), name), zoo.with_tuned(algorithm, name, settings)
    (run,) = config.build([RunConfig], {key: found[key] for key in ("progress",) if key in found})
    shown = {key: value for key, value in entry.settings.items() if key not in settings and key in found}
    Display(lambda: "", enabled=run.progress).message(f"tuned settings: {zoo.text(shown)}")
    return found


def train_seeds(
    algorithm: Any, env: Any, seeds: int | Sequence[int], path: str | Path | None, settings: dict[str, Any]
) -> "SweepResult":
    """Train one configuration with several seeds at once; the arguments are those of `train`."""
    from lehr.sweeps.api import sweep
    from lehr.sweeps.directory import ROOT

    settings = config.merge([RunConfig], {}, settings)
    count = seeds if isinstance(seeds, int) else len(seeds)
    if isinstance(seeds, bool) or count < 2:
        raise InputError(f"seeds is {quoted(seeds)}; give 2 or more, or a list of them; for one agent, give seed.")
    if "seed" in settings:
        raise InputError(f"seed is {quoted(settings['seed'])}, but seeds is {seeds}; drop one of them.")
    name = settings.get("env", RunConfig.env) if env is None else env
    known: dict[str, Any] = {key: settings[key] for key in ("env_parameters", "progress") if key in settings}
    (run,) = config.build([RunConfig], known)
    _refuse_host(name, run.env_parameters)
    shown = name if isinstance(name, str) else type(name).__name__
    return sweep(
        {
            "algorithm": algorithm,
            "settings": {key: value for key, value in settings.items() if key not in ("progress", "env")},
            "seeds": seeds if isinstance(seeds, int) else list(seeds),
        },
        out=path or unused_path(f"{algorithms.name_of(algorithm)}-{shown}-seeds", ROOT),
        env=name,
        progress=run.progress,
    )


def _refuse_host(env: str | AnyEnvironment, parameters: dict[str, Any]) -> None:
    """Refuse an environment that is not compiled, before anything else is done."""
    made = make(env, **parameters)
    if isinstance(made, HostEnvironment):
        raise InputError(
            f"{made.name} runs on the host, so its seeds cannot be trained at once; start a run for each: seed=0, "
            "seed=1, and so on."
        )
