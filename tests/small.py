"""Settings of the smallest runs, which several files of tests train with."""

SMALL = {
    "num_envs": 4,
    "horizon": 8,
    "epochs": 2,
    "minibatches": 2,
    "hidden_sizes": (16,),
    "evaluate_episodes": 0,
    "tensorboard": False,
    "progress": False,
}
