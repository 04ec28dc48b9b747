"""A Gymnasium environment of your own: keep a room at its temperature. It runs on the host, and Lehr on the device.

Run it with `python examples/gymnasium_env.py`. It takes about twenty seconds, and needs `pip install "lehr[gym]"`.
"""

import gymnasium
import numpy as np

import lehr


class Thermostat(gymnasium.Env):
    """Heat a room, or let it cool, by half a degree at each of 50 steps. The reward is minus the error."""

    observation_space = gymnasium.spaces.Box(-50, 50, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        """Begin with an error of up to 3 degrees."""
        super().reset(seed=seed)
        self.error, self.steps = self.np_random.uniform(-3, 3), 0
        return self.observe(), {}

    def step(self, action):
        """Heat with action 1, cool with action 0."""
        self.error += 0.5 if action else -0.5
        self.steps += 1
        return self.observe(), -abs(self.error), False, self.steps == 50, {}

    def observe(self):
        """The error, in degrees."""
        return np.array([self.error], np.float32)


if __name__ == "__main__":
    result = lehr.train("ppo", Thermostat, total_steps=30_000, num_envs=8, entropy_coef="0.01 -> 0")
    print(f"Mean return of 100 episodes: {result.final['evaluate/return']:.1f}; a random policy gets about -100")
