"""Swarm: many disc agents, each of which flies to its own target without touching the others."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr.envs.base import NEVER, Environment
from lehr.envs.registry import register
from lehr.errors import InputError
from lehr.spaces import Box
from lehr.types import Key, Timestep


class SwarmState(NamedTuple):
    """Positions, velocities and targets, each `[A, 2]`."""

    position: jax.Array
    velocity: jax.Array
    target: jax.Array


class _Contacts(NamedTuple):
    """Geometry of all pairs of agents, `[A, A, ...]`, with the observing agent on the first axis."""

    direction: jax.Array
    """`[A, A, 2]`: the unit vector from agent i to agent j."""
    gap: jax.Array
    """`[A, A]`: the distance between the two rims, negative where the discs overlap; infinite for i = j."""


@register("Swarm-v0", max_steps=100)
@dataclass(frozen=True)
class Swarm(Environment):
    """`A` discs of equal mass in the square [−h, h]², h = `half_size`, each with its own target.

    Action `[A, 2]`: the acceleration, clipped to [−1, 1] and multiplied by `max_acceleration`. One step of length
    Δt = `time_step`:

    1. v ← v + a Δt and x ← x + v Δt;
    2. overlapping discs are moved apart along the line between their centres, each by half of the overlap; if they
       also approach each other they bounce elastically, vᵢ ← vᵢ + ((vⱼ − vᵢ)·n) n with n from i to j (summed over j);
    3. x is clipped to the arena and a velocity that points out of it is reflected; each component of v is clipped to
       ±`max_speed`.

    Reward `[A]`: |target − x| before the step minus after it, minus `collision_penalty` for each disc overlapped in 2,
    plus `target_bonus` if |target − x| < `target_radius` after the step. Never terminates.

    Observation `[A, 4 + sectors]`: v; target − x; then a lidar: for each of `sectors` equal angular sectors, counted
    counter-clockwise from the x axis, the rim-to-rim distance to the nearest disc whose centre lies in the sector,
    clipped to 0 and `lidar_range`; an empty sector reads `lidar_range`.

    Agents start at rest. Discs and targets are uniform within different cells of a grid, so that none overlap: agent i
    is in cell i + b and its target in cell c − i, modulo the number of cells, with random b and c.
    """

    truncation_gap: ClassVar[int] = NEVER
    num_agents: int = 8
    half_size: float = 1.0
    radius: float = 0.05
    time_step: float = 0.1
    max_acceleration: float = 1.0
    max_speed: float = 0.5
    sectors: int = 8
    lidar_range: float = 1.0
    target_radius: float = 0.1
    target_bonus: float = 0.05
    collision_penalty: float = 0.25

    def __post_init__(self) -> None:
        if self.num_agents < 2:
            raise InputError(f"Swarm got num_agents={self.num_agents}; it must be 2 or more.")
        if self._cell < 2 * self.radius:
            raise InputError(
                f"{self.num_agents} agents of radius {self.radius} do not fit into an arena with half_size="
                f"{self.half_size}; use a larger half_size, a smaller radius or fewer agents."
            )

    @property
    def observation_space(self) -> Box:
        """Velocity, offset to the target, lidar."""
        high = np.repeat([self.max_speed, 2 * self.half_size, self.lidar_range], [2, 2, self.sectors])
        return Box(np.where(np.arange(4 + self.sectors) < 4, -high, 0), high)

    @property
    def action_space(self) -> Box:
        """An acceleration."""
        return Box(-1, 1, (2,))

    @property
    def _grid(self) -> int:
        """The number of cells along one side."""
        return math.ceil(math.sqrt(self.num_agents))

    @property
    def _cell(self) -> float:
        """The side length of a cell."""
        return 2 * self.half_size / self._grid

    def reset(self, key: Key) -> tuple[SwarmState, jax.Array]:
        """Start at rest, without overlaps."""
        agents, grid = np.arange(self.num_agents), self._grid
        draws = jax.random.uniform(key, (2 * self.num_agents + 1, 2))
        shift = jnp.floor(draws[-1] * grid**2).astype(jnp.int32)
        cells = jnp.concatenate([shift[0] + agents, shift[1] - agents]) % grid**2
        corner = jnp.stack([cells % grid, cells // grid], axis=1) * self._cell - self.half_size
        points = corner + self.radius + draws[:-1] * (self._cell - 2 * self.radius)
        position, target = points[: self.num_agents], points[self.num_agents :]
        state = SwarmState(position, jnp.zeros_like(position), target)
        return state, self._observe(state)

    def step(self, key: Key, state: SwarmState, action: jax.Array) -> tuple[SwarmState, Timestep]:
        """Move all agents once; the key is not used."""
        velocity = state.velocity + self.time_step * self.max_acceleration * jnp.clip(action, -1, 1)
        position = state.position + self.time_step * velocity

        direction, gap = self._contacts(position)
        overlap = gap < 0
        towards = jnp.sum((velocity[None] - velocity[:, None]) * direction, axis=-1)
        bounce = jnp.where(overlap & (towards < 0), towards, 0)
        apart = jnp.where(overlap, gap / 2, 0)
        velocity = velocity + jnp.sum(bounce[..., None] * direction, axis=1)
        position = position + jnp.sum(apart[..., None] * direction, axis=1)

        velocity = jnp.where(jnp.abs(position) > self.half_size, -jnp.sign(position) * jnp.abs(velocity), velocity)
        velocity = jnp.clip(velocity, -self.max_speed, self.max_speed)
        position = jnp.clip(position, -self.half_size, self.half_size)

        after = jnp.linalg.norm(state.target - position, axis=-1)
        progress = jnp.linalg.norm(state.target - state.position, axis=-1) - after
        bonus = jnp.where(after < self.target_radius, self.target_bonus, 0)
        reward = progress - self.collision_penalty * jnp.sum(overlap, axis=1) + bonus
        never = jnp.zeros(self.num_agents, bool)
        state = SwarmState(position, velocity, state.target)
        return state, Timestep(self._observe(state), reward.astype(jnp.float32), never, never, {})

    def _contacts(self, position: jax.Array) -> _Contacts:
        offset = position[None] - position[:, None]
        distance = jnp.linalg.norm(offset, axis=-1)
        direction = offset / jnp.maximum(distance, 1e-6)[..., None]
        return _Contacts(direction, jnp.where(np.eye(self.num_agents, dtype=bool), np.inf, distance - 2 * self.radius))

    def _observe(self, state: SwarmState) -> jax.Array:
        direction, gap = self._contacts(state.position)
        turn = jnp.arctan2(direction[..., 1], direction[..., 0]) / (2 * np.pi) % 1
        sector = jnp.minimum((turn * self.sectors).astype(jnp.int32), self.sectors - 1)
        seen = sector[..., None] == np.arange(self.sectors)[None, None]
        lidar = jnp.min(jnp.where(seen, gap[..., None], self.lidar_range), axis=1).clip(0, self.lidar_range)
        return jnp.concatenate([state.velocity, state.target - state.position, lidar], axis=1).astype(jnp.float32)
