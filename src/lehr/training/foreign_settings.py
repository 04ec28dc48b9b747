"""Settings of a run in other libraries that mean something else, or that are no settings of Lehr."""

from collections.abc import Callable
from typing import Any

from lehr.config import Conversion, count_of


def _steps_of_updates(name: str) -> Callable[[Any, Callable[[str], Any]], dict[str, Any]]:
    """Convert a number of updates, under this name, to env steps."""

    def convert(given: Any, value: Callable[[str], Any]) -> dict[str, Any]:
        per_update = value("num_envs") * value("horizon") * value("action_repeat")
        return {"total_steps": count_of(name, given) * per_update}

    return convert


UPDATES = tuple(
    Conversion(name, _steps_of_updates(name)) for name in ("max_iterations", "num_iterations", "num_updates")
)
"""Budgets in updates."""
EVALUATIONS = tuple(
    (name, f"it counts {unit}; write evaluate_every, in env steps")
    for name, unit in (
        ("eval_freq", "calls of step, each of all environments"),
        ("evaluation_interval", "updates"),
        ("num_evals", "evaluations of the whole run"),
    )
)
"""Intervals between evaluations in other units."""


def _each(names: str, said: str) -> dict[str, str]:
    """Say the same about several names, separated by spaces or lines."""
    return dict.fromkeys(names.split(), said)


_DROP_IN = "lehr.compat.brax.train"
_FROM = (
    "'lehr resume RUN' continues a stopped run, and 'lehr train --from RUN' starts another one from its state; in "
    "Python lehr.resume(RUN) and from_run=RUN"
)
_NO_SDE = "Lehr has no state-dependent exploration noise"
_SAMPLED = "training always samples actions, and an evaluation also takes the most likely ones; drop it"

