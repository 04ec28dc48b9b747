"""The summary that `lehr train` and `lehr resume` print at the end."""

import math
import shlex
import signal

import numpy as np

from lehr.cli import output
from lehr.report import film
from lehr.report.loggers.progress import duration, short_number
from lehr.training.api import Result
from lehr.training.directory import RunDirectory


def print_summary(result: Result) -> None:
    """Print the outcome, the evaluation, the time, the files, and commands to run next."""
    directory, final = RunDirectory(result.run_dir), {"env_steps": 0, **result.final}
    facts: dict[str, str | list[str]] = {"run": str(directory.path), "outcome": _outcome(result, final)}
    if "evaluate/return" in final:
        greedy, sampled = (_mean(final, name) for name in ("evaluate/return", "evaluate/return_sampled"))
        episodes = result.config["evaluate_episodes"]
        facts["evaluation"] = f"greedy {greedy}, sampled {sampled} (mean return of {episodes} episodes)"
    if "time/elapsed" in final:
        rate = np.nanmedian(result.metrics["time/steps_per_second"])
        facts["time"] = f"{duration(final['time/elapsed'])}, {short_number(rate)} steps/s"
    facts["files"] = [str(path) for path in (directory.curve, directory.metrics) if path.exists()]
    facts["next"] = _next(result, final)
    output.print_facts(output.console(), facts)


def exit_code(result: Result) -> int:
    """0, or 128 plus the number of the signal that stopped the run, by shell convention."""
    reason = RunDirectory(result.run_dir).read_status()["reason"]
    return 128 + signal.Signals[reason.removeprefix("signal ")] if reason.startswith("signal ") else 0


def _outcome(result: Result, final: dict[str, float]) -> str:
    """How the run ended."""
    status = RunDirectory(result.run_dir).read_status()
    total, target = result.config["total_steps"], result.config["target_return"]
    steps = f"{short_number(final['env_steps'])} of {short_number(total)} env steps"
    if target is not None and final.get("evaluate/return", -math.inf) >= target:
        return f"solved after {steps}: the mean return reached the target of {target:g}"
    if status["status"] == "stopped":
        return f"stopped after {steps} ({status['reason']}); the state is saved"
    return f"finished after {steps}" + ("" if target is None else f", below the target return of {target:g}")


def _mean(final: dict[str, float], name: str) -> str:
    """A mean, with its standard deviation if known."""
    spread = final.get(f"{name}_std")
    return f"{final[name]:.4g}" if spread is None else f"{final[name]:.4g} ± {spread:.3g}"


def _next(result: Result, final: dict[str, float]) -> list[str]:
    """Commands to run next."""
    name, total = shlex.quote(str(result.run_dir)), result.config["total_steps"]
    unfinished = final["env_steps"] < total
    resume = f"lehr resume {name}" if unfinished else f"lehr resume {name} --total-steps {2 * total}"
    return [resume, *([f"lehr play {name}"] if film.can_show(result.env) else [])]
