"""`check_env`: check that an environment follows the protocol, and explain how to fix it if it does not."""

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from lehr import masks
from lehr.envs.base import Environment
from lehr.envs.host.base import AnyEnvironment, EnvironmentFailed, HostEnvironment, ask, check_obs, check_step, own
from lehr.envs.wrappers import AutoReset, Wrapper
from lehr.errors import InputError, quoted, shortened
from lehr.spaces import Box, Dict, Discrete, MultiDiscrete, Space, check_actions
from lehr.types import Key, PyTree, Timestep


def check_env(env: AnyEnvironment, seed: int = 0, num_envs: int = 4, num_steps: int = 200) -> list[str]:
    """Return the problems found, one sentence each; an empty list means that all algorithms can use the environment.

    Checks the attributes, then traces a reset and two steps, then runs `num_steps` random steps of `num_envs`
    environments under `jit`, `vmap` and `scan`. Stops at the first stage with a problem, since later stages depend on
    earlier ones. Host environments are reset and stepped without tracing.

    >>> from lehr.envs import make
    >>> check_env(make("CartPole-v1"))
    []
    """
    if isinstance(env, HostEnvironment):
        return _mask(env) or _on_host(env, jax.random.key(seed), num_envs, num_steps)
    return structure(env) or _mask(env) or _values(env, jax.random.key(seed), num_envs, num_steps)


def structure(env: Environment) -> list[str]:
    """Return the problems that can be found by tracing: attributes, structures, shapes and dtypes."""
    return _attributes(env) or _structure(env)


def is_our_own(env: Environment) -> bool:
    """Whether the environment is part of Lehr, and so is checked by Lehr's tests."""
    return type(_innermost(env)).__module__.startswith("lehr.")


def _innermost(env: Environment) -> Environment:
    while isinstance(env, Wrapper):
        env = env.env
    return env


_used: dict[int, dict[str, str]] = {}
"""The public attributes that environments of users had when they were first used, as texts; by their `id`."""


def refuse_changed(env: Environment) -> None:
    """Raise an error if public attributes of the user's own environment were changed after it was used.

    An environment is a value: what was compiled for it is used again for the same object, and would not notice.
    """
    known, now = _then_and_now(env)
    for name, before in known.items():
        if now.get(name) != before:
            raise InputError(
                f"{type(_innermost(env)).__name__} was used with {name}={shortened(before)}, which is "
                f"{shortened(now.get(name, 'nothing'))} now, but what was compiled for it would not notice; create a "
                "new environment instead."
            )


def allow_own_changes(env: Environment) -> None:
    """Let an environment change the attributes that it changed while it was traced, as one that counts its calls."""
    known, now = _then_and_now(env)
    for name in [name for name, before in known.items() if now.get(name) != before]:
        del known[name]


def _then_and_now(env: Environment) -> tuple[dict[str, str], dict[str, str]]:
    """The public attributes of an environment when it was first used, and now; attributes of `None` may be found later.

    Both are empty for Lehr's own, which are frozen, and for objects without attributes of their own.
    """
    inner = _innermost(env)
    if is_our_own(inner):
        return {}, {}
    try:
        found = {name: value for name, value in vars(inner).items() if not name.startswith("_") and value is not None}
        now = {name: _text(value) for name, value in found.items()}
        if id(inner) not in _used:
            weakref.finalize(inner, _used.pop, id(inner), None)
    except TypeError:  # no attributes, or nothing can refer to it weakly
        return {}, {}
    return _used.setdefault(id(inner), now), dict(now)


_PLAIN = (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset)


def _text(value: Any) -> str:
    """Plain values and small arrays as they are written; of others, which may be large, which object it is."""
    is_small = isinstance(value, np.ndarray) and value.size <= 1000
    return quoted(value, 10_000) if is_small or isinstance(value, _PLAIN) else f"{type(value).__name__} {id(value):#x}"


def _mask(env: AnyEnvironment) -> list[str]:
    """Return whether an action mask does not fit the actions."""
    try:
        masks.has_mask(env.observation_space, env.action_space)
    except InputError as error:
        return [str(error)]
    return []


def _on_host(env: HostEnvironment, key: Key, num_envs: int, num_steps: int) -> list[str]:
    """Take random steps with the checks that a run makes, and return the first problem."""
    size = num_envs * env.num_agents
    one = partial(masks.sample, env.observation_space, env.action_space)
    sample = jax.jit(lambda key, obs: jax.vmap(one)(obs, jax.random.split(key, size)))
    try:
        batch = ask(env.name, "its constructor", lambda: env.start(num_envs))
        try:
            obs = ask(env.name, "reset", lambda: batch.reset(np.arange(num_envs, dtype=np.uint32)))
            check_obs(env, obs, size)
            for number in range(num_steps):
                action = np.array(sample(jax.random.fold_in(key, number), own(env, obs)))
                step = ask(env.name, "step", partial(batch.step, action))
                check_step(env, step, size)
                obs = step.obs
        finally:
            batch.close()
    except EnvironmentFailed as error:
        return [str(error)]
    return []