_NETWORK = {
    "policy": "the network follows from the spaces, a CNN for images and an MLP otherwise; change it with torso and "
    "hidden_sizes",
    "policy_kwargs": "pass its parts as settings: net_arch, activation_fn, log_std_init, optimiser",
    "share_features_extractor": "shared=True shares the whole torso between actor and critic",
    **_each(
        "model model_config model_config_dict",
        "pass its parts as settings: fcnet_hiddens, fcnet_activation, vf_share_layers",
    ),
    **_each(
        "actor critic",
        "pass the parts of both as settings: hidden_sizes, critic_hidden_sizes, activation",
    ),
    "network_factory": "pass hidden_sizes, critic_hidden_sizes and activation, or your own torso",
    **_each(
        "features_extractor_class features_extractor_kwargs rl_module_spec",
        "pass your own network as torso, a class or 'my_module:Name'; images get a CNN without it",
    ),
    **_each(
        "conv_filters conv_activation cnn_cfg",
        "the CNN follows from the size of the images; for another, pass your own torso",
    ),
    **_each(
        "head_fcnet_hiddens head_fcnet_activation head_fcnet_use_layernorm",
        "the heads are one linear layer each; add layers to hidden_sizes, or pass your own torso",
    ),
    **_each(
        "fusionnet_hiddens fusionnet_activation",
        "images and vectors are joined before the dense layers, which hidden_sizes and activation describe",
    ),
    "share_cnn_encoders": "write shared=True, which shares the whole torso",
    **_each(
        """ortho_init fcnet_kernel_initializer fcnet_kernel_initializer_kwargs fcnet_bias_initializer
        fcnet_bias_initializer_kwargs conv_kernel_initializer conv_kernel_initializer_kwargs conv_bias_initializer
        conv_bias_initializer_kwargs fusionnet_kernel_initializer fusionnet_kernel_initializer_kwargs
        fusionnet_bias_initializer fusionnet_bias_initializer_kwargs head_fcnet_kernel_initializer
        head_fcnet_kernel_initializer_kwargs head_fcnet_bias_initializer head_fcnet_bias_initializer_kwargs
        lstm_kernel_initializer lstm_kernel_initializer_kwargs lstm_bias_initializer lstm_bias_initializer_kwargs""",
        "layers start with orthogonal weights and biases of 0; drop it, or pass your own torso",
    ),
    "use_lstm": "train recurrent_ppo, with torso='lstm'",
    "rnn_type": "train recurrent_ppo, with torso='lstm' or torso='gru'",
    "rnn_num_layers": "there is one recurrent layer, of recurrent_size; drop it",
    "max_seq_len": "train recurrent_ppo, with window=20 for sequences of 20 steps, which must divide horizon",
    **_each(
        "lstm_use_prev_action lstm_use_prev_reward",
        "the network sees only the observation; a wrapper of the environment can add the last action and reward to it",
    ),
    "use_sde": f"{_NO_SDE}; state_dependent_std=True lets the network choose σ",
    "sde_sample_freq": f"{_NO_SDE}; noise_steps=4 keeps the noise of continuous actions for 4 steps",
    **_each("full_std use_expln", f"{_NO_SDE}; drop it"),
    "squash_output": "write distribution='tanh_normal'",
    "free_log_std": "True is what Lehr does by default; for False write state_dependent_std=True",
    **_each("noise_std_type std_type", "Lehr always learns log σ; drop it"),
    "log_std_clip_param": "the range of a log σ that depends on the state is fixed; drop it",
    "distribution_cfg": "pass its parts as settings: distribution, initial_log_std, state_dependent_std",
    "use_distributional_critic": f"PPO has no distributional critic here; {_DROP_IN} has one",
}
_LEARNING = {
    "class_name": "the algorithm comes first: lehr.train('ppo'), 'lehr train ppo'; the network follows from torso",
    "optimizer_class": "write the name of an optax optimiser, as in optimiser='adamw'",
    "use_rms_prop": "write optimiser='rmsprop'",
    "rms_prop_eps": "write optimiser='rmsprop' with optimiser_options={'eps': 1e-5}",
    "no_anneal_lr": "a number stays the same all along; write learning_rate=2.5e-4",
    "schedule": "in rsl_rl it is the learning rate's: for adaptive write "
    "learning_rate='adaptive_kl(1e-3, target=0.01)', for fixed write a number",
    "learning_rate_schedule_min_lr": "write learning_rate='adaptive_kl(3e-4, target=0.01, minimum=1e-5)'",
    "learning_rate_schedule_max_lr": "write learning_rate='adaptive_kl(3e-4, target=0.01, maximum=1e-2)'",
    "use_kl_loss": "for True write kl_coef='kl_penalty(0.2, target=0.01)', for False leave kl_coef out",
    "use_critic": "there is always a critic; drop it",
    "use_gae": "advantages are always estimated with a critic; for Monte Carlo returns write gae_lambda=1",
    "grad_clip_by": "max_grad_norm clips the global norm of the gradient, and nothing else can be clipped; drop it",
    "shuffle_batch_per_epoch": "every pass over a rollout is shuffled anew; drop it",
    "normalize_advantage_per_mini_batch": "Lehr standardises advantages in each minibatch, as for True; "
    "standardise_advantages=False turns it off",
    "sub_sampling_factor": "TRPO uses the whole rollout; drop it",
    **_each(
        "rollout_buffer_class rollout_buffer_kwargs storage sample_collector",
        "Lehr has one kind of rollout, num_envs · horizon env steps; drop it",
    ),
    "batch_mode": "a rollout is always horizon steps of each environment, as with truncate_episodes; drop it",
    **_each("explore exploration_config stochastic", _SAMPLED),
    **_each(
        "learner_class learner_config_dict differentiable_learner_configs",
        "for your own update, subclass an algorithm and pass the class to lehr.train, or 'my_module:Name'",
    ),
    "bootstrap_on_timeout": "truncated episodes always bootstrap from the value of the final observation; drop it",
    "rnd_cfg": "write reward_model='novelty', and novelty_coef for its weight",
    "symmetry_cfg": "Lehr has no symmetry loss or augmentation; make the network symmetric with your own torso",
    "augment_pixels": f"Lehr does not augment images; {_DROP_IN} does",
    **_each(
        "policies policy_map_capacity policy_mapping_fn policies_to_train policy_states_are_swappable policy_map_cache "
        "algorithm_config_overrides_per_module",
        "all agents of an environment share one policy; drop it",
    ),
    "observation_fn": "change the observations in the environment; a critic of its own sees the keys in critic_obs",
    "count_steps_by": "Lehr counts env steps; drop it",
}
_NORMALISATION = {
    "training": "statistics are always updated in training, and never in an evaluation; drop it",
    "epsilon": "write clip_range for PPO's, optimiser_options={'eps': 1e-5} for the optimiser's; that of normalisation "
    "is fixed",
    "observation_filter": "for MeanStdFilter write normalise_observations=True, for NoFilter "
    "normalise_observations=False",
    "normalize_images": "images of bytes are always divided by 255, others are used as they are; drop it",
    **_each("clip_obs clip_reward", "what is normalised is always clipped to ±10; drop it"),
    "clip_rewards": "change the rewards in the environment; normalise_rewards=True divides them by their scale",
    "norm_obs_keys": "all entries that are real numbers are normalised; drop it",
    **_each(
        "normalize_observations_mode normalize_observations_std_eps normalize_until_count",
        "normalise_observations=True uses mean and standard deviation of all steps so far; drop it",
    ),
    **_each(
        "use_worker_filter_stats update_worker_filter_stats synchronize_filter",
        "all environments share one mean and standard deviation; drop it",
    ),
}
_ENVIRONMENT = {
    **_each("environment venv", "write env, as in env='CartPole-v1'; in Python it may also be the environment itself"),
    "backend": "it belongs to Brax's environments: env_parameters={'backend': 'spring'}",
    "episode_length": "it belongs to the environment: env_parameters={'episode_length': 1000}",
    "max_steps": "total_steps is the budget of the run; the time limit of an environment belongs to the environment",
    **_each(
        "wrap_env_fn wrapper_class wrapper_kwargs preprocessor_pref env_to_module_connector module_to_env_connector "
        "learner_connector",
        "wrap the environment yourself, and pass it as env: its class, or a function that creates it",
    ),
    "wrap_env": "Lehr steps many environments at once by itself; drop it",
    **_each(
        "vec_env_cls vec_env_kwargs gym_env_vectorize_mode remote_worker_envs",
        "environments of gym:NAME get a process each with env_parameters={'vectorization': 'async'}; others need none",
    ),
    "start_index": "every environment gets a seed from seed; drop it",
    "randomization_fn": f"let the environment's reset draw its parameters; {_DROP_IN} takes such a function",
    "env_task_fn": "let the environment choose its task, in its reset",
    **_each("vision is_atari", "images get a CNN by themselves, and frame_stack stacks them; drop it"),
    "num_resets_per_eval": "episodes always start from new states; drop it",
    "obs_groups": "write actor_obs and critic_obs, the keys of a Dict observation that each sees",
    **_each("observation_space action_space", "the environment says what its spaces are; drop it"),
    "clip_actions": "actions always stay in the bounds of the environment's Box; drop it, or set the bounds there",
    "normalize_actions": "distribution='tanh_normal' squashes actions into the bounds of the environment's Box",
    "action_mask_key": "a mask is found by action_mask, its name in the observation or in info; rename yours",
    "disable_env_checking": "the check before training is short and always made; drop it",
    "sample_timeout_s": "write step_timeout, in seconds for one step of environments on the host",
}
_LOGS = "each update is logged, fewer in long runs; log_every sets the interval, in env steps"
_EPISODES = "the logged return is the mean over the episodes since the last row of the logs; drop it"
_RUN_DIR = "name the run's directory with run_dir="
_FILM = "a run draws nothing while it trains; 'lehr play RUN' then records an episode as a GIF, a video or a page"
_CALLED = (
    "pass a function as progress_fn= to lehr.train: it is called with the env steps so far and the latest "
    "metrics, and stops the run if it returns True"
)
_RUN = {
    **_each(
        """callback callbacks callbacks_class on_algorithm_init on_train_result on_evaluate_start on_evaluate_end
        on_evaluate_offline_start on_evaluate_offline_end on_env_runners_recreated on_offline_eval_runners_recreated
        on_checkpoint_loaded on_environment_created on_episode_created on_episode_start on_episode_step on_episode_end
        on_sample_end""",
        _CALLED,
    ),
    "progress_fn": "it is a function, so it can only be passed in Python, to lehr.train",
    "verbose": "progress=False hides the progress bar",
    "log_level": "Lehr has no log levels; progress=False hides the progress bar",
    "log_sys_usage": "wandb=True logs memory and processors too, as Weights & Biases does",
    "debug": "the progress bar shows the return during training; drop it",
    "tensorboard_log": "logs go to 'tensorboard' in the run's directory, run_dir=; tensorboard=False turns them off",
    "logger": "TensorBoard is on by default, wandb=True adds Weights & Biases, and loggers takes your own",
    "wandb_entity": "set WANDB_ENTITY=NAME before Python starts",
    "wandb_tags": "set WANDB_TAGS=ONE,TWO before Python starts",
    "neptune_project": "Lehr has no logger for Neptune; write your own, and name it in loggers",
    **_each("upload_model hf_entity", "Lehr uploads nothing; 'lehr export RUN' writes the policy to a file"),
    "save_model": "checkpoints are always saved, in the run's directory; drop it",
    **_each("exp_name experiment_name run_name logdir log_dir log_path tb_log_name", _RUN_DIR),
    **_each("out out_dir output output_dir save_dir save_path", _RUN_DIR),
    "save_checkpoint_path": "checkpoints are in the run's directory, run_dir=",
    "policy_params_fn": "checkpoints are always saved, every checkpoint_every env steps; lehr.load(RUN) has the policy",
    **_each(
        "steps timesteps n_timesteps max_timesteps train_steps training_steps",
        "write total_steps for the budget of the run, or horizon for the steps of each environment per update",
    ),
    **_each("render render_mode render_env capture_video record_video", _FILM),
    "resume": "'lehr resume RUN' continues a stopped run, in Python lehr.resume(RUN)",
    "reset_num_timesteps": "'lehr resume RUN' keeps counting env steps, and a new run starts at 0; drop it",
    **_each("load_run load_checkpoint", _FROM),
    **_each("restore_checkpoint_path restore_params", f"{_FROM}; {_DROP_IN} reads what Brax has saved"),
    "restore_value_fn": "from_run=RUN, or 'lehr train --from RUN', always restores the value function too; drop it",
    **_each(
        "torch_deterministic deterministic",
        "drop it: the same seed always gives the same run, on the same machine with the same versions",
    ),
    "save_freq": "it counts calls of step; write checkpoint_every, in env steps",
    "save_interval": "it counts updates; write checkpoint_every, in env steps",
    "log_interval": "it counts updates; write log_every, in env steps",
    **_each("log_training_metrics training_metrics_steps", _LOGS),
    **_each(
        """min_time_s_per_iteration min_train_timesteps_per_iteration min_sample_timesteps_per_iteration
        metrics_episode_collection_timeout_s""",
        _LOGS,
    ),
    "log_gradients": "the norm of the gradient is always logged, as gradient/norm; drop it",
    **_each("stats_window_size metrics_num_episodes_for_smoothing", _EPISODES),
    **_each("monitor_dir monitor_kwargs", "returns and lengths of episodes are always logged; drop it"),
    **_each(
        "keep_per_episode_custom_metrics custom_stats_cls_lookup",
        "for statistics of your own, write a logger and name it in loggers",
    ),
    "check_for_nan": "non-finite updates are always left out, and max_rejected limits their number; drop it",
}
_EVALUATION = {
    "run_evals": "evaluate_episodes=0 turns evaluation off",
    "eval_env": "a run is evaluated in its own environment; lehr.evaluate(result.policy, env) takes another one",
    **_each(
        "deterministic_eval evaluation_config",
        "every evaluation is made twice, with the most likely actions and with sampled ones; drop it",
    ),
    **_each(
        "evaluation_duration evaluation_duration_unit",
        "write evaluate_episodes, the number of episodes of an evaluation",
    ),
    "custom_evaluation_function": "evaluate the policy after training: lehr.evaluate(result.policy, env)",
    **_each(
        """evaluation_auto_duration_min_env_steps_per_sample evaluation_auto_duration_max_env_steps_per_sample
        evaluation_sample_timeout_s evaluation_parallel_to_training evaluation_num_env_runners evaluation_num_workers
        evaluation_unhealthy_workers_timeout_s evaluation_error_after_n_consecutive_skips
        evaluation_force_reset_envs_before_iteration always_attach_evaluation_results""",
        "an evaluation runs whole episodes between two updates, in parallel environments; drop it",
    ),
    **_each(
        """off_policy_estimation_methods ope_split_batch_by_episode offline_evaluation_interval num_offline_eval_runners
        offline_evaluation_type offline_eval_runner_class offline_loss_for_module_fn
        offline_eval_batch_size_per_runner dataset_num_iters_per_offline_eval_runner
        offline_eval_rl_module_inference_only num_cpus_per_offline_eval_runner num_gpus_per_offline_eval_runner
        custom_resources_per_offline_eval_runner offline_evaluation_timeout_s
        max_requests_in_flight_per_offline_eval_runner broadcast_offline_eval_runner_states
        validate_offline_eval_runners_after_construction restart_failed_offline_eval_runners
        ignore_offline_eval_runner_failures max_num_offline_eval_runner_restarts
        offline_eval_runner_health_probe_timeout_s offline_eval_runner_restore_timeout_s""",
        "a policy is evaluated in its environment, not on recorded data; drop it",
    ),
}
_MACHINE = {
    **_each(
        "device cuda gpu use_gpu num_gpus", "JAX chooses the device: set JAX_PLATFORMS=cpu or cuda before Python starts"
    ),
    "local_gpu_idx": "set CUDA_VISIBLE_DEVICES before Python starts",
    **_each(
        "num_learners num_gpus_per_learner max_devices_per_host multi_gpu_cfg num_learner_workers "
        "num_gpus_per_learner_worker",
        "a run uses all devices that can share it equally; devices=1 limits it to one",
    ),
    "use_pmap_on_reset": "one compiled program runs on all devices; drop it",
    **_each(
        """framework eager_tracing eager_max_retraces tf_session_args local_tf_session_args enable_tf1_exec_eagerly
        torch_compile_learner torch_compile_learner_what_to_compile torch_compile_learner_dynamo_mode
        torch_compile_learner_dynamo_backend torch_compile_worker torch_compile_worker_dynamo_backend
        torch_compile_worker_dynamo_mode torch_compile_mode torch_ddp_kwargs torch_skip_nan_gradients""",
        "Lehr computes with JAX, and always compiles; drop it",
    ),
    **_each(
        """add_default_connectors_to_env_to_module_pipeline add_default_connectors_to_module_to_env_pipeline
        add_default_connectors_to_learner_pipeline create_env_on_local_worker create_local_env_runner
        custom_resources_for_main_process custom_resources_per_env_runner custom_resources_per_learner
        custom_resources_per_worker enable_connectors env_runner_cls env_runner_state_server_max_concurrency
        episode_lookback_horizon episodes_to_numpy broadcast_env_runner_states compress_observations
        fake_sampler max_requests_in_flight_per_aggregator_actor max_requests_in_flight_per_env_runner
        max_requests_in_flight_per_learner max_requests_in_flight_per_sampler_worker merge_env_runner_states
        num_aggregator_actors_per_learner num_cpus_for_local_worker num_cpus_for_main_process num_cpus_per_env_runner
        num_cpus_per_learner num_cpus_per_learner_worker num_cpus_per_worker num_gpus_per_env_runner num_gpus_per_worker
        placement_strategy remote_env_batch_wait_ms replay_mode sampler_perf_stats_ema_coef use_env_runner_state_server
        validate_env_runners_after_construction validate_workers_after_construction
        delay_between_env_runner_restarts_s delay_between_worker_restarts_s env_runner_health_probe_timeout_s
        env_runner_restore_timeout_s ignore_env_runner_failures ignore_worker_failures max_num_env_runner_restarts
        max_num_worker_restarts num_consecutive_env_runner_failures_tolerance
        num_consecutive_worker_failures_tolerance recreate_failed_env_runners recreate_failed_workers
        restart_failed_env_runners restart_failed_sub_environments worker_health_probe_timeout_s
        worker_restore_timeout_s""",
        "it is about the processes of RLlib, which Lehr does not have; drop it",
    ),
}

OTHERS = {
    **_NETWORK,
    **_LEARNING,
    **_NORMALISATION,
    **_ENVIRONMENT,
    **_RUN,
    **_EVALUATION,
    **_MACHINE,
}
"""Settings of other libraries that are no settings of Lehr, and what to do instead."""
