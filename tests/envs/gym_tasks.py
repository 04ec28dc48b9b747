"""Small environments for Gymnasium, named `tests.envs.gym_tasks:NAME`."""

import ctypes
import os
import sys
import time
from typing import ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete


class Endless(gymnasium.Env):
    """Reward 1 for ever, with an observation that says how many steps were made: only a time limit ends it."""

    observation_space = Box(0, 100, (1,), np.float64)
    action_space = Discrete(2, start=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.count += 1
        return np.zeros(1), 1.0, False, False, {}


class Dial(gymnasium.Env):
    """A dial that its action turns by 5, 6 or 7; 7 is best. It shows where it stands."""

    observation_space = Box(0, 10_000, (1,), np.float32)
    action_space = Discrete(3, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(5))
        return np.array([self.place], np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.place += int(action)
        return np.array([self.place], np.float32), float(action == 7), False, False, {}


class Lights(gymnasium.Env):
    """Switches, each of which is right if it is as its light is; it shows the lights."""

    observation_space = Box(0, 1, (3,), np.float32)
    action_space = MultiBinary(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.lights = self.np_random.integers(0, 2, 3)
        return self.lights.astype(np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        reward = float(np.sum(action == self.lights))
        self.lights = self.np_random.integers(0, 2, 3)
        return self.lights.astype(np.float32), reward, False, False, {}


class Wheel(gymnasium.Env):
    """Its actions are whole numbers, or bits with two axes, which no policy gives."""

    observation_space = Box(0, 1, (1,), np.float32)

    def __init__(self, bits=False):
        self.action_space = MultiBinary((2, 2)) if bits else Box(0, 4, (2,), np.int32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


class Doors(gymnasium.Env):
    """Doors, open or not: only an open one can be taken, and the last open one is best."""

    observation_space = Dict({"action_mask": Box(0, 1, (3,), bool), "seen": Box(0, 1, (2, 2), bool)})
    action_space = Discrete(3)

    def _obs(self):
        self.open = np.array([True, *self.np_random.integers(0, 2, 2)], bool)
        return {"action_mask": self.open, "seen": self.np_random.integers(0, 2, (2, 2)).astype(bool)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action):
        assert self.open[action]
        reward = float(action == np.flatnonzero(self.open)[-1])
        return self._obs(), reward, False, False, {}


class Clock(gymnasium.Env):
    """It shows the hour, in the dtype of its space or in another one, and after two steps a time in the far future."""

    action_space = Discrete(2)

    def __init__(self, space=np.int64, given=None, late=3_000_000_000):
        bits = np.iinfo(space)
        time = Box(bits.min // 2, bits.max // 2, (2,), space)
        self.observation_space, self.given = Dict({"time": time}), given or space
        self.late = late

    def _obs(self):
        hour = self.late if self.count > 2 else 0
        return {"time": np.array([self.count, hour], self.given)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._obs(), {}

    def step(self, action):
        self.count += 1
        return self._obs(), 0.0, False, False, {}


class Walk(gymnasium.Env):
    """A random walk whose steps the action scales: its state depends on the seed and on every action."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=2)
        return self._obs(), {}

    def _obs(self):
        return self.place.astype(np.float32)

    def step(self, action):
        self.place = self.place + action * self.np_random.normal(size=2)
        return self._obs(), float(-np.abs(self.place).sum()), bool(np.abs(self.place).max() > 3), False, {}


class Mixed(gymnasium.Env):
    """A picture and two numbers to see, and two choices to make: the first is right if the picture is bright."""

    observation_space = Dict({"picture": Box(0, 255, (12, 12, 1), np.uint8), "numbers": Box(-1, 1, (2,), np.float32)})
    action_space = MultiDiscrete([2, 3])

    def _obs(self):
        self.bright = int(self.np_random.integers(2))
        picture = np.full((12, 12, 1), 200 * self.bright, np.uint8)
        return {"picture": picture, "numbers": self.np_random.uniform(-1, 1, 2).astype(np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action):
        reward = float(action[0] == self.bright)
        return self._obs(), reward, False, False, {}


class Picture(gymnasium.Env):
    """A small picture with a bright half; the action that names the half is right. One step each."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = Box(0, 255, (16, 16, 3), np.uint8)
    action_space = Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.side = int(self.np_random.integers(2))
        self.picture = np.zeros((16, 16, 3), np.uint8)
        self.picture[:, 8 * self.side : 8 * self.side + 8] = 255
        return self.picture, {}

    def step(self, action):
        return self.picture, float(action == self.side), True, False, {}

    def render(self):
        return self.picture


class Greedy(gymnasium.Env):
    """Adds up its actions, and halves each of them where it stands."""

    observation_space = Box(-100, 100, (1,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.total = self.np_random.uniform(-1, 1, 1)
        return self.total.astype(np.float32), {}

    def step(self, action):
        self.total = self.total + action
        action *= 0.5
        return self.total.astype(np.float32), 0.0, False, False, {}


class Faulty(gymnasium.Env):
    """It works for 20 steps, and then does what its `fault` says."""

    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, fault):
        self.fault, self.count = fault, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.count += 1
        obs, reward = np.full(2, 0.5, np.float32), 1.0
        if self.count > 20:
            match self.fault:
                case "raises":
                    raise OSError("the simulator is gone")
                case "nan obs":
                    obs = obs * np.nan
                case "nan reward":
                    reward = np.nan
        return obs, reward, self.count % 7 == 0, False, {}


class Breaking(gymnasium.Env):
    """It breaks in its third step as `fault` says, if it is the first of its batch or `every` one does.

    A fault such as `reward='5'` changes one field of its answer.
    """

    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, fault, after=2, every=False):
        self.fault, self.after, self.count, self.first = fault, after, 0, every

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.first = self.first or seed in (0, 3)  # what the tests give to the first one
        obs = np.zeros(2, np.float32)
        return (self._changed("reset", obs) if self.count else obs), {}

    def step(self, action):
        self.count += 1
        obs, reward, terminated, truncated = np.zeros(2, np.float32), 1.0, False, False
        if not self.first or self.count <= self.after:
            return obs, reward, terminated, truncated, {}
        match self.fault:
            case "raises":
                raise OSError("the simulator is gone")
            case "loses its connection":
                raise ConnectionResetError("the simulator hung up")
            case "exits":
                sys.exit(3)
            case "interrupts":
                raise KeyboardInterrupt
            case "dies":
                os._exit(7)
            case "hangs":
                os.write(1, b"hangs\n")  # not into the output of another test, if this is a thread
                time.sleep(60)
            case "hangs in C":  # where no exception reaches it
                os.write(1, b"hangs\n")  # not into the output of another test, if this is a thread
                mutex, library = ctypes.create_string_buffer(128), ctypes.CDLL(None)
                library.pthread_mutex_lock(mutex)
                library.pthread_mutex_lock(mutex)
        fields = {"obs": obs, "reward": reward, "terminated": terminated, "truncated": truncated}
        if self.fault.startswith("reset="):
            fields["terminated"] = True
        return *(self._changed(name, value) for name, value in fields.items()), {}

    def _changed(self, name, value):
        field, _, given = self.fault.partition("=")
        return eval(given, {"np": np, "nan": np.nan}) if field == name and self.first else value


class WrongBatch(gymnasium.vector.VectorEnv):
    """A vector environment whose observations have another shape or dtype than it says."""

    metadata: ClassVar = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}

    def __init__(self, fault, num_envs=4):
        self.fault, self.num_envs = fault, num_envs
        self.single_observation_space, self.single_action_space = Box(-1, 1, (2,), np.float32), Discrete(2)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self.count = 0

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 2), np.float32), {}

    def step(self, actions):
        self.count += 1
        obs, reward = np.zeros((self.num_envs, 2), np.float32), np.ones(self.num_envs)
        terminated, truncated = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        if self.count > 20:
            match self.fault:
                case "shape":
                    obs = obs[:, :1]
                case "dtype":
                    obs = obs.astype(complex)
                case "reward":
                    reward = reward[:, None]
                case "flag":
                    terminated = terminated.astype(float)
        return obs, reward, terminated, truncated, {}


gymnasium.register("Endless-v0", Endless, max_episode_steps=3)
gymnasium.register("Dial-v0", Dial, max_episode_steps=8)
gymnasium.register("Lights-v0", Lights, max_episode_steps=8)
gymnasium.register("Wheel-v0", Wheel, max_episode_steps=8)
gymnasium.register("Doors-v0", Doors, max_episode_steps=8)
gymnasium.register("Clock-v0", Clock, max_episode_steps=8)
gymnasium.register("Walk-v0", Walk, max_episode_steps=12)
gymnasium.register("Mixed-v0", Mixed, max_episode_steps=5)
gymnasium.register("Picture-v0", Picture)
gymnasium.register("Faulty-v0", Faulty)
gymnasium.register("Breaking-v0", Breaking)
gymnasium.register("Greedy-v0", Greedy, max_episode_steps=9)
