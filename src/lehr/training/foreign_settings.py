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


UPDATES = tuple(Conversion(name, _steps_of_updates(name)) for name in ("max_iterations", "num_iterations"))
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
_DEVICE = "JAX chooses the device: set JAX_PLATFORMS=cpu or cuda before Python starts"
_RUN_DIR = "name the run's directory with run_dir="
_STEPS = "write total_steps for the budget of the run, or horizon for the steps of each environment per update"
_FILM = "a run draws nothing while it trains; 'lehr play RUN' then records an episode as a GIF, a video or a page"
_REPEATS = "drop it: the same seed always gives the same run, on the same machine with the same versions"
OTHERS = {
    "callback": "pass a function as progress_fn= to lehr.train: it is called with the env steps so far and the latest "
    "metrics, and stops the run if it returns True",
    "policy": "the network follows from the spaces, a CNN for images and an MLP otherwise; change it with torso and "
    "hidden_sizes",
    "policy_kwargs": "pass its parts as settings: net_arch, activation_fn, log_std_init, optimiser",
    "optimizer_class": "write the name of an optax optimiser, as in optimiser='adamw'",
    "share_features_extractor": "shared=True shares the whole torso between actor and critic",
    "model": "pass its parts as settings: fcnet_hiddens, fcnet_activation, vf_share_layers",
    "network_factory": "pass hidden_sizes, critic_hidden_sizes and activation, or your own torso",
    **dict.fromkeys(("device", "cuda", "gpu", "use_gpu", "num_gpus"), _DEVICE),
    "verbose": "progress=False hides the progress bar",
    "tensorboard_log": "logs go to 'tensorboard' in the run's directory, run_dir=; tensorboard=False turns them off",
    **dict.fromkeys(("exp_name", "experiment_name", "run_name", "logdir", "log_dir", "log_path"), _RUN_DIR),
    **dict.fromkeys(("out", "out_dir", "output", "output_dir", "save_dir", "save_path"), _RUN_DIR),
    **dict.fromkeys(("steps", "timesteps", "n_timesteps", "max_timesteps", "train_steps", "training_steps"), _STEPS),
    **dict.fromkeys(("render", "render_mode", "capture_video", "record_video"), _FILM),
    "no_anneal_lr": "a number stays the same all along; write learning_rate=2.5e-4",
    "resume": "'lehr resume RUN' continues a stopped run, in Python lehr.resume(RUN)",
    **dict.fromkeys(("torch_deterministic", "deterministic"), _REPEATS),
    "backend": "it belongs to Brax's environments: env_parameters={'backend': 'spring'}",
    "save_freq": "it counts calls of step; write checkpoint_every, in env steps",
    "save_interval": "it counts updates; write checkpoint_every, in env steps",
    "log_interval": "it counts updates; write log_every, in env steps",
    "episode_length": "it belongs to the environment: env_parameters={'episode_length': 1000}",
    "max_steps": "total_steps is the budget of the run; the time limit of an environment belongs to the environment",
    "use_lstm": "train recurrent_ppo, with torso='lstm'",
    "use_sde": "Lehr has no state-dependent exploration noise; state_dependent_std=True lets the network choose σ",
    "use_rms_prop": "write optimiser='rmsprop'",
    "learning_rate_schedule_min_lr": "write learning_rate='adaptive_kl(3e-4, target=0.01, minimum=1e-5)'",
    "learning_rate_schedule_max_lr": "write learning_rate='adaptive_kl(3e-4, target=0.01, maximum=1e-2)'",
}
"""Settings of other libraries that are no settings of Lehr, and what to do instead."""
