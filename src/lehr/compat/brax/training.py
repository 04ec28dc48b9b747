"""`train`, with the arguments of `brax.training.agents.ppo.train.train`."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lehr.compat.brax import saving, theirs
from lehr.compat.brax.epoch import Carried, Learned, Program, seen_of
from lehr.compat.brax.loss import LossSettings, Networks
from lehr.compat.brax.numbers import annealed, coefficients, is_number
from lehr.compat.brax.pixels import without_pixels
from lehr.compat.brax.run import Callbacks, Run
from lehr.envs.suites.foreign import by_their_rules, settled
from lehr.envs.suites.lean_step import lean_step
from lehr.errors import InputError, closest
from lehr.schedules import adaptive_kl
from lehr.training.sharding import EnvironmentSharding
from lehr.types import Key, PyTree

_RATE_SCHEDULES = ("NONE", "ADAPTIVE_KL")


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
    network_factory: Callable[..., Any] = theirs.make_ppo_networks,
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
    """Train with PPO as Brax does. Arguments, defaults and results are Brax's, but for what is said here.

    `learning_rate`, `entropy_cost`, `discounting`, `reward_scaling`, `clipping_epsilon`, `gae_lambda` and
    `vf_loss_coefficient` each take a number, or whatever else `lehr.schedule` does: a text, "0.01 -> 0.001 cosine", a
    mapping, a `Schedule`, a function of env steps. Their clock is env steps collected before the training step, action
    repeats included, and the budget is `num_timesteps`. The values that were applied last are the metrics
    `training/<name>`.

    Args:
        environment: see Brax, as for all arguments that are not listed here.
        num_timesteps: env steps to train for. After a checkpoint with a clock they come on top of its steps.
        max_devices_per_host: how many devices share the environments; all by default.
        use_pmap_on_reset: has no effect, since nothing is mapped over devices here.
        restore_checkpoint_path: a checkpoint of Brax's or Lehr's. What Lehr saves beside it, if it is there and all is
            restored, makes training go on where it stopped: optimiser, clock, keys and environments.
        entropy_cost_end: what the entropy cost goes to over the budget; `None` leaves it as it is.
        entropy_schedule: the shape of that way, "linear" or "cosine".

    Returns:
        A function that makes a policy of parameters, the parameters (normalizer, policy, value), the last metrics.
    """
    theirs.check()
    # --- what was asked for
    _check(num_envs, batch_size * num_minibatches, vision, action_repeat, wrap_env, episode_length)
    loss = LossSettings(normalize_advantage, clipping_epsilon_value, use_distributional_critic)
    _check_loss(loss)
    limits = learning_rate_schedule_min_lr, learning_rate_schedule_max_lr
    adaptive = _adaptive(learning_rate, learning_rate_schedule, desired_kl, *limits)
    given = {
        "learning_rate": learning_rate,
        "entropy_cost": annealed(entropy_cost, entropy_cost_end, entropy_schedule),
        "discounting": discounting,
        "reward_scaling": reward_scaling,
        "clipping_epsilon": clipping_epsilon,
        "gae_lambda": gae_lambda,
        "vf_loss_coefficient": vf_loss_coefficient,
    }
    coefficients(given, max(num_timesteps, 1))  # a mistake is said before anything is compiled
    sharding = EnvironmentSharding.over(_devices(max_devices_per_host), num_envs, "max_devices_per_host")
    wrap = functools.partial(_wrapped, wrap_env, wrap_env_fn, episode_length, action_repeat, randomization_fn)

    with by_their_rules():
        # --- keys, as Brax derives them
        everywhere, host_key = jax.random.split(jax.random.PRNGKey(seed))
        host_key, env_key, eval_key = jax.random.split(jax.random.fold_in(host_key, 0), 3)
        policy_key, value_key = jax.random.split(everywhere)
        keys = {"host": host_key, "environments": jax.random.split(env_key, num_envs)}

        # --- environments
        env = wrap(environment, num_envs, env_key)
        reset = jax.jit(env.reset)
        begun = reset.eval_shape(keys["environments"])
        environments = lean_step(
            type(environment).__name__,
            env.step,
            begun,
            jax.ShapeDtypeStruct((num_envs, env.action_size), jnp.float32),
            functools.partial(seen_of, bootstraps=bootstrap_on_timeout, reports=log_training_metrics),
            acted_on=lambda state: state.obs,
        )
        lies = sharding.of(jax.eval_shape(environments.kept, begun))
        begin = jax.jit(lambda keys: environments.kept(reset(keys)), out_shardings=lies)

        # --- networks
        obs_shape = jax.tree.map(lambda x: x.shape[1:], begun.obs)
        normalize = theirs.running_statistics.normalize if normalize_observations else lambda obs, _: obs
        network = network_factory(obs_shape, env.action_size, preprocess_observations_fn=normalize)
        make_policy = theirs.networks.make_inference_fn(
            network,
            compute_value=bootstrap_on_timeout or clipping_epsilon_value is not None,
            use_distributional_critic=use_distributional_critic,
        )

        # --- the program
        epochs = max(num_evals - 1, 1) * max(num_resets_per_eval, 1)
        steps_per_update = batch_size * num_minibatches * unroll_length * action_repeat
        reports = theirs.logger.EpisodeMetricsLogger(
            steps_between_logging=training_metrics_steps or steps_per_update, progress_fn=progress_fn
        )
        program = Program(
            environments=environments,
            network=network,
            make_policy=make_policy,
            loss=loss,
            num_envs=num_envs,
            unroll_length=unroll_length,
            unrolls=batch_size * num_minibatches // num_envs,
            num_minibatches=num_minibatches,
            num_updates_per_batch=num_updates_per_batch,
            action_repeat=action_repeat,
            training_steps=math.ceil(num_timesteps / (epochs * steps_per_update)),
            max_grad_norm=max_grad_norm,
            normalize_until_count=normalize_until_count,
            bootstrap_on_timeout=bootstrap_on_timeout,
            augment_pixels=augment_pixels,
            adaptive=adaptive,
            report=reports.update_episode_metrics if log_training_metrics else None,
        )

        # --- what it begins with
        learned = Learned(
            Networks(network.policy_network.init(policy_key), network.value_network.init(value_key)),
            _statistics(begun.obs, normalize_observations_std_eps, normalize_observations_mode),
        )
        if restore_checkpoint_path is not None:
            loaded = saving.load(restore_checkpoint_path, learned.normalizer.mode)
            learned = saving.replaced(learned, loaded, restore_value_fn)
        if restore_params is not None:
            learned = saving.replaced(learned, restore_params, restore_value_fn)
        learned = sharding.replicate(settled(learned))
        if num_timesteps == 0:
            return make_policy, learned.for_users, {}
        carried = Carried(
            optimiser=sharding.replicate(program.optimiser.init(learned.params)),
            rate=sharding.replicate(jnp.float32(0 if adaptive is None else learning_rate)),
            updates=sharding.replicate(jnp.uint32(0)),
            environments=begin(keys["environments"]),
        )
        step, origin = 0, saving.Origin(int(seed), int(steps_per_update))
        if save_checkpoint_path is not None or restore_checkpoint_path is not None:
            wrapped = {"episode_length": episode_length, "action_repeat": action_repeat}
            origin = origin.of(begin, carried.environments, environments.names, num_envs, wrapped)
        if restore_checkpoint_path is not None and restore_params is None and restore_value_fn:
            carried, keys, step = saving.restore(restore_checkpoint_path, origin, carried, keys)
            reports._num_steps = reports._last_log_steps = step // action_repeat  # it counts on from there

        # --- evaluation and files
        evaluator, save = None, None
        if run_evals:
            evaluated = wrap(eval_env or environment, num_eval_envs, eval_key)
            act = functools.partial(make_policy, deterministic=deterministic_eval)
            evaluator = theirs.acting.Evaluator(
                evaluated, act, num_eval_envs, episode_length, action_repeat, key=eval_key
            )
        if save_checkpoint_path is not None:
            config = saving.network_config(obs_shape, env.action_size, normalize_observations, network_factory)
            save = functools.partial(saving.save, save_checkpoint_path, config, origin)

    run = Run(program, coefficients(given, step + num_timesteps), begin, learned, carried, keys, step, sharding)
    callbacks = Callbacks(progress_fn, functools.partial(_tell, policy_params_fn, make_policy), save)
    metrics = run.loop(callbacks, evaluator, num_evals, num_resets_per_eval)
    return make_policy, run.learned.for_users, metrics


def _devices(most: int | None) -> list[Any]:
    """The devices of this process that share the environments, `most` at the most."""
    if jax.process_count() > 1:
        raise InputError(
            f"This is one of {jax.process_count()} processes, but lehr.compat.brax.train runs in a single process; "
            "start only one, with all devices of one machine."
        )
    devices = jax.local_devices()
    return devices[: most or len(devices)]


def _tell(policy_params_fn: Callable[..., None], make_policy: Any, run: Run) -> None:
    policy_params_fn(run.step, make_policy, run.learned.for_users)


def _statistics(obs: PyTree, std_eps: float, mode: str) -> PyTree:
    """Brax's statistics of observations before the first one."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[-1:], jnp.float32), without_pixels(obs))
    return theirs.running_statistics.init_state(shapes, std_eps=std_eps, mode=mode)


