"""The summary that `lehr train` and `lehr resume` print at the end."""

import math
import shlex
import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from lehr.acting.evaluation import without_noise
from lehr.cli import output
from lehr.report.loggers.progress import duration, short_number
from lehr.training.addresses import option
from lehr.training.api import Result, own_code_in_settings
from lehr.training.directory import RunDirectory

if TYPE_CHECKING:  # imported where they are needed: this module is imported before training
    from lehr.sweeps.api import SweepResult


def print_summary(result: Result) -> None:
    """Print the outcome, the evaluation, the time, the files, and commands to run next; once, if on several hosts."""
    if jax.process_index() > 0:
        return
    directory, final = RunDirectory(result.run_dir), {"env_steps": 0, **result.final}
    facts: dict[str, str | list[str]] = {"run": str(directory.path), "outcome": _outcome(result, final)}
    if "evaluate/return" in final:
        greedy, sampled = (_mean(final, name) for name in ("evaluate/return", "evaluate/return_sampled"))
        what = "mean return ± std over" if "evaluate/return_std" in final else "mean return of"
        episodes = result.config["evaluate_episodes"]
        facts["evaluation"] = f"greedy {greedy}, sampled {sampled} ({what} {episodes} episodes)"
    elif math.isnan(final.get("episode/return", math.nan)) and math.isfinite(final.get("rollout/reward", math.nan)):
        facts["reward"] = f"{final['rollout/reward']:.4g} per step in the last update; no episode has ended"
    if "time/elapsed" in final:
        rate = np.nanmedian(result.metrics["time/steps_per_second"])
        facts["time"] = (
            f"{duration(final['time/elapsed'])} to the last update; {short_number(rate)} steps/s in training"
        )
    normalised = [what for what in ("observations", "rewards") if result.config[f"normalise_{what}"]]
    if normalised:
        facts["normalised"] = " and ".join(normalised)
    facts["files"] = [str(path) for path in (directory.curve, directory.metrics) if path.exists()]
    facts["next"] = _next(result, final)
    output.print_facts(output.console(), facts)


def summarise_seeds(result: "SweepResult") -> None:
    """Print the mean return of several seeds with its interval, the files, and commands to run next."""
    from lehr.sweeps.statistics import mean_interval

    facts: dict[str, str | list[str]] = {"seeds": str(result.directory)}
    all_diverged = exit_code_of_members(result) == 1
    if not result.results.members.size:
        facts["outcome"] = "stopped before the seeds were trained; the state is saved"
    else:
        scores = result.results.scores[0]
        failed = int(np.isnan(scores).sum())
        if all_diverged:
            facts["outcome"] = f"finished, but all {failed} seeds diverged: too many of their updates were not finite"
        else:
            mean, low, _ = mean_interval(scores)
            shown, half = without_noise(mean, mean - low)
            facts["outcome"] = "finished" + (f"; {failed} of {len(scores)} seeds diverged" if failed else "")
            counted = f"mean of {len(scores) - failed} seeds, 95% interval"
            facts["evaluation"] = f"greedy {shown:.4g} ± {half:.3g} ({counted})"
            facts["each"] = ", ".join(f"{score:.4g}" for score in scores)
        facts["time"] = f"{result.seconds:.1f} s, of which {result.compile_seconds:.1f} s compiling"
        found = [result.directory / part for part in ("curve.png", "seeds", "report.html")]
        facts["files"] = [str(path) for path in found if path.exists()]
    cure = "train with a lower learning rate, or see the metrics of the seeds for why"
    facts["next"] = cure if all_diverged else next_of_sweep(result)
    output.print_facts(output.console(), facts)


def exit_code_of_members(result: "SweepResult") -> int:
    """0, 1 if all members diverged, or 130 if the user stopped the sweep."""
    if not result.is_finished:
        return 130
    return int(not np.isfinite(result.results.scores).any())


def next_of_sweep(result: "SweepResult") -> str:
    """The command to run after a sweep."""
    name, trust = shlex.quote(str(result.directory)), trust_flag(result.definition.own_code)
    return (
        f"lehr pick {name} best --out runs/best{trust}" if result.is_finished else f"lehr sweep {name} --resume{trust}"
    )


def trust_flag(own_code: Iterable[Any]) -> str:
    """` --trust` for a command that another process would refuse, since there is code from outside Lehr; or nothing."""
    return " --trust" if any(own_code) else ""


def exit_code(result: Result) -> int:
    """0, 1 if no update could be applied, or 128 plus the number of the signal that stopped the run."""
    if _left_out(result.final) == result.state.updates > 0:
        return 1
    reason = RunDirectory(result.run_dir).read_status()["reason"]
    return 128 + signal.Signals[reason.removeprefix("signal ")] if reason.startswith("signal ") else 0


def _outcome(result: Result, final: dict[str, float]) -> str:
    """How the run ended."""
    status = RunDirectory(result.run_dir).read_status()
    total, target = result.config["total_steps"], result.config["target_return"]
    steps = f"{short_number(final['env_steps'])} of {short_number(total)} env steps"
    if left_out := _left_out(final):
        steps += f", of whose {result.state.updates} updates {left_out} were not finite and were left out"
    if target is not None and final.get("evaluate/return", -math.inf) >= target:
        return f"solved after {steps}: the mean return reached the target of {target:g}"
    if status["status"] == "stopped":
        return f"stopped after {steps} ({status['reason']}); the state is saved"
    return f"finished after {steps}" + ("" if target is None else f", below the target return of {target:g}")


def _left_out(final: dict[str, float]) -> int:
    """How many updates were not applied."""
    return int(final.get("update/rejected", 0))


def _mean(final: dict[str, float], name: str) -> str:
    """A mean, with its standard deviation if known."""
    if f"{name}_std" not in final:
        return f"{final[name]:.4g}"
    mean, std = without_noise(final[name], final[f"{name}_std"])
    return f"{mean:.4g} ± {std:.3g}"


def _next(result: Result, final: dict[str, float]) -> list[str]:
    """Commands to run next."""
    from lehr.report import film

    name, total = shlex.quote(str(result.run_dir)), result.config["total_steps"]
    trust = trust_flag(own_code_in_settings(result.config, elsewhere=True))
    unfinished = final["env_steps"] < total
    hosts = f" {option()}" if jax.process_count() > 1 else ""
    longer = "" if unfinished else f" --total-steps {2 * total}"
    return [
        f"lehr resume {name}{longer}{trust}{hosts}",
        *([f"lehr play {name}{trust}"] if film.can_show(result.env) else []),
    ]
