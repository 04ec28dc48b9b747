"""A training under way: the host loop around compiled epochs, and where its arrays are placed."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from lehr.compat.brax.epoch import Carried, Learned, Program
from lehr.compat.brax.saving import Keys, log
from lehr.envs.suites.foreign import by_their_rules
from lehr.schedules.bundle import Coefficients
from lehr.training.sharding import EnvironmentSharding
from lehr.types import Key


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
        sharding: EnvironmentSharding,
    ) -> None:
        self.program, self.coefficients, self.begin = program, coefficients, begin
        self.learned, self.carried, self.keys = learned, carried, keys
        self.step = step
        """Env steps so far."""
        self.seconds = 0.0
        """Of training so far, compilation included."""
        # The environments and the optimiser are written over; users may hold the parameters.
        self.epoch = jax.jit(program.epoch, donate_argnums=2, out_shardings=_out_shardings(sharding, carried))

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


def _out_shardings(sharding: EnvironmentSharding, carried: Carried) -> Any:
    """Place the results of an epoch like its arguments, so that the next epoch runs the same program."""
    copied = sharding.replicated
    if copied is None:
        return None
    return copied, Carried(copied, copied, copied, sharding.of(carried.environments)), copied
