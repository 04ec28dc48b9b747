"""The definition of a sweep: what its file says, checked."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lehr import algorithms, config
from lehr.config.build import presets_of, spellings_of
from lehr.config.fields import fields_of
from lehr.errors import InputError, closest, quoted, shortened
from lehr.schedules.keys import ENDINGS
from lehr.sweeps.conditions import Condition
from lehr.sweeps.sections import (
    LARGEST_SEED,
    MOST_CONFIGURATIONS,
    OPTUNA,
    Confirm,
    EvolutionSettings,
    HalvingSettings,
    check_halving,
    read_confirm,
    read_evolution,
    read_halving,
    read_mapping,
    read_seeds,
    whole_number,
)
from lehr.sweeps.space import Point, Space
from lehr.training import api
from lehr.training.plan import RunConfig, settings_classes
from lehr.training.population import Configured

SAMPLERS = ("grid", "random", "sobol", "latin_hypercube")
"""The samplers that need nothing but the definition."""

_KEYS = (
    *("algorithm", "settings", "parameters", "conditions", "sampler", "samples", "sampler_seed", "seeds"),
    *("confirm", "evolution", "halving"),
)
_RUN_SETTINGS = ("env_parameters", "action_repeat", "frame_stack")
"""The settings of a run, apart from the algorithm's, that may be swept."""
_NOT_SWEPT = {
    "seed": "each configuration is trained with every one of seeds, so write seeds: 5 or a list of them",
    "total_steps": "all runs of a sweep have the same budget, so move it to settings",
    "env": "returns on different environments cannot be compared, so move it to settings and make one sweep for each",
    "preset": "it only fills in missing settings, so move it to settings or sweep what it sets",
}
"""Settings that cannot be swept, and what to do instead."""
_FOR_SINGLE_RUNS = {
    "target_return": "all runs of a sweep are trained for the whole budget, so that they can be compared",
    "wandb": "the runs of a sweep are logged to its own directory only",
    "loggers": "the runs of a sweep are logged to its own directory only",
}
"""Settings of single runs that a sweep would ignore, and why."""


@dataclass(frozen=True)
class Configuration:
    """One point of a sweep, and the settings that it stands for."""

    number: int
    """Its place among the sweep's configurations, from 0."""
    point: Point
    """The value of each swept parameter, by keys such as `learning_rate` and `entropy_coef.start`."""
    settings: dict[str, Any]
    """All settings for `lehr.train`, fixed and swept, without the seed."""
    parsed: Configured = field(repr=False, compare=False)
    """The same, parsed and checked."""