def _attributes(env: Environment) -> list[str]:
    """Check the spaces, the counts, the methods, and that the environment is hashable."""
    problems = []
    for name in ("observation_space", "action_space"):
        space = getattr(env, name, None)
        if not isinstance(space, Space):
            hint = "convert it with lehr.spaces.from_gymnasium" if "gymnasium" in type(space).__module__ else "set it"
            problems.append(
                f"{name} is {space!r}, but must be a Box, Discrete, MultiDiscrete or Dict from lehr.spaces: {hint}."
            )
    actions: Any = getattr(env, "action_space", None)
    try:
        check_actions(actions)
    except InputError as error:
        problems.append(str(error))
    for name in ("num_agents", "env_steps_per_step", "truncation_gap", "environments_per_reset"):
        number = getattr(env, name, None)
        if not isinstance(number, int) or number < 1:
            problems.append(
                f"{name} is {number!r}, but must be an integer of at least 1: set it, or inherit the default from "
                "lehr.envs.Environment."
            )
    problems += [
        f"The method {name} is missing: implement it, with the arguments described in lehr.envs.Environment."
        for name in ("reset", "step")
        if not callable(getattr(env, name, None))
    ]
    try:
        hash(env)
    except TypeError as error:
        problems.append(
            f"The environment is not hashable ({error}), so jit cannot take it as a static argument: make it a "
            "dataclass(frozen=True) with numbers, strings and tuples as fields."
        )
    return problems


def _structure(env: Environment) -> list[str]:
    """Trace one reset and two steps, and check what they return: structures, shapes and dtypes."""
    key, agents = jax.random.key(0), _agents(env)

    def step(state: PyTree, obs: PyTree) -> Any:
        return jax.eval_shape(lambda k, s, o: env.step(k, s, _sample_actions(env, k, o)), key, state, obs)

    try:
        begun = jax.eval_shape(lambda k: env.reset(k), key)
    except Exception as error:
        return [_raised("reset(key)", error)]
    if not isinstance(begun, tuple) or len(begun) != 2:
        return [f"reset returned a {type(begun).__name__}, but must return the pair (state, observation)."]
    state, obs = begun
    if problems := _mismatch(env.observation_space, obs, agents, "The observation of reset"):
        return problems

    try:
        stepped = step(state, obs)
    except Exception as error:
        return [_raised("step(key, state, action)", error)]
    if not isinstance(stepped, tuple) or len(stepped) != 2 or not isinstance(stepped[1], Timestep):
        return [f"step returned a {type(stepped).__name__}, but must return the pair (state, lehr.types.Timestep)."]
    next_state, timestep = stepped
    problems = _mismatch(env.observation_space, timestep.obs, agents, "The observation of step")
    for name, dtype in (("reward", "float32"), ("terminated", "bool"), ("truncated", "bool")):
        problems += _wrong_array(getattr(timestep, name), agents, dtype, f"{name} of step")
    if not isinstance(timestep.info, dict):
        problems.append(f"info of step is a {type(timestep.info).__name__}, but must be a dict of arrays.")
    problems += _change(state, next_state, "The state", "reset", "step")
    return problems or _change(timestep, step(next_state, timestep.obs)[1], "The timestep", "one step", "the next")


def _values(env: Environment, key: Key, num_envs: int, num_steps: int) -> list[str]:
    """Run many steps under `jit`, `vmap` and `scan`; check the values, and that retracing reproduces them."""
    try:
        program, again = (_rollout(env, key, num_envs, num_steps) for _ in range(2))
        first = second = jax.tree.map(np.asarray, program.compile()(key))
        if again.as_text() != program.as_text():
            second = jax.tree.map(np.asarray, again.compile()(key))
    except Exception as error:
        return [_raised("A loop of steps under jit, vmap and scan", error)]
    begun, steps = first
    problems = _outside(env.observation_space, begun, "The observation of reset")
    problems += _outside(env.observation_space, steps.info["final_obs"], "The observation of step")
    problems += _stuck(env, begun, np.zeros(1, bool), "reset")
    problems += _stuck(env, steps.info["final_obs"], steps.terminated | steps.truncated, "step")
    if not np.all(np.isfinite(steps.reward)):
        problems.append(
            f"{np.sum(~np.isfinite(steps.reward))} of {steps.reward.size} rewards are not finite: return finite "
            "numbers."
        )
    done = steps.terminated | steps.truncated
    if _agents(env) and np.any(done[:-1] & ~done[1:] & ~done[:-1].all(axis=-1, keepdims=True)):
        problems.append(
            "An agent that was done became active again while other agents were not done: keep its terminated or "
            "truncated flag set until all agents are done."
        )
    same = jax.tree.map(lambda a, b: np.array_equal(a, b, equal_nan=True), first, second)
    if not all(jax.tree.leaves(same)):
        problems.append(
            "The environment gave different results for the same keys and actions: draw all random numbers from the "
            "key, and keep everything that changes in the state."
        )
    return problems


