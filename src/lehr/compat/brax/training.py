"""`train`, with the arguments of `brax.training.agents.ppo.train.train`."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lehr.compat.brax import saving, upstream
from lehr.compat.brax.arguments import adaptive_rate, check_arguments, devices, network_maker
from lehr.compat.brax.batch_environments import BatchEnvironments, Wrapping
from lehr.compat.brax.coefficients import annealed, bound_coefficients
from lehr.compat.brax.epoch import BraxParams, BraxPPO, CarriedState
from lehr.compat.brax.loss import LossSettings, NetworkParams
from lehr.compat.brax.pixels import without_pixels
from lehr.compat.brax.random_keys import SeedKeys, seed_keys
from lehr.compat.brax.run import BraxRun, Callbacks
from lehr.compat.brax.segments import TrainingSizes
from lehr.envs.suites.foreign import by_their_rules, settled
from lehr.training.compilation_cache import use_compilation_cache
from lehr.training.sharding import EnvironmentSharding
from lehr.types import Key, PyTree


def train(
    environment: Any,
    num_timesteps: int,
    max_devices_per_host: int | None = None,
    # high-level control flow
    wrap_env: bool = True,
    vision: bool = False,
    augment_pixels: bool = False,
    # environment wrapper
    num_envs: int = 1,
    episode_length: int | None = None,
    action_repeat: int = 1,
    wrap_env_fn: Callable[[Any], Any] | None = None,
    randomization_fn: Callable[..., Any] | None = None,
    # ppo params
    learning_rate: Any = 1e-4,
    entropy_cost: Any = 1e-4,
    discounting: Any = 0.9,
    unroll_length: int = 10,
    batch_size: int = 32,
    num_minibatches: int = 16,
    num_updates_per_batch: int = 2,
    num_resets_per_eval: int = 0,
    normalize_observations: bool = False,
    normalize_observations_std_eps: float = 0.0,
    normalize_observations_mode: str = "welford",
    normalize_until_count: int | None = None,
    reward_scaling: Any = 1.0,
    clipping_epsilon: Any = 0.3,
    clipping_epsilon_value: float | None = None,
    gae_lambda: Any = 0.95,
    max_grad_norm: float | None = None,
    normalize_advantage: bool = True,
    vf_loss_coefficient: Any = 0.5,
    bootstrap_on_timeout: bool = False,
    use_distributional_critic: bool = False,
    desired_kl: float = 0.01,
    learning_rate_schedule: Any = None,
    learning_rate_schedule_min_lr: float = 1e-5,
    learning_rate_schedule_max_lr: float = 1e-2,
    network_factory: Any = upstream.make_ppo_networks,
    seed: int = 0,
    use_pmap_on_reset: bool = True,
    # eval
    num_evals: int = 1,
    eval_env: Any = None,
    num_eval_envs: int = 128,
    deterministic_eval: bool = False,
    # training metrics
    log_training_metrics: bool = False,
    training_metrics_steps: int | None = None,
    # callbacks
    progress_fn: Callable[[int, dict[str, Any]], None] = lambda *args: None,
    policy_params_fn: Callable[..., None] = lambda *args: None,
    # checkpointing
    save_checkpoint_path: str | None = None,
    restore_checkpoint_path: str | None = None,
    restore_params: Any = None,
    restore_value_fn: bool = True,
    run_evals: bool = True,
    # what Brax does not have
    entropy_cost_end: float | None = None,
    entropy_schedule: str = "linear",
) -> tuple[Callable[..., Any], tuple[PyTree, PyTree, PyTree], dict[str, Any]]:
    """Train with Brax's PPO. Arguments, defaults and results are Brax's, except as described here.

    `learning_rate`, `entropy_cost`, `discounting`, `reward_scaling`, `clipping_epsilon`, `gae_lambda` and
    `vf_loss_coefficient` take a number or anything else that `lehr.schedule` takes: a text such as
    "0.01 -> 0.001 cosine", a mapping, a `Schedule`, a function of env steps. Their clock is the env steps collected
    before the training step, action repeats included, and their budget is `num_timesteps`. The last applied values are
    logged as `training/<name>`. Compiled programs are cached on disk, as by `lehr.train`; `LEHR_CACHE=off` turns this
    off.

    Args:
        environment: see Brax, as for every argument not listed here.
        num_timesteps: env steps to train for, on top of those of a checkpoint that has a clock.
        max_devices_per_host: how many devices share the environments; all by default.
        network_factory: as in Brax, or a mapping with the options of Brax's `make_ppo_networks` (with `vision`, of
            `make_ppo_networks_vision`), as in Playground's configs.
        use_pmap_on_reset: has no effect: `pmap` is not used.
        restore_checkpoint_path: a checkpoint of Brax or Lehr. If it has Lehr's files and everything is restored,
            training resumes where it stopped: optimiser, clock, keys and environments.
        entropy_cost_end: the value that the entropy cost reaches at the end of the budget; `None` keeps it constant.
        entropy_schedule: the shape of its schedule, "linear" or "cosine".

    Returns:
        A function that makes a policy from parameters; the parameters (normalizer, policy, value); the last metrics.
    """
    upstream.check()
    # --- arguments
    sizes = TrainingSizes.of(num_envs, unroll_length, batch_size, num_minibatches, num_updates_per_batch, action_repeat)
    loss = LossSettings(normalize_advantage, clipping_epsilon_value, use_distributional_critic)
    check_arguments(vision, action_repeat, wrap_env, episode_length, loss)
    rate_limits = learning_rate_schedule_min_lr, learning_rate_schedule_max_lr
    adaptive = adaptive_rate(learning_rate, learning_rate_schedule, desired_kl, *rate_limits)
    given = {
        "learning_rate": learning_rate,
        "entropy_cost": annealed(entropy_cost, entropy_cost_end, entropy_schedule),
        "discounting": discounting,
        "reward_scaling": reward_scaling,
        "clipping_epsilon": clipping_epsilon,
        "gae_lambda": gae_lambda,
        "vf_loss_coefficient": vf_loss_coefficient,
    }
    bound_coefficients(given, max(num_timesteps, 1))  # raises for mistakes; bound again once the clock is known
    make_network = network_maker(network_factory, vision)
    use_compilation_cache()
    sharding = EnvironmentSharding.over(devices(max_devices_per_host), num_envs, "max_devices_per_host")
    wrapping = Wrapping(wrap_env, wrap_env_fn, episode_length, action_repeat, randomization_fn)
    restoring = saving.RestoreOptions(restore_checkpoint_path, restore_params, restore_value_fn)

    with by_their_rules():
        # --- keys
        seeded = seed_keys(seed)
        keys = {"host": seeded.host, "environments": jax.random.split(seeded.environments, num_envs)}

        # --- environments
        env = wrapping.wrap(environment, num_envs, seeded.environments)
        name, reports = type(environment).__name__, log_training_metrics
        environments = BatchEnvironments.of(name, env, keys["environments"], sharding, bootstrap_on_timeout, reports)

        # --- networks
        network = _network(make_network, environments, normalize_observations)
        make_policy = _policy_maker(network, loss, bootstrap_on_timeout)

        # --- program
        interval = training_metrics_steps or sizes.steps_per_update
        reporter = upstream.logger.EpisodeMetricsLogger(steps_between_logging=interval, progress_fn=progress_fn)
        epochs = max(num_evals - 1, 1) * max(num_resets_per_eval, 1)
        ppo = BraxPPO(
            environments=environments.step,
            network=network,
            make_policy=make_policy,
            loss=loss,
            sizes=sizes,
            training_steps=math.ceil(num_timesteps / (epochs * sizes.steps_per_update)),
            max_grad_norm=max_grad_norm,
            normalize_until_count=normalize_until_count,
            bootstrap_on_timeout=bootstrap_on_timeout,
            augment_pixels=augment_pixels,
            adaptive=adaptive,
            report=reporter.update_episode_metrics if log_training_metrics else None,
        )

        # --- initial state
        statistics = _initial_statistics(environments.obs, normalize_observations_std_eps, normalize_observations_mode)
        params = sharding.replicate(settled(restoring.apply(_initial_params(network, statistics, seeded))))
        if num_timesteps == 0:
            return make_policy, params.as_tuple, {}
        carried = _initial_state(ppo, params, learning_rate, environments.begin(keys["environments"]), sharding)
        step, origin = 0, saving.Origin(int(seed), int(sizes.steps_per_update))
        if save_checkpoint_path is not None or restore_checkpoint_path is not None:
            origin = origin.of(environments, carried.environments, wrapping.limits)
        if restoring.resumes:
            carried, keys, step = saving.restore(restore_checkpoint_path, origin, carried, keys)
            reporter._num_steps = reporter._last_log_steps = step // action_repeat

        # --- evaluation and checkpoints
        act = functools.partial(make_policy, deterministic=deterministic_eval)
        evaluated = eval_env or environment
        evaluator = _evaluator(wrapping, evaluated, act, num_eval_envs, seeded.evaluation) if run_evals else None
        save = _saver(save_checkpoint_path, origin, make_network, environments, normalize_observations)

    # --- training
    bound = bound_coefficients(given, step + num_timesteps)
    run = BraxRun(ppo, bound, environments.begin, params, carried, keys, step, sharding)
    callbacks = Callbacks(progress_fn, lambda step, params: policy_params_fn(step, make_policy, params), save)
    metrics = run.loop(callbacks, evaluator, num_evals, num_resets_per_eval)
    return make_policy, run.params.as_tuple, metrics


def _network(factory: Callable[..., Any], environments: BatchEnvironments, normalize_observations: bool) -> Any:
    """Brax's `PPONetworks` for these environments."""
    normalize = upstream.normalizer(normalize_observations)
    return factory(environments.obs_shape, environments.action_size, preprocess_observations_fn=normalize)


