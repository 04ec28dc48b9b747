"""Brax's checkpoints, and beside each what Brax does not keep: optimiser, clock, keys and environments.

<save_checkpoint_path>/000000409600/...         Brax's files
                                    lehr/...    Lehr's, which Brax does not look at: plain arrays and JSON
"""

import contextlib
import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.compat.brax import theirs
from lehr.compat.brax.epoch import Carried, Learned
from lehr.compat.brax.loss import Networks
from lehr.envs.suites.foreign import by_their_rules
from lehr.errors import InputError
from lehr.training import checkpoint
from lehr.types import Key, PyTree

FOLDER = "lehr"
MOST_BYTES = 2**28
"""Environments that take more than this are not saved: they begin anew when training goes on, as with Brax."""

Keys = dict[str, Key]
log = logging.getLogger("absl")
"""Where Brax writes."""


@dataclass(frozen=True)
class Origin:
    """What a checkpoint is of. Under the same seed chance goes on, and in the same environments their episodes."""

    seed: int
    steps_per_update: int
    """Env steps of a training step."""
    limits: Mapping[str, Any] | None = None
    """What the environments are wrapped with."""
    names: tuple[str, ...] = ()
    """Of the arrays of their state."""
    beginnings: tuple[tuple[float, float], ...] = ()
    """Of each such array at the start of episodes that are always drawn alike: its mean, and that of its size."""

    def of(
        self,
        begin: Callable[[Key], tuple[jax.Array, ...]],
        begun: tuple[jax.Array, ...],
        names: tuple[str, ...],
        num_envs: int,
        limits: Mapping[str, int | None],
    ) -> "Origin":
        """The same with these environments, of which some have begun."""
        plain = {name: None if limit is None else int(limit) for name, limit in limits.items()}
        arrays = begin(jax.random.split(jax.random.PRNGKey(0), num_envs)) if are_small(begun) else ()
        return replace(self, limits=plain, names=names, beginnings=tuple(map(_summary, arrays)))

    def describe(self, step: int) -> dict[str, Any]:
        """All that is written into a checkpoint's JSON."""
        beginnings = [list(one) for one in self.beginnings]
        return {"env_steps": step, **vars(self), "names": list(self.names), "beginnings": beginnings}

    def has_environments_of(self, meta: Mapping[str, Any]) -> bool:
        """Whether the environments of a checkpoint with this description are the same, as far as can be seen."""
        if any(meta.get(name) != self.describe(0)[name] for name in ("steps_per_update", "limits", "names")):
            return False
        there, here = (np.asarray(one, float).reshape(-1, 2) for one in (meta["beginnings"], self.beginnings))
        if there.shape != here.shape:
            return False
        allowed = 1e-6 + 1e-4 * here[:, 1:]  # of the size of the numbers: their mean may be nearly 0
        return bool(np.all((np.abs(there - here) <= allowed) | (np.isnan(there) & np.isnan(here)) | (there == here)))


def are_small(environments: tuple[jax.Array, ...]) -> bool:
    """Whether environments are saved."""
    return sum(array.nbytes for array in environments) <= MOST_BYTES


def _summary(array: jax.Array) -> tuple[float, float]:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    values = np.asarray(array).astype(np.float64)
    return (float(values.mean()), float(np.abs(values).mean())) if values.size else (0.0, 0.0)


def save(path: Any, config: Any, origin: Origin, step: int, learned: Learned, carried: Carried, keys: Keys) -> None:
    """Write Brax's checkpoint and Lehr's beside it.

    Args:
        path: of all checkpoints of a training.
        config: Brax's description of the network, see `network_config`.
        origin: what this is a checkpoint of.
        step: env steps so far.
        learned: what Brax saves.
        carried: what it does not.
        keys: where the randomness of the host stands.
    """
    theirs.checkpoint().save(path, step, learned.for_users, config)
    if "://" in str(path):
        return  # a bucket: Lehr writes files
    beside = Path(path) / f"{step:012d}" / FOLDER
    meta = origin.describe(step)
    checkpoint.save(beside / "learner", _learner(carried, keys), step, meta, keep=1)
    if are_small(carried.environments):
        checkpoint.save(beside / "environments", (carried.environments, keys), step, meta, keep=1)


def load(path: Any, mode: int) -> Any:
    """The parameters in a checkpoint, Brax's or Lehr's, with statistics of observations of this mode.

    Files do not say which mode they are of, but their numbers do: the one keeps the variance, the other its sum.
    """
    params = theirs.checkpoint().load(path)
    return [in_mode(params[0], mode), *params[1:]]


def in_mode(normalizer: Any, mode: int) -> Any:
    """The same statistics, as this mode keeps them; which one has kept them is seen in their numbers."""
    count = normalizer.count
    if hasattr(count, "hi"):
        count = float(count.hi) * 2.0**32 + float(count.lo)
    count = max(float(count), 1.0)

    def misfit(share: float) -> float:
        """How far the deviations are from those of the variances, taken as sums of `1 / share` of them."""
        expected = jax.tree.map(
            lambda x: np.sqrt(np.maximum(np.asarray(x, float), 0) * share + normalizer.std_eps).clip(1e-6, 1e6),
            normalizer.summed_variance,
        )
        errors = jax.tree.map(lambda x, std: np.sum(np.abs(np.log(x / std))), expected, normalizer.std)
        return float(sum(jax.tree.leaves(errors)))

    welford, ema = theirs.running_statistics.NormalizationMode
    found = ema if misfit(1.0) < misfit(1 / count) else welford
    factor = 1.0 if found == mode else count if mode == welford else 1 / count
    converted = jax.tree.map(lambda x: (x * factor).astype(x.dtype), normalizer.summed_variance)
    return normalizer.replace(summed_variance=converted, mode=mode)


