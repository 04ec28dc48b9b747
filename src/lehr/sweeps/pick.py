"""Take a member out of a sweep as an ordinary run."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from lehr.envs import AnyEnvironment
from lehr.errors import InputError
from lehr.report.curves import learning_curve
from lehr.sweeps.api import SweepResult, final_settings, load_sweep
from lehr.sweeps.changes import make_changes
from lehr.sweeps.definition import Definition
from lehr.sweeps.directory import Member, SweepDirectory, Wave
from lehr.sweeps.gathering import fresh_of, scores
from lehr.sweeps.wave_metrics import read_wave
from lehr.training import checkpoint, settings_file
from lehr.training.directory import RunDirectory
from lehr.training.loop import Loop
from lehr.training.plan import Plan, make_plan
from lehr.training.population import configured, population_shapes
from lehr.training.population_record import ENDED
from lehr.types import TrainState


class Picked(NamedTuple):
    """A member that was taken out of a sweep."""

    path: Path
    """Its run directory."""
    member: int
    """Its number."""
    configuration: int
    """The number of its configuration, as in the report."""
    seed: int
    score: float
    """Its return at the end; NaN if it diverged."""

    def __str__(self) -> str:
        score = "no score" if np.isnan(self.score) else f"score {self.score:.4g}"
        return f"member {self.member}: configuration {self.configuration}, seed {self.seed}, {score}"


def pick(
    sweep: str | Path | SweepResult,
    which: str | int = "best",
    *,
    out: str | Path,
    env: AnyEnvironment | None = None,
    trust: bool = False,
) -> list[Path]:
    """Copy members of a sweep to run directories, which resume, evaluate, play, fork and extend like any other.

    Args:
        sweep: its directory, its name under `sweeps/`, or what `lehr.sweep` returned.
        which: `best`, the number of a member, `c4` for the best member of configuration 4, or `top3` for the best
            members of the three best configurations.
        out: the run directory; of several, the directory that they are created in.
        env: the environment, if the sweep was given an object.
        trust: allow the sweep to run code from outside Lehr.

    Returns the run directories.
    """
    return [picked.path for picked in pick_members(sweep, which, out=out, env=env, trust=trust)]


def pick_members(
    sweep: str | Path | SweepResult,
    which: str | int,
    *,
    out: str | Path,
    env: AnyEnvironment | None = None,
    trust: bool = False,
) -> list[Picked]:
    """Do what `pick` does, and say which members were taken."""
    result = sweep if isinstance(sweep, SweepResult) else load_sweep(sweep, trust=trust)
    directory = SweepDirectory(result.directory)
    chosen = _chosen(result, directory, str(which))
    several = len(chosen) > 1 or str(which).startswith("top")
    found = []
    for wave, index in chosen:
        member = wave.members[index]
        path = Path(out) / f"member-{member.number}" if several else Path(out)
        _write(result, directory, wave, index, path, env or result.env)
        score = float(scores(directory, [member])[0])
        found.append(Picked(path, member.number, _row(result, directory, member), member.seed, score))
    return found


def _chosen(result: SweepResult, directory: SweepDirectory, which: str) -> list[tuple[Wave, int]]:
    """The waves of the chosen members, and their places in them."""
    trained = [wave for wave in directory.read_waves() if directory.is_finished(wave)]
    place = {member.number: (wave, index) for wave in trained for index, member in enumerate(wave.members)}
    if not place:
        raise InputError(f"No member of the sweep '{directory.path}' is trained yet; resume the sweep first.")
    if which.isdecimal():
        if int(which) not in place:
            raise InputError(
                f"Member {which} of the sweep '{directory.path}' is not trained; its trained members are "
                f"{min(place)} to {max(place)}."
            )
        _refuse_stopped(result, int(which))
        return [place[int(which)]]
    if match := re.fullmatch(r"c(\d{1,6})", which):
        return [place[_best_of_configuration(directory, result, int(match[1]), trained)]]
    match = re.fullmatch(r"best|top-?([1-9]\d{0,5})", which)
    if match is None:
        raise InputError(
            f"{which!r} is not a choice of members; give best, the number of a member, c4 for the best member of "
            "configuration 4, or top3."
        )
    if np.isnan(result.ranking.worst):
        raise InputError(
            f"No member of the sweep '{directory.path}' has a score, since all of them diverged, so none is the best; "
            "give the number of a member."
        )
    count = int(match[1] or 1)
    rows = result.ranking.order[:count]
    if unknown := int(np.isnan([result.ranking.estimate(int(row)).value for row in rows]).sum()):
        raise InputError(
            f"{which} asks for {count} configurations, but halving left only {len(rows) - unknown} in training to the "
            f"end; give top{len(rows) - unknown}."
        )
    return [place[_best_member(directory, result, int(row), trained)] for row in rows]


def _refuse_stopped(result: SweepResult, member: int) -> None:
    """Refuse a member that was stopped early, whose place was given to another."""
    halved, where = result.results.halved, np.argwhere(result.results.members == member)
    if halved is not None and len(where) and np.isnan(result.results.scores[tuple(where[0])]):
        raise InputError(
            f"Member {member} of the sweep '{result.directory}' was stopped after "
            f"{halved.env_steps[tuple(where[0])]:,.0f} env steps, so its state was not kept; pick one that was trained "
            "to its end, such as best."
        )


def _best_of_configuration(directory: SweepDirectory, result: SweepResult, row: int, waves: list[Wave]) -> int:
    """The number of the best member of a configuration; that there is none is an error."""
    count = len(result.results.members)
    if row >= count:
        raise InputError(
            f"Configuration {row} of the sweep '{directory.path}' is not trained; its trained configurations are 0 to "
            f"{count - 1}."
        )
    again = result.results.again.get(row, np.zeros(0))
    if not np.isfinite(np.concatenate([result.results.scores[row], again])).any():
        raise InputError(
            f"No member of configuration {row} of the sweep '{directory.path}' has a score, since all of them diverged "
            "or were stopped early, so none is the best; give another configuration, or the number of a member."
        )
    return _best_member(directory, result, row, waves)


def _best_member(directory: SweepDirectory, result: SweepResult, row: int, waves: list[Wave]) -> int:
    """The number of the member of a configuration, fresh seeds included, with the highest score."""
    known = {member.number: member for wave in waves for member in wave.members}
    configuration = known[int(result.results.members[row][0])].configuration
    judging = [member for member in known.values() if not member.fresh] + fresh_of(known.values())
    members: list[Member] = [member for member in judging if member.configuration == configuration]
    found = scores(directory, members)
    return members[int(np.nanargmax(found)) if np.isfinite(found).any() else 0].number


def _row(result: SweepResult, directory: SweepDirectory, member: Member) -> int:
    """The number that the ranking and the report give to the configuration of a member."""
    known = {one.number: one.configuration for wave in directory.read_waves() for one in wave.members}
    return [known[int(number)] for number in result.results.members[:, 0]].index(member.configuration)


def _write(
    result: SweepResult, sweep: SweepDirectory, wave: Wave, index: int, path: Path, env: AnyEnvironment | None
) -> None:
    """Write the run of one member."""
    member, algorithm = wave.members[index], result.definition.algorithm
    source = RunDirectory(sweep.wave_path(wave.number))
    settings = final_settings(sweep, result.definition, member)
    plan = make_plan(algorithm, {**settings, "seed": member.seed, "progress": False}, env, abstract=True)
    state, meta = _state(result.definition, plan, wave, index, source)
    plan = replace(plan, state=state)
    rows = _rows(sweep, wave, index)
    with RunDirectory.create(path) as directory:
        loop = Loop(plan, directory)
        record: Any = loop.record
        loop.begin = time.perf_counter() - meta["elapsed"]
        for row in rows:
            record.log_row(row)
        record.is_best(rows[-1], loop.done)
        loop.save()
        settings_file.write(directory, plan.mapping)
        loop.record.close()
        directory.write_status("finished", f"member {member.number} of the sweep '{sweep.path}'")
        metrics = {name: np.array([row.get(name, np.nan) for row in rows]) for name in rows[0]}
        learning_curve({path.name: metrics}, directory.curve, texts=plan.coefficient_texts)


def _state(
    definition: Definition, plan: Plan, wave: Wave, index: int, source: RunDirectory
) -> tuple[TrainState, dict[str, Any]]:
    """The final state of a member, and the metadata of the checkpoint of its population."""
    if wave.takes_turns:
        one, _, _ = checkpoint.newest(source.path / ENDED / str(index), plan.state.saved)
        return one.completed(plan.state), checkpoint.latest_meta(source.checkpoints)
    members = configured(definition.algorithm, [one.settings for one in wave.members])
    members += [members[-1]] * (wave.size - len(members))
    changes = None if wave.members[0].fresh else make_changes(definition)
    evolution = None if changes is None else changes(plan)
    shapes = population_shapes(plan, [one.coefficients for one in members], evolution)
    saved, meta, _ = checkpoint.newest(source.checkpoints, shapes.saved)
    one = jax.tree.map(lambda leaf: leaf[index], saved.members)
    return one.saved.completed(plan.state), meta


def _rows(sweep: SweepDirectory, wave: Wave, index: int) -> list[dict[str, Any]]:
    """The rows of one member's metrics, each by name."""
    table = read_wave(sweep, wave)
    rows = []
    for number in range(len(table["update"])):
        row: dict[str, Any] = {}
        for name, column in table.items():
            value = column[number] if column.ndim == 1 else column[number, index]
            is_missing = name.startswith("evaluate/") and np.isnan(value)
            if not is_missing and not name.startswith(("update/frozen", "evolution/")):
                row[name] = value.item()
        rows.append(row)
    return rows
