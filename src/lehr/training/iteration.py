"""One update of a run as a pure function of its state.

state ─► coefficients(clock) ─► rollout ─► rewards ─► normalise ─► learn ─► guard ─► state, metrics
"""

import jax
import jax.numpy as jnp

from lehr.acting.rollout import Collected, broken, collect, mean_reward
from lehr.envs import AutoReset
from lehr.maths import across
from lehr.maths.normalise import scale_rewards, update_statistics
from lehr.schedules import env_steps
from lehr.training.guard import checked, guarded
from lehr.training.program import Program
from lehr.types import Metrics, TrainState, derive


def iteration(program: Program, state: TrainState) -> tuple[TrainState, Metrics]:
    """Collect one rollout and learn from it."""
    return learn(program, state, next_rollout(program, state))


def next_rollout(program: Program, state: TrainState) -> Collected:
    """Collect the rollout of the next update."""
    assert isinstance(program.env, AutoReset)
    return collect(
        program.env,
        program.algorithm,
        state.acting,
        state.actor,
        state.observation_statistics,
        program.algorithm.config.horizon,
        across.own(derive(state.key, "rollout", state.updates)),
        program.needs,
        program.algorithm.config.noise_steps,
    )


def learn(program: Program, state: TrainState, collected: Collected) -> tuple[TrainState, Metrics]:
    """Run every stage of an update after its rollout."""
    algorithm, model, rollout = program.algorithm, program.reward_model, collected.rollout
    statistics, scaling = state.observation_statistics, state.reward_scaling

    # --- coefficients: at the env steps before this rollout; constant over its gradient steps
    coef = state.coefficients.values(state.controllers, env_steps(state.updates, program.steps_per_update))

    # --- rewards
    model_key = across.own(derive(state.key, "reward model", state.updates))
    judge = model.normalised(state.reward_model, statistics)
    learned_rewards, reward_metrics = model.learn(judge, rollout, coef, model_key)
    latest = learned_rewards._replace(data=judge.data) if model.learns_first else judge
    rollout = rollout._replace(reward=model.reward(latest, rollout, coef))

    # --- normalisation
    if algorithm.config.normalise_observations:
        statistics = update_statistics(statistics, collected.raw_obs, rollout.valid)
    if algorithm.config.normalise_rewards:
        scaling, reward = scale_rewards(scaling, rollout.reward, rollout.done, coef["discount"], rollout.valid)
        rollout = rollout._replace(reward=reward)
    if "reward_scale" in coef:
        rollout = rollout._replace(reward=coef["reward_scale"] * rollout.reward)

    # --- learning
    learn_key = across.own(derive(state.key, "learn", state.updates))
    learner, metrics = checked(algorithm, state.learner, algorithm.learn(state.learner, rollout, coef, learn_key))

    # --- metrics, of all devices, and the controllers that react to them
    metrics = across.mean(metrics | reward_metrics) | {"rollout/reward": mean_reward(collected.rollout)}
    metrics |= across.sum(collected.finished).metrics() | across.sum(broken(program.env, collected.rollout))
    metrics |= {f"coef/{name}": value for name, value in coef.items()}
    controllers = state.coefficients.update(state.controllers, metrics)

    # --- guard: a non-finite update is not applied
    after = guarded(
        state,
        state._replace(
            learner=learner,
            actor=collected.actor,
            observation_statistics=statistics,
            reward_scaling=scaling,
            reward_model=learned_rewards,
            controllers=controllers,
            updates=state.updates + 1,
            pending=(),
        ),
        metrics["loss/total"],
        program.most_rejected,
    )
    metrics["update/rejected"] = after.rejected.astype(jnp.float32)
    if program.lag:
        metrics["rollout/lag"] = jnp.minimum(state.updates, program.lag).astype(jnp.float32)
        behind = jax.tree.map(
            lambda kept, now: jnp.concatenate([kept[1:], now[None]]), state.behind, state.learner.params
        )
        after = after._replace(behind=behind)
    return after, metrics