def restore(path: Any, origin: Origin, carried: Carried, keys: Keys) -> tuple[Carried, Keys, int]:
    """What Lehr wrote beside a checkpoint, in place of what training begins with, and the env steps so far.

    From a checkpoint of Brax's own nothing is there to restore. Under another seed chance is another; then, and where
    environments are not the same, or more of them, their episodes begin anew.
    """
    beside = Path(path) / FOLDER
    if not (beside / "learner").is_dir():
        return carried, keys, 0
    (optimiser, rate, host_key), meta, _ = checkpoint.newest(beside / "learner", _learner(carried, keys))
    if not float(rate):
        rate = carried.rate  # it did not adapt before
    updates = meta["env_steps"] // origin.steps_per_update
    environments = carried.environments
    if meta.get("seed") == origin.seed:
        keys = {**keys, "host": host_key}
        if origin.has_environments_of(meta) and (beside / "environments").is_dir():
            with contextlib.suppress(InputError):
                (environments, keys), _, _ = checkpoint.newest(beside / "environments", (environments, keys))
    if environments is carried.environments:
        log.info("The environments of %s are not these, or not saved, or of another seed: episodes begin anew.", path)
    updates_now = carried.updates.at[...].set(updates)
    return Carried(optimiser, rate, updates_now, environments), keys, updates * origin.steps_per_update


def _learner(carried: Carried, keys: Keys) -> PyTree:
    return carried.optimiser, carried.rate, keys["host"]


def replaced(initial: Learned, params: Any, restore_value_fn: bool) -> Learned:
    """Parameters from a checkpoint or a training in the place of the initial ones; those of the critic if wanted."""
    normalizer = params[0]
    if isinstance(normalizer, theirs.running_statistics.RunningStatisticsState):
        normalizer = in_mode(normalizer, normalizer.mode)  # as Brax, but Brax's files are read with the wrong mode
    return Learned(Networks(params[1], params[2] if restore_value_fn else initial.params.value), normalizer)


def network_config(observation_size: Any, action_size: int, normalize_observations: bool, factory: Any) -> Any:
    """Brax's description of the network, such that `load_policy` can read it back.

    It does not read an initialiser that is `None`, which is the default of one: such entries are left out. Functions
    of networks for pixels, which Brax does not write by their names, are written so: its factory takes names too.
    """
    config = theirs.checkpoint().network_config(observation_size, action_size, normalize_observations, factory)
    arguments = config.network_factory_kwargs
    for name, value in list(arguments.items()):
        if name.endswith("_init_fn") and value is None:
            del arguments[name]
        for called, registered in _registered(name).items() if name in _BY_NAME else ():
            if value is registered:
                with arguments.ignore_type():
                    arguments[name] = called
    return config


def load_policy(path: Any, network_factory: Callable[..., Any] | None = None, deterministic: bool = True) -> Any:
    """The policy of a checkpoint, Lehr's or Brax's, as Brax's own `load_policy` gives it.

    That one does not read all that Brax's training saves: initialisers may be `None`, functions of a network for pixels
    stand there with all that can be said of them, and the shape of observations together with its type. All these are
    understood here.
    """
    theirs.check()
    with by_their_rules():
        saved = theirs.checkpoint()
        written = (saved.epath.Path(path) / "ppo_network_config.json").read_text()
        described = json.loads(written)
        own = getattr(network_factory, "keywords", {})
        described["network_factory_kwargs"] = {
            name: _named(name, value)
            for name, value in described["network_factory_kwargs"].items()
            if name not in own and not (name.endswith("_init_fn") and value is None)
        }
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "config.json")
            file.write_text(json.dumps(described))
            config = saved.checkpoint.load_config(file)
        normalize = theirs.running_statistics.normalize if config.normalize_observations else lambda obs, _: obs
        network = (network_factory or theirs.make_ppo_networks)(
            _shapes(described["observation_size"]),
            config.action_size,
            preprocess_observations_fn=normalize,
            **config.network_factory_kwargs,
        )
        params = saved.load(path)
    return theirs.networks.make_inference_fn(network)(params, deterministic=deterministic)


_BY_NAME = ("cnn_activation", "cnn_kernel_init_fn", "output_kernel_init_fn")
"""Functions that Brax's factory for pixels takes by name too, but that Brax does not write so."""


def _registered(name: str) -> Mapping[str, Any]:
    """The functions that Brax has names for, of the kind of an argument."""
    known = theirs.all_networks
    return known.ACTIVATION if name.endswith("activation") else known.KERNEL_INITIALIZER


def _named(name: str, value: Any) -> Any:
    """The argument, a function by its name however Brax wrote it."""
    if name not in _BY_NAME:
        return value
    called = value.get("__name__", "") if isinstance(value, dict) else str(value).removeprefix("function ")
    if called not in _registered(name):
        raise InputError(
            f"The checkpoint has {name} written as {str(value)[:80]!r}, which is none of Brax's names; give it with "
            f"the factory, functools.partial(make_ppo_networks_vision, {name}=...)."
        )
    return called


def _shapes(written: Any) -> Any:
    """The shape of observations, or those of a mapping, however they were written."""
    if isinstance(written, dict):
        return tuple(written["shape"]) if "shape" in written else {name: _shapes(one) for name, one in written.items()}
    return tuple(written) if isinstance(written, list) else written
