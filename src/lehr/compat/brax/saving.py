"""Brax's checkpoints, and next to each what Brax does not save: optimiser, clock, keys and environments.

<save_checkpoint_path>/000000409600/...         Brax's files
                                    lehr/...    Lehr's, which Brax ignores: plain arrays and JSON
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

from lehr.compat.brax import upstream
from lehr.compat.brax.batch_environments import BatchEnvironments
from lehr.compat.brax.epoch import BraxParams, CarriedState
from lehr.compat.brax.loss import NetworkParams
from lehr.compat.brax.random_keys import HostKeys
from lehr.envs.suites.foreign import by_their_rules
from lehr.errors import InputError
from lehr.training import checkpoint
from lehr.types import PyTree

FOLDER = "lehr"
MOST_BYTES = 2**28
"""Larger environment states are not saved: their episodes restart when training resumes, as in Brax."""

log = logging.getLogger("absl")
"""Brax's logger."""


@dataclass(frozen=True)
class Origin:
    """The training of a checkpoint: seed and environments, which decide what can be continued from it."""

    seed: int
    steps_per_update: int
    """Env steps of one training step."""
    limits: Mapping[str, Any] | None = None
    """The options of the environments' wrapper."""
    names: tuple[str, ...] = ()
    """The arrays of the environments' state."""
    beginnings: tuple[tuple[float, float], ...] = ()
    """The mean and the mean absolute value of each array after a reset with a fixed key."""

    def of(
        self, environments: BatchEnvironments, begun: tuple[jax.Array, ...], limits: Mapping[str, int | None]
    ) -> "Origin":
        """A copy that describes these environments, whose state is `begun`, and the options of their wrapper."""
        plain = {name: None if limit is None else int(limit) for name, limit in limits.items()}
        arrays: tuple[jax.Array, ...] = ()
        if are_small(begun):
            arrays = environments.begin(jax.random.split(jax.random.PRNGKey(0), environments.num_envs))
        return replace(self, limits=plain, names=environments.step.names, beginnings=tuple(map(_summary, arrays)))

    def describe(self, step: int) -> dict[str, Any]:
        """What is written to a checkpoint's JSON file."""
        beginnings = [list(one) for one in self.beginnings]
        return {"env_steps": step, **vars(self), "names": list(self.names), "beginnings": beginnings}

    def has_environments_of(self, meta: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this description has the same environments, as far as can be told."""
        if any(meta.get(name) != self.describe(0)[name] for name in ("steps_per_update", "limits", "names")):
            return False
        there, here = (np.asarray(one, float).reshape(-1, 2) for one in (meta["beginnings"], self.beginnings))
        if there.shape != here.shape:
            return False
        allowed = 1e-6 + 1e-4 * here[:, 1:]  # relative to their size: the mean may be close to 0
        return bool(np.all((np.abs(there - here) <= allowed) | (np.isnan(there) & np.isnan(here)) | (there == here)))


def are_small(environments: tuple[jax.Array, ...]) -> bool:
    """Whether the environments are small enough to be saved."""
    return sum(array.nbytes for array in environments) <= MOST_BYTES


def _summary(array: jax.Array) -> tuple[float, float]:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    values = np.asarray(array).astype(np.float64)
    return (float(values.mean()), float(np.abs(values).mean())) if values.size else (0.0, 0.0)


def save(
    path: Any, config: Any, origin: Origin, step: int, params: BraxParams, carried: CarriedState, keys: HostKeys
) -> None:
    """Write Brax's checkpoint, and Lehr's next to it.

    Args:
        path: the directory of all checkpoints of a training.
        config: Brax's description of the network, see `network_config`.
        origin: what the checkpoint belongs to.
        step: env steps so far.
        params: what Brax saves.
        carried: what Brax does not save.
        keys: the keys of the host.
    """
    upstream.checkpoint().save(path, step, params.as_tuple, config)
    if "://" in str(path):
        return  # a bucket; Lehr writes to file systems only
    beside = Path(path) / f"{step:012d}" / FOLDER
    meta = origin.describe(step)
    checkpoint.save(beside / "learner", _learner(carried, keys), step, meta, keep=1)
    if are_small(carried.environments):
        checkpoint.save(beside / "environments", (carried.environments, keys), step, meta, keep=1)


def load(path: Any, mode: int) -> Any:
    """Load the parameters of a checkpoint, with its running statistics converted to this mode; see `in_mode`."""
    params = upstream.checkpoint().load(path)
    return [in_mode(params[0], mode), *params[1:]]


def in_mode(normalizer: Any, mode: int) -> Any:
    """Convert running statistics to this mode.

    Files do not say which mode wrote them, but the numbers tell: "ema" keeps the variance, "welford" its sum.
    """
    count = normalizer.count
    if hasattr(count, "hi"):
        count = float(count.hi) * 2.0**32 + float(count.lo)
    count = max(float(count), 1.0)

    def misfit(share: float) -> float:
        """The distance between `std` and √(share · summed_variance)."""
        expected = jax.tree.map(
            lambda x: np.sqrt(np.maximum(np.asarray(x, float), 0) * share + normalizer.std_eps).clip(1e-6, 1e6),
            normalizer.summed_variance,
        )
        errors = jax.tree.map(lambda x, std: np.sum(np.abs(np.log(x / std))), expected, normalizer.std)
        return float(sum(jax.tree.leaves(errors)))

    welford, ema = upstream.running_statistics.NormalizationMode
    found = ema if misfit(1.0) < misfit(1 / count) else welford
    factor = 1.0 if found == mode else count if mode == welford else 1 / count
    converted = jax.tree.map(lambda x: (x * factor).astype(x.dtype), normalizer.summed_variance)
    return normalizer.replace(summed_variance=converted, mode=mode)


def restore(path: Any, origin: Origin, carried: CarriedState, keys: HostKeys) -> tuple[CarriedState, HostKeys, int]:
    """Replace the initial state and keys by those saved next to a checkpoint; the third result is env steps so far.

    A checkpoint written by Brax has none, so nothing is replaced. With another seed, the keys are not replaced either;
    then, and if the environments or their number differ, episodes restart.
    """
    beside = Path(path) / FOLDER
    if not (beside / "learner").is_dir():
        return carried, keys, 0
    (optimiser, rate, host_key), meta, _ = checkpoint.newest(beside / "learner", _learner(carried, keys))
    if not float(rate):
        rate = carried.rate  # the learning rate was not adaptive before
    updates = meta["env_steps"] // origin.steps_per_update
    environments = carried.environments
    if meta.get("seed") == origin.seed:
        keys = {**keys, "host": host_key}
        if origin.has_environments_of(meta) and (beside / "environments").is_dir():
            with contextlib.suppress(InputError):
                (environments, keys), _, _ = checkpoint.newest(beside / "environments", (environments, keys))
    if environments is carried.environments:
        log.info("%s has no environments for this training (or another seed): episodes restart.", path)
    updates_now = carried.updates.at[...].set(updates)
    return CarriedState(optimiser, rate, updates_now, environments), keys, updates * origin.steps_per_update


def _learner(carried: CarriedState, keys: HostKeys) -> PyTree:
    return carried.optimiser, carried.rate, keys["host"]


@dataclass(frozen=True)
class RestoreOptions:
    """Brax's arguments about what a training starts from."""

    path: Any
    """The `restore_checkpoint_path`."""
    params: Any
    """The `restore_params`."""
    with_value: bool
    """The `restore_value_fn`."""

    @property
    def resumes(self) -> bool:
        """Whether everything is restored, optimiser and clock included, and not only parameters."""
        return self.path is not None and self.params is None and self.with_value

    def apply(self, initial: BraxParams) -> BraxParams:
        """The parameters to start with."""
        if self.path is not None:
            initial = replaced(initial, load(self.path, initial.normalizer.mode), self.with_value)
        return initial if self.params is None else replaced(initial, self.params, self.with_value)


def replaced(initial: BraxParams, params: Any, restore_value_fn: bool) -> BraxParams:
    """Replace the initial parameters by loaded ones, the critic's only on request."""
    normalizer = params[0]
    if isinstance(normalizer, upstream.running_statistics.RunningStatisticsState):
        normalizer = in_mode(normalizer, normalizer.mode)  # Brax reads every file as "welford"
    return BraxParams(NetworkParams(params[1], params[2] if restore_value_fn else initial.networks.value), normalizer)


def network_config(observation_size: Any, action_size: int, normalize_observations: bool, factory: Any) -> Any:
    """Brax's description of the network, in a form that Brax's `load_policy` can read.

    That function cannot read an initialiser that is `None`, so such entries are left out. Functions of pixel networks
    are written by name, which Brax's factory accepts but Brax does not do.
    """
    config = upstream.checkpoint().network_config(observation_size, action_size, normalize_observations, factory)
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
    """Load the policy of a checkpoint, Lehr's or Brax's.

    Unlike Brax's own `load_policy`, this one reads everything that Brax's training saves: initialisers that are `None`,
    the functions of pixel networks, and observation shapes with dtypes.
    """
    upstream.check()
    with by_their_rules():
        saved = upstream.checkpoint()
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
        network = (network_factory or upstream.make_ppo_networks)(
            _shapes(described["observation_size"]),
            config.action_size,
            preprocess_observations_fn=upstream.normalizer(config.normalize_observations),
            **config.network_factory_kwargs,
        )
        params = saved.load(path)
    return upstream.networks.make_inference_fn(network)(params, deterministic=deterministic)


_BY_NAME = ("cnn_activation", "cnn_kernel_init_fn", "output_kernel_init_fn")
"""Functions that Brax's factory for pixel networks also accepts by name, though Brax does not save them so."""


def _registered(name: str) -> Mapping[str, Any]:
    """The functions that this argument can be, by Brax's names."""
    known = upstream.all_networks
    return known.ACTIVATION if name.endswith("activation") else known.KERNEL_INITIALIZER


def _named(name: str, value: Any) -> Any:
    """The value of an argument as saved; if it is a function, its name."""
    if name not in _BY_NAME:
        return value
    called = value.get("__name__", "") if isinstance(value, dict) else str(value).removeprefix("function ")
    if called not in _registered(name):
        raise InputError(
            f"{name} is {str(value)[:80]!r} in the checkpoint, which is not one of Brax's names; pass it with the "
            f"factory, functools.partial(make_ppo_networks_vision, {name}=...)."
        )
    return called


def _shapes(written: Any) -> Any:
    """The shapes of observations, in any of the forms that Brax saves."""
    if isinstance(written, dict):
        return tuple(written["shape"]) if "shape" in written else {name: _shapes(one) for name, one in written.items()}
    return tuple(written) if isinstance(written, list) else written