def _rollout(env: Environment, key: Key, num_envs: int, num_steps: int) -> jax.stages.Lowered:
    """Trace a program from a key to the first observations and the timesteps; every call traces again."""
    resetting = env if isinstance(env, AutoReset) else AutoReset(env)

    def step(carried: tuple[PyTree, PyTree], key: Key) -> tuple[tuple[PyTree, PyTree], Timestep]:
        action_key, step_key = jax.random.split(key)
        state, obs = carried
        state, timestep = resetting.step(step_key, state, _sample_actions(env, action_key, obs))
        return (state, timestep.obs), timestep

    def episode(keys: Key) -> tuple[PyTree, Timestep]:
        state, obs = resetting.reset(keys[0])
        return obs, jax.lax.scan(step, (state, obs), keys[1:])[1]

    rollout = jax.vmap(episode, out_axes=(0, 1))
    return jax.jit(lambda key: rollout(jax.random.split(key, (num_envs, num_steps + 1)))).lower(key)


def _agents(env: Environment) -> tuple[int, ...]:
    """Return the leading axes for agents: `()` for one agent, `(A,)` for several."""
    return () if env.num_agents == 1 else (env.num_agents,)


def _sample_actions(env: Environment, key: Key, obs: PyTree) -> PyTree:
    """Sample a random action for each agent, one that its observation allows."""
    sample = partial(masks.sample, env.observation_space, env.action_space)
    if env.num_agents == 1:
        return sample(obs, key)
    return jax.vmap(sample)(obs, jax.random.split(key, env.num_agents))


def _stuck(env: Environment, obs: PyTree, done: np.ndarray, what: str) -> list[str]:
    """Return whether an observation allows no action although the episode goes on; `done` is bool `[...]`."""
    stuck = masks.without_action(env.observation_space, env.action_space, obs)
    if stuck is None or not (stuck & ~done).any():
        return []
    return [
        f"The action_mask of {what} allows no action in {np.sum(stuck & ~done)} of {stuck.size} observations: allow at "
        "least one while an episode goes on."
    ]


def _mismatch(space: Space, value: Any, lead: tuple[int, ...], what: str) -> list[str]:
    """Return where the structure, shapes or dtypes of an observation differ from its space."""
    if not isinstance(space, Dict):
        return _wrong_array(value, (*lead, *space.shape), str(space.dtype), what)
    if not isinstance(value, Mapping) or set(value) != set(space.spaces):
        found = f"the entries {sorted(value)}" if isinstance(value, Mapping) else "no entries"
        return [f"{what} has {found}, but observation_space has {sorted(space.spaces)}: make them match."]
    parts = space.spaces.items()
    return [p for name, inner in parts for p in _mismatch(inner, value[name], lead, f"{what}, entry {name!r},")]


def _outside(space: Space, value: Any, what: str) -> list[str]:
    """Return the first value of an observation that is outside of its space; NaN always is."""
    if isinstance(space, Dict):
        parts = space.spaces.items()
        return [p for name, inner in parts for p in _outside(inner, value[name], f"{what}, entry {name!r},")]
    low, high = (np.broadcast_to(bound, value.shape) for bound in _bounds(space))
    wrong = np.argwhere(~((value >= low) & (value <= high)))
    if not len(wrong):
        return []
    place = tuple(wrong[0])
    return [
        f"{what} is outside of observation_space: it contains {value[place]}, but the bounds are {low[place]} and "
        f"{high[place]}; widen the space or clip the observation."
    ]


def _bounds(space: Box | Discrete | MultiDiscrete) -> tuple[Any, Any]:
    match space:
        case Box():
            return space.low, space.high
        case Discrete():
            return space.start, space.start + space.n - 1
        case MultiDiscrete():
            return 0, np.array(space.nvec) - 1


def _wrong_array(value: Any, shape: tuple[int, ...], dtype: str, what: str) -> list[str]:
    """Return the problem with an array's shape or dtype, if any."""
    wanted = f"{dtype}{list(shape)}"
    signature = _signature(value)
    if list(signature) != [""]:
        return [f"{what} is a {type(value).__name__}, but must be an array of {wanted}."]
    if signature[""] != wanted:
        return [f"{what} is {signature['']}, but must be {wanted}: convert it with .astype or .reshape."]
    return []


def _signature(tree: PyTree) -> dict[str, str]:
    """Map the path of every leaf to its dtype and shape: `{".position": "float32[2]"}`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _change(before: PyTree, after: PyTree, what: str, first: str, second: str) -> list[str]:
    """Return the first leaf that is only in one of the trees, or whose shape or dtype differs."""
    old, new = _signature(before), _signature(after)
    for path in [*old, *new]:
        if old.get(path) != new.get(path):
            found = f"{old.get(path, 'absent')} after {first} and {new.get(path, 'absent')} after {second}"
            return [f"{what}{path} is {found}, but structure, shapes and dtypes must never change: make them the same."]
    return []


def _raised(what: str, error: Exception) -> str:
    """Describe an exception in one sentence, with advice if the environment cannot be traced."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    sentence = f"{what} raised {type(error).__name__}: {first_line}"
    if isinstance(error, (jax.errors.JAXTypeError, jax.errors.JAXIndexError)):
        sentence += " Use jnp.where or jax.lax instead of if and while on array values, and jax.numpy instead of NumPy."
    return sentence
