"""Pgx, board and card games: `make("pgx:tic_tac_toe")`.

The agent is player 0, whose seat Pgx draws. The others move at random among their legal actions (`opponent="random"`),
within the step of the agent: it sees the game only when it is its turn, or over. With `opponent="self"` one policy
plays all sides: the players are agents, all of which act at every step, and the mask of those that wait allows action 0
alone, which is ignored, as in PettingZoo's games.

Pgx's own penalty for an illegal action, the loss of the game, only matters if the mask is not followed.
"""

import functools
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from lehr.envs.base import NEVER, Environment
from lehr.envs.suites.foreign import by_their_rules, settled
from lehr.errors import InputError, closest
from lehr.masks import MASK, forbid
from lehr.plugins import require
from lehr.spaces import Box, Dict, Discrete
from lehr.types import Key, PyTree, Timestep

OPPONENTS = ("random", "self")


@dataclass(frozen=True)
class Pgx(Environment):
    """A game of Pgx. Two are equal if they hold the same instance; `make` caches instances.

    The observation is a `Dict` of Pgx's `observation`, as the player sees it, and of its `action_mask`. Booleans are
    int8, other numbers float32. The reward of an agent is what it gets in its own move and in those of the others until
    its next one. Games never truncate. The state is Pgx's.
    """

    truncation_gap: ClassVar[int] = NEVER
    env: Any = field(repr=False)
    """Pgx's own environment."""
    name: str = field(compare=False)
    opponent: str = "random"

    @property
    def num_agents(self) -> int:
        """One, or the number of players if the policy plays against itself."""
        return self.env.num_players if self.opponent == "self" else 1

    @property
    def observation_space(self) -> Dict:
        """What a player sees, and the mask."""
        view, count = _shapes(self.env)
        seen = Box(0, 1, view.shape, np.int8) if view.dtype == bool else Box(-np.inf, np.inf, view.shape)
        return Dict({MASK: Box(0, 1, (count,), np.int8), "observation": seen})

    @property
    def action_space(self) -> Discrete:
        """The moves of the game, legal or not."""
        return Discrete(_shapes(self.env)[1])

    def reset(self, key: Key) -> tuple[PyTree, PyTree]:
        """Begin a game; opponents that begin have made their moves."""
        start, moves = jax.random.split(key)
        with by_their_rules():
            state = settled(self.env.init(start))
            if self.opponent == "random":
                state, _ = self._answered(moves, state)
            return state, self._observed(state)

    def step(self, key: Key, state: PyTree, action: jax.Array) -> tuple[PyTree, Timestep]:
        """Make a move, and let the opponents answer."""
        chance, moves = jax.random.split(key)
        with by_their_rules():
            if self.num_agents > 1:
                action = action[state.current_player]
            state = settled(self.env.step(state, action, chance))
            if self.opponent == "random":
                state, reward = self._answered(moves, state)
            else:
                reward = state.rewards if self.num_agents > 1 else state.rewards[0]
            obs = self._observed(state)
        over, reward = jnp.broadcast_to(state.terminated, reward.shape), reward.astype(jnp.float32)
        return state, Timestep(obs, reward, over, jnp.zeros_like(over), {})

    def _answered(self, key: Key, state: PyTree) -> tuple[PyTree, jax.Array]:
        """Let the others move until it is the agent's turn; return its reward, that of its own move included."""

        def waits(carry: Any) -> jax.Array:
            _, state, _ = carry
            return (state.current_player != 0) & ~state.terminated

        def move(carry: Any) -> Any:
            key, state, reward = carry
            key, draw, chance = jax.random.split(key, 3)
            logits = forbid(self.action_space, jnp.zeros(self.action_space.n), state.legal_action_mask)
            state = settled(self.env.step(state, jax.random.categorical(draw, logits), chance))
            return key, state, reward + state.rewards[0]

        if self.env.num_players == 1:
            return state, state.rewards[0]
        _, state, reward = jax.lax.while_loop(waits, move, (key, state, state.rewards[0]))
        return state, reward

    def _observed(self, state: PyTree) -> PyTree:
        """What the agent sees, or each of the agents, which wait unless it is their turn."""
        if self.num_agents == 1:
            return self._seen_by(jnp.int32(0), state, state.legal_action_mask)
        players = jnp.arange(self.num_agents)
        waiting = jnp.arange(self.action_space.n) == 0
        over, turn = state.terminated, state.current_player
        return jax.vmap(
            lambda player: self._seen_by(
                player, state, jnp.where(over | (player == turn), state.legal_action_mask, waiting)
            )
        )(players)

    def _seen_by(self, player: jax.Array, state: PyTree, mask: jax.Array) -> PyTree:
        space = self.observation_space.spaces["observation"]
        # Pgx has no public way to ask for another view than that of the player whose turn it is.
        return {MASK: mask.astype(jnp.int8), "observation": self.env._observe(state, player).astype(space.dtype)}


def names() -> list[str]:
    """Return Pgx's names of its games."""
    return sorted(_pgx().available_envs())


def make(name: str, opponent: str = "random", **parameters: Any) -> Environment:
    """Create a game by name.

    >>> make("tic_tac_toe", opponent="self")  # doctest: +SKIP
    Pgx(name='tic_tac_toe', opponent='self')
    """
    if name not in names():
        raise InputError(f"Pgx has no environment {name!r}; {closest(name, names(), 'pgx:')}")
    for parameter in parameters:
        raise InputError(
            f"pgx:{name} has no parameter {parameter!r}: it takes opponent; for others, pass an object of its class in "
            "Python."
        )
    return adapt(_instance(name), opponent, name)


def adapt(env: Any, opponent: str = "random", name: str | None = None) -> Environment:
    """Adapt a Pgx environment object, such as `pgx.hex.Hex(size=5)`."""
    if opponent not in OPPONENTS:
        raise InputError(f"opponent is {opponent!r}; {closest(str(opponent), OPPONENTS)}")
    return Pgx(env, name or str(env.id), opponent)


def _pgx() -> ModuleType:
    return require("pgx", extra="pgx")


@functools.cache
def _instance(name: str) -> Any:
    """Create one instance per name, so that equal environments share compiled programs."""
    with by_their_rules():
        return _pgx().make(name)


@functools.cache
def _shapes(env: Any) -> tuple[jax.ShapeDtypeStruct, int]:
    """Return shape and dtype of an observation, and the number of actions."""
    with by_their_rules():
        state = jax.eval_shape(env.init, jax.random.key(0))
    return state.observation, int(state.legal_action_mask.shape[0])