def _check(
    num_envs: int, segments: int, vision: bool, action_repeat: int, wrap_env: bool, episode_length: int | None
) -> None:
    if segments % num_envs:
        raise InputError(
            f"batch_size · num_minibatches is {segments}, but must be a multiple of num_envs, which is {num_envs}."
        )
    if vision and action_repeat != 1:
        raise InputError(
            f"vision is on and action_repeat is {action_repeat}, which would render frames that no one sees; let the "
            "environment repeat its physics, and set action_repeat to 1."
        )
    if wrap_env and episode_length is None:
        raise InputError("episode_length is None; say how many steps an episode may take.")


def _check_loss(settings: LossSettings) -> None:
    if settings.use_distributional_critic and settings.clipping_epsilon_value is None:
        raise InputError(
            "use_distributional_critic is on and clipping_epsilon_value is None, which the quantile Huber loss needs; "
            "set it, to 1.0 for example."
        )


def _wrapped(
    wrap_env: bool,
    wrap_env_fn: Callable[..., Any] | None,
    episode_length: int | None,
    action_repeat: int,
    randomization_fn: Callable[..., Any] | None,
    env: Any,
    count: int,
    key: Key,
) -> Any:
    """The environment as training steps it: `count` at once, with time limits and resets."""
    if not wrap_env:
        return env
    randomise = None
    if randomization_fn is not None:
        randomise = functools.partial(randomization_fn, rng=jax.random.split(key, count))
    wrap: Any = wrap_env_fn or theirs.wrappers.wrap
    return wrap(env, episode_length=episode_length, action_repeat=action_repeat, randomization_fn=randomise)


def _adaptive(learning_rate: Any, rate_schedule: Any, desired_kl: float, least: float, most: float) -> Any:
    """The controller of the learning rate, if one was asked for; Brax writes its name as a text or an enum."""
    name = str(getattr(rate_schedule, "value", rate_schedule or "NONE"))
    if name not in _RATE_SCHEDULES:
        raise InputError(f"learning_rate_schedule is {rate_schedule!r}; {closest(name, _RATE_SCHEDULES)}")
    if name == "NONE":
        return None
    if not is_number(learning_rate):
        raise InputError(
            f"learning_rate_schedule is 'ADAPTIVE_KL' and learning_rate is {learning_rate!r}, a schedule of its own; "
            "give learning_rate as a number, or remove learning_rate_schedule."
        )
    # As in Brax, a start outside the limits is only brought inside by the first step over them.
    start = min(max(float(learning_rate), least), most)
    # Brax takes any target: one of 0 always shrinks the rate, an infinite one always grows it.
    target = float(np.clip(desired_kl, np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    return adaptive_kl(start, target, minimum=least, maximum=most, metric="kl_mean")
