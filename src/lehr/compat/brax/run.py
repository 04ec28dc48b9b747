"""A training under way: the host loop around compiled epochs, and the devices that it runs on."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from lehr.compat.brax.epoch import Carried, Learned, Program
from lehr.compat.brax.saving import Keys, log
from lehr.envs.suites.foreign import by_their_rules
from lehr.errors import InputError
from lehr.schedules.bundle import Coefficients
from lehr.types import Key, PyTree


class Callbacks(NamedTuple):
    """What is called between epochs."""

    progress: Callable[[int, dict[str, Any]], None]
    """With env steps and metrics."""
    params: Callable[["Run"], None]
    """When there are new parameters."""
    save: Callable[..., None] | None
    """To write a checkpoint, if any are."""


class Run:
    """A training under way."""

    def __init__(
        self,
        program: Program,
        coefficients: Coefficients,
        begin: Callable[[Key], tuple[jax.Array, ...]],
        learned: Learned,
        carried: Carried,
        keys: Keys,
        step: int,
        place: "Place",
    ) -> None:
        self.program, self.coefficients, self.begin = program, coefficients, begin
        self.learned, self.carried, self.keys = learned, carried, keys
        self.step = step
        """Env steps so far."""
        self.seconds = 0.0
        """Of training so far, compilation included."""
        # The environments and the optimiser are written over; users may hold the parameters.
        self.epoch = jax.jit(program.epoch, donate_argnums=2, out_shardings=place.of_epochs(carried.environments))

    def loop(self, callbacks: Callbacks, evaluator: Any, num_evals: int, num_resets_per_eval: int) -> dict[str, Any]:
        """Train and evaluate until the budget is spent; the last metrics."""
        metrics: dict[str, Any] = {}
        if num_evals > 1 and evaluator is not None:
            metrics = self.evaluate(evaluator, {})
            callbacks.progress(self.step, metrics)
        callbacks.params(self)
        for _ in range(max(num_evals - 1, 1)):
            for _ in range(max(num_resets_per_eval, 1)):
                trained = self.advance()
                if num_resets_per_eval > 0:
                    self.reset()
            callbacks.params(self)
            if callbacks.save is not None:
                with by_their_rules():
                    callbacks.save(self.step, self.learned, self.carried, self.keys)
            if num_evals > 0:
                metrics = trained if evaluator is None else self.evaluate(evaluator, trained)
                callbacks.progress(self.step, metrics)
        return metrics

    def advance(self) -> dict[str, Any]:
        """Train for an epoch; its metrics."""
        begin = time.perf_counter()
        with by_their_rules():
            epoch_key, self.keys["host"] = jax.random.split(self.keys["host"])
            self.learned, self.carried, metrics = self.epoch(
                self.coefficients, self.learned, self.carried, jax.random.split(epoch_key, 1)[0]
            )
            jax.block_until_ready(metrics)
        if self.program.report is not None:
            jax.effects_barrier()  # what was reported is told before what is evaluated
        seconds = time.perf_counter() - begin
        steps = self.program.training_steps * self.program.steps_per_update
        self.seconds += seconds
        self.step += steps
        measured = {f"training/{name}": value for name, value in sorted(metrics.items())}
        return {"training/sps": steps / seconds, "training/walltime": self.seconds, **measured}

    def evaluate(self, evaluator: Any, trained: dict[str, Any]) -> dict[str, Any]:
        """The metrics of Brax's evaluator, with those of training among them."""
        with by_their_rules():
            metrics = evaluator.run_evaluation(self.learned.for_users, trained)
        log.info("%s", metrics)
        return metrics

    def reset(self) -> None:
        """Begin all episodes anew."""
        with by_their_rules():
            self.keys["environments"] = jax.random.split(self.keys["environments"][0], self.program.num_envs)
            self.carried = self.carried._replace(environments=self.begin(self.keys["environments"]))


class Place(NamedTuple):
    """The devices that share the environments."""

    num_envs: int
    over_envs: Any
    """How an array of environments is split; `None` on one device."""
    whole: Any
    """How what all devices have is placed."""

    @classmethod
    def of(cls, num_envs: int, most: int | None) -> "Place":
        """As many devices as there are, `most` at the most."""
        if jax.process_count() > 1:
            raise InputError(
                f"This is one of {jax.process_count()} processes, but lehr.compat.brax.train works in one; start it in "
                "one process, with all devices of one machine."
            )
        devices = jax.local_devices()
        devices = devices[: min(len(devices), most or len(devices))]
        if len(devices) == 1:
            return cls(num_envs, None, None)
        if num_envs % len(devices):
            raise InputError(
                f"num_envs is {num_envs}, which {len(devices)} devices cannot share; choose a multiple, or set "
                "max_devices_per_host."
            )
        mesh = jax.sharding.Mesh(np.array(devices), ("envs",))
        parts = jax.sharding.PartitionSpec
        split, whole = (jax.sharding.NamedSharding(mesh, part) for part in (parts("envs"), parts()))
        return cls(num_envs, split, whole)

    def of_environments(self, environments: PyTree) -> Any:
        """Where arrays of environments lie; one that is not of each of them, a counter for example, is everywhere."""
        if self.whole is None:
            return None
        return jax.tree.map(lambda x: self.over_envs if x.shape[:1] == (self.num_envs,) else self.whole, environments)

    def of_epochs(self, environments: PyTree) -> Any:
        """Where the results of an epoch lie: where its arguments did, so that the next one is the same program."""
        if self.whole is None:
            return None
        carried = Carried(self.whole, self.whole, self.whole, self.of_environments(environments))
        return self.whole, carried, self.whole

    def replicated(self, tree: PyTree) -> PyTree:
        """The same on all devices."""
        return tree if self.whole is None else jax.device_put(tree, self.whole)