@dataclass(frozen=True)
class Definition:
    """A sweep: an algorithm with fixed settings, the parameters to sweep, and how to sample them.

    >>> definition = Definition.from_mapping({
    ...     "algorithm": "ppo",
    ...     "settings": {"env": "CartPole-v1", "total_steps": "500k"},
    ...     "parameters": {"lr": [1e-3, "1e-3 -> 0"], "clip_range": {"low": 0.1, "high": 0.3, "steps": 3}},
    ...     "sampler": "grid",
    ...     "seeds": 2,
    ... })
    >>> definition.seeds, list(definition.space.domains)
    ((0, 1), ['learning_rate', 'clip_range'])
    >>> definition.configuration(0, {"learning_rate": "1e-3 -> 0", "clip_range": 0.2}).settings
    {'env': 'CartPole-v1', 'total_steps': '500k', 'learning_rate': '1e-3 -> 0', 'clip_range': 0.2}
    """

    algorithm: Any
    """Its name, `module:Name`, or its class."""
    settings: dict[str, Any]
    """The fixed settings, by name, as `lehr.train` takes them."""
    parameters: dict[str, Any]
    """The swept settings, by name: lists, ranges, or parts of a schedule, as in the file."""
    conditions: tuple[Condition, ...]
    """What every configuration must satisfy."""
    sampler: str
    """One of `SAMPLERS`, or the name of one of Optuna's after `optuna:`."""
    samples: int | None
    """Number of configurations; `None` for a grid."""
    sampler_seed: int
    """Random seed of the sampler."""
    seeds: tuple[int, ...]
    """The seeds that each configuration is trained with."""
    confirm: Confirm
    """What is trained again at the end."""
    evolution: EvolutionSettings | None
    """How members change while they train; `None` if they do not."""
    halving: HalvingSettings | None
    """When members are stopped early; `None` if all are trained to their end."""
    space: Space = field(repr=False, compare=False)
    """The parameters, as the samplers use them."""

    @cached_property
    def _classes(self) -> list[type]:
        """The classes of the settings; the same for all configurations, as what decides them cannot be swept."""
        return settings_classes(self.algorithm, self.settings)

    @cached_property
    def _shared(self) -> dict[str, Any] | None:
        """The values of the fixed settings, if all configurations are these with other coefficients."""
        known = fields_of(self._classes)
        if any(map(self.is_static, self.parameters)) or not all(name in known for name in self.settings):
            return None
        with contextlib.suppress(InputError):  # a required setting may be swept
            return config.parse(self._classes, self.settings)
        return None

    @classmethod
    def read(cls, path: str | Path, trust: bool = False) -> "Definition":
        """Read a sweep file. Code from outside Lehr that it names is refused unless you `trust` it."""
        found = config.from_yaml(path)
        check_trust(found, f"The sweep '{path}'", trust)
        return cls.from_mapping(found)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "Definition":
        """Check the definition of a sweep. Classes that it names are imported: see `check_trust`.

        Args:
            mapping: with the keys of a sweep file.
        """
        given = {config.underscored(key): value for key, value in mapping.items()}
        for key in given:
            if key not in _KEYS:
                raise InputError(f"A sweep has no key {quoted(key)}; {_meant(key, given[key])}")
        if given.get("algorithm") is None:
            raise InputError("The sweep names no algorithm; add a line such as 'algorithm: ppo'.")
        algorithm = given["algorithm"]
        settings = read_mapping("settings", given.get("settings"))
        parameters = read_mapping("parameters", given.get("parameters"))
        if (
            not parameters and len(read_seeds(given.get("seeds", 1))) > 1
        ):  # one configuration, for the sake of its seeds
            given = {"sampler": "grid", "confirm": False, **given}
        elif not parameters:
            raise InputError(
                "The sweep has no parameters; add what to sweep, such as 'learning_rate: {low: 1e-4, high: 1e-2, "
                "scale: log}'."
            )
        classes = settings_classes(algorithm, settings)
        settings = _canonical(classes, settings)
        if "seed" in settings:
            raise InputError(f"seed is {quoted(settings['seed'])}, but {_NOT_SWEPT['seed']}.")
        parameters = _swept(algorithm, classes, settings, parameters)
        fields = fields_of(classes)
        space = Space.read(fields, parameters, _run_settings(classes, settings).total_steps)
        spellings = {alias: name for name, found in fields.items() for alias in found.aliases}
        conditions = tuple(Condition.read(text, space, spellings) for text in _conditions(given.get("conditions")))
        sampler, samples = _sampler(given.get("sampler", "sobol"), given.get("samples"), space)
        sampler_seed = whole_number("sampler_seed", given.get("sampler_seed", 0), least=0)
        seeds = read_seeds(given.get("seeds", 1))
        confirm = read_confirm(given.get("confirm"), len(seeds))
        evolution = read_evolution(given.get("evolution"), space, parameters)
        halving = read_halving(given.get("halving"), space.total_steps)
        if halving is not None:
            check_halving(evolution, sampler, settings)
        if (evolution is not None or halving is not None) and given.get("confirm") is None:
            confirm = Confirm(0, 0)
        if confirm.top and max(seeds) + confirm.seeds > LARGEST_SEED:
            raise InputError(
                f"seeds has {max(seeds)}, but the {confirm.seeds} fresh seeds of confirm are those after the largest, "
                f"and no seed is above {LARGEST_SEED}; give smaller seeds."
            )
        return cls(
            algorithm,
            settings,
            parameters,
            conditions,
            sampler,
            samples,
            sampler_seed,
            seeds,
            confirm,
            evolution,
            halving,
            space,
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return the definition as a sweep file has it; `from_mapping` turns it back."""
        found: dict[str, Any] = {
            "algorithm": algorithms.name_of(self.algorithm),
            "settings": self.settings,
            "parameters": self.parameters,
            "conditions": [str(condition) for condition in self.conditions],
            "sampler": self.sampler,
            "samples": self.samples,
            "sampler_seed": self.sampler_seed,
            "seeds": len(self.seeds) if self.seeds == tuple(range(len(self.seeds))) else list(self.seeds),
            "confirm": self.confirm._asdict(),
            "evolution": None if self.evolution is None else self.evolution._asdict(),
            "halving": None if self.halving is None else self.halving._asdict(),
        }
        return {key: value for key, value in found.items() if value is not None and value != []}

    @property
    def own_code(self) -> Iterator[tuple[str, str, str]]:
        """What it names from outside Lehr and its suites, which another process would have to import."""
        for part in _parts(self.to_mapping()):
            yield from api.own_code_in_settings(part, elsewhere=True)

    def is_static(self, key: str) -> bool:
        """Whether a parameter is not a coefficient, so that runs that differ in it are different programs."""
        return self.space.is_static(key)

    def holds(self, point: Point) -> bool:
        """Whether a point satisfies all conditions."""
        return all(condition.holds(self.space, point) for condition in self.conditions)

    def configuration(self, number: int, point: Point) -> Configuration:
        """Return the configuration of a point; settings that `lehr.train` would not accept are an error."""
        try:
            swept = self.space.settings(point)
            settings = {**self.settings, **swept}
            if self._shared is None:
                parsed = Configured.of(self.algorithm, settings, self._classes)
            else:
                parsed = Configured.checked(config.with_coefficients(self._classes, self._shared, swept))
        except InputError as error:
            shown = shortened(", ".join(f"{key}={value}" for key, value in point.items()), 400)
            raise InputError(f"Configuration {number} ({shown}) is not possible: {error}") from None
        return Configuration(number, point, settings, parsed)


def check_trust(mapping: Mapping[str, Any], where: str, trust: bool) -> None:
    """Refuse a definition from a file that would run code from outside Lehr and its suites.

    Args:
        mapping: the file's content, as it was read.
        where: the file, for the error message.
        trust: whether the user trusts all of it.
    """
    for part in _parts(mapping):
        api.check_trust(part, where, trust, options=())


def _parts(mapping: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return all settings that a definition names, fixed and swept, in parts that have each name once."""
    given = {config.underscored(key): value for key, value in mapping.items()}
    settings, parameters = (
        found if isinstance(found := given.get(key), Mapping) else {} for key in ("settings", "parameters")
    )
    yield {"algorithm": given.get("algorithm")}
    yield settings
    for name, value in config.merge([RunConfig], {}, parameters).items():
        for choice in _leaves(value) if name != "env_parameters" else [value]:
            yield {name: choice}


def _leaves(tree: Any) -> list[Any]:
    """Return everything in nested mappings and lists."""
    if isinstance(tree, Mapping):
        return [leaf for item in tree.values() for leaf in _leaves(item)]
    return [leaf for item in tree for leaf in _leaves(item)] if isinstance(tree, list | tuple) else [tree]


def _canonical(classes: list[type], given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the names of settings to canonical ones, which also refuses unknown ones."""
    preset = {"preset": given["preset"]} if "preset" in given and presets_of(classes) else {}
    return preset | config.canonical(classes, {name: value for name, value in given.items() if name not in preset})


def _swept(
    algorithm: Any, classes: list[type], settings: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the parameters by canonical names; those that cannot be swept are errors."""
    if "preset" in given:  # chooses settings, but is none
        raise InputError(f"preset cannot be swept: {_NOT_SWEPT['preset']}.")
    found = config.canonical(classes, given)
    deciding = ("reward_model", *algorithms.find(algorithm, settings).decided_by)
    run_settings, known = {entry.name for entry in config.describe(RunConfig)}, fields_of(classes)
    for name in found:
        if name in _NOT_SWEPT:
            raise InputError(f"{name} cannot be swept: {_NOT_SWEPT[name]}.")
        if name in deciding:
            raise InputError(
                f"{name} cannot be swept: it decides which other settings there are, so move it to settings and make "
                "one sweep for each."
            )
        if name in run_settings and name not in _RUN_SETTINGS:
            raise InputError(f"{name} cannot be swept: it is the same for all runs, so move it to settings.")
        if name not in known:
            whole = next(name.removesuffix(ending) for ending in ENDINGS[1:] if name.endswith(ending))
            raise InputError(
                f"{name} cannot be swept by itself; sweep the parts of {whole}: start, end, shape, over, warmup."
            )
        if name in settings:
            raise InputError(f"{name} is both fixed, under settings, and swept, under parameters; remove one of them.")
    return found


def _run_settings(classes: list[type], settings: Mapping[str, Any]) -> RunConfig:
    """Return the settings of a run that matter to the sweep as a whole; those that a sweep cannot follow are errors."""
    preset = presets_of(classes).get(str(settings.get("preset")), {})
    names = ("total_steps", "evaluate_episodes", *_FOR_SINGLE_RUNS)
    given = {key: value for key, value in {**preset, **settings}.items() if key in names}
    run = config.build([RunConfig], given)[0]
    if run.evaluate_episodes == 0:
        raise InputError(
            "evaluate_episodes is 0, but a sweep ranks its runs by an evaluation at the end; give 1 or more, or leave "
            "it out."
        )
    for name, why in _FOR_SINGLE_RUNS.items():
        if getattr(run, name):
            raise InputError(f"{name} is {quoted(settings[name])}, but {why}; remove it.")
    return run


def _meant(key: str, value: Any) -> str:
    """What may be meant by an unknown key of a sweep."""
    keys = [name for name in _KEYS if name != "sampler" or isinstance(value, str)]  # for 'sample: 3'
    near = closest(key, keys)
    if near.startswith("known") and key in spellings_of([RunConfig]):
        return f"move it to settings, or list its values under parameters; {near}"
    return near


def _conditions(given: Any) -> list[Any]:
    if given is None:
        return []
    if not isinstance(given, list | tuple):
        raise InputError(f"conditions is {quoted(given)}; write a list, with a line such as '- a <= b' for each.")
    return list(given)


def _sampler(given: Any, samples: Any, space: Space) -> tuple[str, int | None]:
    """Check the sampler and the number of samples against the space."""
    sampler = given if isinstance(given, str) else quoted(given)
    sampler = sampler if sampler.startswith(OPTUNA) else config.underscored(sampler)
    if sampler not in SAMPLERS and not sampler.startswith(OPTUNA):
        known = [*SAMPLERS, f"{OPTUNA}TPESampler"]
        raise InputError(f"There is no sampler {quoted(given)}; {closest(sampler, known)}")
    grids = {key: domain.grid for key, domain in space.domains.items()}
    count = math.prod(math.inf if grid is None else len(grid) for grid in grids.values())
    if sampler == "grid":
        if samples is not None:
            raise InputError(f"samples is {quoted(samples)}, but a grid takes every combination; remove samples.")
        for key, grid in grids.items():
            if grid is None:
                raise InputError(f"{key} is a range without steps, which a grid needs; add 'steps: 5' or give a list.")
        if count > MOST_CONFIGURATIONS:
            raise InputError(
                f"The grid has {count} points, and the maximum is {MOST_CONFIGURATIONS}; give fewer values, or use "
                "sampler: sobol with samples."
            )
        return sampler, None
    if samples is None:
        instead = "" if math.isinf(count) else ", or 'sampler: grid' for all combinations"
        raise InputError(
            f"The sampler {sampler} needs the number of samples; add a line such as 'samples: 200'{instead}."
        )
    wanted = whole_number("samples", samples, least=1, most=MOST_CONFIGURATIONS)
    if wanted > count and not sampler.startswith(OPTUNA):
        raise InputError(
            f"samples is {wanted}, but the parameters have only {count} combinations; use sampler: grid, or give fewer "
            "samples."
        )
    return sampler, wanted
