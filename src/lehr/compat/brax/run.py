"""The host loop around compiled epochs: train, reset, save, evaluate."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from lehr.compat.brax.epoch import BraxParams, BraxPPO, CarriedState
from lehr.compat.brax.random_keys import HostKeys
from lehr.compat.brax.saving import log
from lehr.envs.suites.foreign import by_their_rules
from lehr.schedules.bundle import Coefficients
from lehr.training.sharding import EnvironmentSharding
from lehr.types import Key


class Callbacks(NamedTuple):
    """Functions called between epochs."""

    progress: Callable[[int, dict[str, Any]], None]
    """Takes env steps and metrics."""
    params: Callable[[int, tuple[Any, ...]], None]
    """Takes env steps and new parameters, in Brax's order."""
    save: Callable[..., None] | None
    """Writes a checkpoint, if any are wanted."""


class BraxRun:
    """A training in progress."""

    def __init__(
        self,
        ppo: BraxPPO,
        coefficients: Coefficients,
        begin: Callable[[Key], tuple[jax.Array, ...]],
        params: BraxParams,
        carried: CarriedState,
        keys: HostKeys,
        step: int,
        sharding: EnvironmentSharding,
    ) -> None:
        self.ppo, self.coefficients, self.begin = ppo, coefficients, begin
        self.params, self.carried, self.keys = params, carried, keys
        self.step = step
        """Env steps so far."""
        self.seconds = 0.0
        """Training time so far, compilation included."""
        # Only the carried state is donated: users may hold references to the parameters.
        self.epoch = jax.jit(ppo.epoch, donate_argnums=2, out_shardings=_out_shardings(sharding, carried))

    def loop(self, callbacks: Callbacks, evaluator: Any, num_evals: int, num_resets_per_eval: int) -> dict[str, Any]:
        """Train and evaluate until the budget is spent, and return the last metrics."""
        metrics: dict[str, Any] = {}
        if num_evals > 1 and evaluator is not None:
            metrics = self.evaluate(evaluator, {})
            callbacks.progress(self.step, metrics)
        callbacks.params(self.step, self.params.as_tuple)
        for _ in range(max(num_evals - 1, 1)):
            for _ in range(max(num_resets_per_eval, 1)):
                trained = self.advance()
                if num_resets_per_eval > 0:
                    self.reset()
            callbacks.params(self.step, self.params.as_tuple)
            if callbacks.save is not None:
                with by_their_rules():
                    callbacks.save(self.step, self.params, self.carried, self.keys)
            if num_evals > 0:
                metrics = trained if evaluator is None else self.evaluate(evaluator, trained)
                callbacks.progress(self.step, metrics)
        return metrics

    def advance(self) -> dict[str, Any]:
        """Train for one epoch and return its metrics."""
        begin = time.perf_counter()
        with by_their_rules():
            epoch_key, self.keys["host"] = jax.random.split(self.keys["host"])
            first_key = jax.random.split(epoch_key, 1)[0]  # Brax splits one key per device
            self.params, self.carried, metrics = self.epoch(self.coefficients, self.params, self.carried, first_key)
            jax.block_until_ready(metrics)
        if self.ppo.report is not None:
            jax.effects_barrier()  # reports of training come before the evaluation's
        seconds = time.perf_counter() - begin
        steps = self.ppo.training_steps * self.ppo.sizes.steps_per_update
        self.seconds += seconds
        self.step += steps
        measured = {f"training/{name}": value for name, value in sorted(metrics.items())}
        return {"training/sps": steps / seconds, "training/walltime": self.seconds, **measured}

    def evaluate(self, evaluator: Any, trained: dict[str, Any]) -> dict[str, Any]:
        """Run Brax's evaluator and return its metrics together with those of training."""
        with by_their_rules():
            metrics = evaluator.run_evaluation(self.params.as_tuple, trained)
        log.info("%s", metrics)
        return metrics

    def reset(self) -> None:
        """Restart all episodes."""
        with by_their_rules():
            self.keys["environments"] = jax.random.split(self.keys["environments"][0], self.ppo.sizes.num_envs)
            self.carried = self.carried._replace(environments=self.begin(self.keys["environments"]))


def _out_shardings(sharding: EnvironmentSharding, carried: CarriedState) -> Any:
    """Place the results of an epoch like its arguments, so that the next epoch runs the same program."""
    copied: Any = sharding.replicated
    if copied is None:
        return None
    return copied, CarriedState(copied, copied, copied, sharding.of(carried.environments)), copied
