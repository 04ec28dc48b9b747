"""Brax's checkpoints, and beside each what Brax does not keep: optimiser, clock, keys and environments.

<save_checkpoint_path>/000000409600/...         Brax's files
                                    lehr/...    Lehr's, which Brax does not look at: plain arrays and JSON
"""

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lehr import checkpoint
from lehr.compat.brax import theirs
from lehr.compat.brax.loss import Networks
from lehr.compat.brax.program import Carried, Learned
from lehr.envs.optional import by_their_rules
from lehr.errors import InputError
from lehr.types import Key, PyTree

FOLDER = "lehr"
MOST_BYTES = 2**28
"""Environments that take more than this are not saved: they begin anew when training goes on, as with Brax."""

Keys = dict[str, Key]


def save(
    path: Any, config: Any, steps_per_update: int, step: int, learned: Learned, carried: Carried, keys: Keys
) -> None:
    """Write Brax's checkpoint and Lehr's beside it.

    Args:
        path: of all checkpoints of a training.
        config: Brax's description of the network, see `network_config`.
        steps_per_update: env steps of a training step.
        step: env steps so far.
        learned: what Brax saves.
        carried: what it does not.
        keys: where the randomness of the host stands.
    """
    theirs.checkpoint().save(path, step, learned.for_users, config)
    if "://" in str(path):
        return  # a bucket: Lehr writes files
    beside = Path(path) / f"{step:012d}" / FOLDER
    meta = {"env_steps": step, "steps_per_update": steps_per_update}
    checkpoint.save(beside / "learner", _learner(carried, keys), step, meta, keep=1)
    if sum(leaf.nbytes for leaf in carried.environments) <= MOST_BYTES:
        checkpoint.save(beside / "environments", (carried.environments, keys), step, meta, keep=1)


def load(path: Any) -> Any:
    """The parameters in a checkpoint, Brax's or Lehr's."""
    return theirs.checkpoint().load(path)


def restore(path: Any, carried: Carried, keys: Keys, steps_per_update: int) -> tuple[Carried, Keys, int]:
    """What Lehr wrote beside a checkpoint, in place of what training begins with, and the env steps so far.

    From a checkpoint of Brax's own nothing is there to restore. Environments that do not fit, because there are more of
    them now for example, begin anew.
    """
    beside = Path(path) / FOLDER
    if not (beside / "learner").is_dir():
        return carried, keys, 0
    (optimiser, rate, host_key), meta, _ = checkpoint.newest(beside / "learner", _learner(carried, keys))
    keys = {**keys, "host": host_key}
    if not float(rate):
        rate = carried.rate  # it did not adapt before
    updates = meta["env_steps"] // steps_per_update
    environments = carried.environments
    if meta["steps_per_update"] == steps_per_update and (beside / "environments").is_dir():
        with contextlib.suppress(InputError):
            (environments, keys), _, _ = checkpoint.newest(beside / "environments", (environments, keys))
    updates_now = carried.updates.at[...].set(updates)
    return Carried(optimiser, rate, updates_now, environments), keys, updates * steps_per_update


def _learner(carried: Carried, keys: Keys) -> PyTree:
    return carried.optimiser, carried.rate, keys["host"]


def replaced(initial: Learned, params: Any, restore_value_fn: bool) -> Learned:
    """Parameters from a checkpoint or a training in the place of the initial ones; those of the critic if wanted."""
    normalizer = params[0]
    if hasattr(normalizer, "mode"):
        normalizer = normalizer.replace(mode=initial.normalizer.mode)  # files do not say it
    return Learned(Networks(params[1], params[2] if restore_value_fn else initial.params.value), normalizer)


def network_config(observation_size: Any, action_size: int, normalize_observations: bool, factory: Any) -> Any:
    """Brax's description of the network, such that Brax's own `load_policy` can read it back.

    It does not read an initialiser that is `None`, which is the default of one: such entries are left out.
    """
    config = theirs.checkpoint().network_config(observation_size, action_size, normalize_observations, factory)
    arguments = config.network_factory_kwargs
    for name in [name for name, value in arguments.items() if _is_unset(name, value)]:
        del arguments[name]
    return config


def load_policy(path: Any, network_factory: Callable[..., Any] | None = None, deterministic: bool = True) -> Any:
    """The policy of a checkpoint, Lehr's or Brax's, as Brax's own `load_policy` gives it.

    That one does not read all that Brax's training saves: initialisers may be `None`, and the shape of observations
    stands there together with their type. Here both are understood.
    """
    theirs.check()
    with by_their_rules():
        described = json.loads((Path(path) / "ppo_network_config.json").read_text())
        arguments = described["network_factory_kwargs"]
        described["network_factory_kwargs"] = {
            name: value for name, value in arguments.items() if not _is_unset(name, value)
        }
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(described, file)
            file.flush()
            config = theirs.checkpoint().checkpoint.load_config(file.name)
        normalize = theirs.running_statistics.normalize if config.normalize_observations else lambda obs, _: obs
        network = (network_factory or theirs.make_ppo_networks)(
            _shapes(described["observation_size"]),
            config.action_size,
            preprocess_observations_fn=normalize,
            **config.network_factory_kwargs,
        )
        params = theirs.checkpoint().load(path)
    return theirs.networks.make_inference_fn(network)(params, deterministic=deterministic)


def _is_unset(name: str, value: Any) -> bool:
    """Whether it is an initialiser that was not given: Brax writes `None` for it and cannot read that."""
    return name.endswith("_init_fn") and value is None


def _shapes(written: Any) -> Any:
    """The shape of observations, or those of a mapping, however they were written."""
    if isinstance(written, dict):
        return tuple(written["shape"]) if "shape" in written else {name: _shapes(one) for name, one in written.items()}
    return tuple(written) if isinstance(written, list) else written