def _policy_maker(network: Any, loss: LossSettings, bootstraps: bool) -> Callable[..., Any]:
    """Brax's function that makes a policy from parameters; the policy returns values too if training needs them."""
    needs_value = bootstraps or loss.clipping_epsilon_value is not None
    return upstream.networks.make_inference_fn(network, needs_value, loss.use_distributional_critic)


def _evaluator(wrapping: Wrapping, env: Any, make_policy: Callable[..., Any], count: int, key: Key) -> Any:
    """Brax's evaluator, with `count` environments of its own."""
    limits = wrapping.episode_length, wrapping.action_repeat
    return upstream.acting.Evaluator(wrapping.wrap(env, count, key), make_policy, count, *limits, key=key)


def _saver(
    path: str | None,
    origin: saving.Origin,
    factory: Callable[..., Any],
    environments: BatchEnvironments,
    normalize_observations: bool,
) -> Callable[..., None] | None:
    """The function that writes checkpoints, or `None` without a path."""
    if path is None:
        return None
    shapes = environments.obs_shape, environments.action_size
    config = saving.network_config(*shapes, normalize_observations, factory)
    return functools.partial(saving.save, path, config, origin)


def _initial_statistics(obs: PyTree, std_eps: float, mode: str) -> PyTree:
    """Brax's running statistics before the first observation."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[-1:], jnp.float32), without_pixels(obs))
    return upstream.running_statistics.init_state(shapes, std_eps=std_eps, mode=mode)


def _initial_params(network: Any, statistics: PyTree, keys: SeedKeys) -> BraxParams:
    policy, value = network.policy_network.init(keys.policy), network.value_network.init(keys.value)
    return BraxParams(NetworkParams(policy, value), statistics)


def _initial_state(
    ppo: BraxPPO, params: BraxParams, learning_rate: Any, begun: tuple[jax.Array, ...], sharding: EnvironmentSharding
) -> CarriedState:
    """The state before the first training step, with these environments, which are already placed."""
    return CarriedState(
        optimiser=sharding.replicate(ppo.optimiser.init(params.networks)),
        rate=sharding.replicate(jnp.float32(0 if ppo.adaptive is None else learning_rate)),
        updates=sharding.replicate(jnp.uint32(0)),
        environments=begun,
    )
