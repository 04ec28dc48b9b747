"""The classic control tasks, with the same dynamics as Gymnasium's, step by step.

Each state is a `NamedTuple` of scalars, so that under `vmap` a step is plain elementwise arithmetic. Observations and
rewards are float32; the state has JAX's default precision, which is double if `jax_enable_x64` is set.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lehr.envs.base import NEVER, Environment
from lehr.envs.registry import register
from lehr.envs.wrappers import HideObservation
from lehr.spaces import Box, Discrete
from lehr.types import Key, Timestep


def _vector(*entries: jax.Array) -> jax.Array:
    """Stack the entries into a float32 observation."""
    return jnp.stack(entries).astype(jnp.float32)


def _timestep(obs: jax.Array, reward: jax.Array | float, terminated: jax.Array | bool) -> Timestep:
    """Build the timestep of a task that never truncates."""
    return Timestep(obs, jnp.asarray(reward, jnp.float32), jnp.asarray(terminated), jnp.asarray(False), {})


def _wrap_angle(angle: jax.Array) -> jax.Array:
    """Wrap an angle to [-π, π], where float32 is most precise."""
    return angle - 2 * np.pi * jnp.round(angle / (2 * np.pi))


def _stopped(place: jax.Array, speed: jax.Array, limit: float) -> tuple[jax.Array, jax.Array]:
    """Stop what moves beyond a limit there."""
    return jnp.clip(place, -limit, limit), jnp.where(jnp.abs(place) > limit, 0.0, speed)


class CartPoleState(NamedTuple):
    """Position in metres, angle in radians, and their rates."""

    position: jax.Array
    velocity: jax.Array
    angle: jax.Array
    angular_velocity: jax.Array


@register("CartPole-v1", max_steps=500)
@dataclass(frozen=True)
class CartPole(Environment):
    """Balance a pole on a cart by pushing the cart left (0) or right (1).

    Observation `[4]`: position x, velocity, angle θ from upright, angular velocity. Reward 1 at every step,
    including the last. Terminates when |x| or |θ| exceeds its limit. With force F, masses m_c and m_p, half-length l:

        a = (F + m_p l θ'² sin θ) / (m_c + m_p)
        θ'' = (g sin θ − a cos θ) / (l (4/3 − m_p cos² θ / (m_c + m_p)))
        x'' = a − m_p l θ'' cos θ / (m_c + m_p)

    integrated with explicit Euler steps. The initial state is uniform in [−0.05, 0.05]⁴.

    With `terminates=False` an episode runs to its time limit, so that its length says nothing about how good it was:
    beyond the limits the reward is 0, and at twice the limits the cart stops at walls and the pole rests on stops.
    """

    truncation_gap: ClassVar[int] = NEVER
    gravity: float = 9.8
    cart_mass: float = 1.0
    pole_mass: float = 0.1
    half_length: float = 0.5
    force: float = 10.0
    time_step: float = 0.02
    position_limit: float = 2.4
    angle_limit: float = 12 * np.pi / 180
    terminates: bool = True

    @property
    def observation_space(self) -> Box:
        """Twice the limits, so that the last observation of an episode is inside."""
        high = np.array([2 * self.position_limit, np.inf, 2 * self.angle_limit, np.inf])
        return Box(-high, high)

    @property
    def action_space(self) -> Discrete:
        """Left or right."""
        return Discrete(2)

    def reset(self, key: Key) -> tuple[CartPoleState, jax.Array]:
        """Start near upright."""
        state = CartPoleState(*jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05))
        return state, _vector(*state)

    def step(self, key: Key, state: CartPoleState, action: jax.Array) -> tuple[CartPoleState, Timestep]:
        """Push the cart; the key is not used."""
        position, velocity, angle, angular_velocity = state
        mass = self.cart_mass + self.pole_mass
        moment = self.pole_mass * self.half_length
        cosine, sine = jnp.cos(angle), jnp.sin(angle)
        push = (jnp.where(action == 1, self.force, -self.force) + moment * angular_velocity**2 * sine) / mass
        angular_acceleration = (self.gravity * sine - cosine * push) / (
            self.half_length * (4 / 3 - self.pole_mass * cosine**2 / mass)
        )
        acceleration = push - moment * angular_acceleration * cosine / mass
        state = CartPoleState(
            position + self.time_step * velocity,
            velocity + self.time_step * acceleration,
            angle + self.time_step * angular_velocity,
            angular_velocity + self.time_step * angular_acceleration,
        )
        fallen = (jnp.abs(state.position) > self.position_limit) | (jnp.abs(state.angle) > self.angle_limit)
        if self.terminates:
            return state, _timestep(_vector(*state), 1.0, fallen)
        state = CartPoleState(
            *_stopped(state.position, state.velocity, 2 * self.position_limit),
            *_stopped(state.angle, state.angular_velocity, 2 * self.angle_limit),
        )
        return state, _timestep(_vector(*state), jnp.where(fallen, 0.0, 1.0), False)


@register("CartPole-Hidden-v1", max_steps=500)
def cart_pole_hidden(**parameters: Any) -> HideObservation:
    """CartPole without the velocities, so that the policy needs memory. Observation `[2]`: position and angle."""
    return HideObservation(CartPole(**parameters), (0, 2))


class PendulumState(NamedTuple):
    """The angle from upright in [-π, π] radians, and its rate in radians per second."""

    angle: jax.Array
    velocity: jax.Array


@register("Pendulum-v1", max_steps=200)
@dataclass(frozen=True)
class Pendulum(Environment):
    """Swing up a pendulum and balance it, with a torque u too weak to lift it directly.

    Observation `[3]`: cos θ, sin θ, θ'. Reward −(θ² + 0.1 θ'² + 0.001 u²) of the state before the step, θ in [−π, π].
    Never terminates. θ'' = 3g/(2l) sin θ + 3u/(ml²); the angle is updated with the new, clipped velocity. The action is
    clipped to its bounds. The initial θ is uniform in [−π, π] and θ' in [−1, 1].
    """

    truncation_gap: ClassVar[int] = NEVER
    gravity: float = 10.0
    mass: float = 1.0
    length: float = 1.0
    time_step: float = 0.05
    max_speed: float = 8.0
    max_torque: float = 2.0

    @property
    def observation_space(self) -> Box:
        """Cosine, sine and velocity."""
        high = np.array([1, 1, self.max_speed])
        return Box(-high, high)

    @property
    def action_space(self) -> Box:
        """A torque."""
        return Box(-self.max_torque, self.max_torque, (1,))

    def _observe(self, state: PendulumState) -> jax.Array:
        return _vector(jnp.cos(state.angle), jnp.sin(state.angle), state.velocity)

    def reset(self, key: Key) -> tuple[PendulumState, jax.Array]:
        """Start at any angle, with a small velocity."""
        angle, velocity = jax.random.uniform(key, (2,), minval=-1.0)
        state = PendulumState(np.pi * angle, velocity)
        return state, self._observe(state)

    def step(self, key: Key, state: PendulumState, action: jax.Array) -> tuple[PendulumState, Timestep]:
        """Apply the torque; the key is not used."""
        torque = jnp.clip(action[0], -self.max_torque, self.max_torque)
        cost = state.angle**2 + 0.1 * state.velocity**2 + 0.001 * torque**2
        acceleration = (
            1.5 * self.gravity / self.length * jnp.sin(state.angle) + 3 / (self.mass * self.length**2) * torque
        )
        velocity = jnp.clip(state.velocity + self.time_step * acceleration, -self.max_speed, self.max_speed)
        state = PendulumState(_wrap_angle(state.angle + self.time_step * velocity), velocity)
        return state, _timestep(self._observe(state), -cost, False)


class AcrobotState(NamedTuple):
    """The first link's angle from hanging down, the second's relative to the first, in [-π, π], and their rates."""

    angle_1: jax.Array
    angle_2: jax.Array
    velocity_1: jax.Array
    velocity_2: jax.Array


@register("Acrobot-v1", max_steps=500)
@dataclass(frozen=True)
class Acrobot(Environment):
    """Swing the tip of two hanging links above a line, with a torque of −1, 0 or 1 at the joint between the links.

    Observation `[6]`: cos θ₁, sin θ₁, cos θ₂, sin θ₂, θ₁', θ₂'. Reward −1, and 0 at the step that reaches the goal,
    −cos θ₁ − cos(θ₁ + θ₂) > 1, which terminates. The equations of motion are those of Sutton and Barto's book: both
    links have unit length, mass and inertia, with the mass in the middle. They are integrated with one fourth-order
    Runge-Kutta step; then angles are wrapped and rates clipped. The initial state is uniform in [−0.1, 0.1]⁴.
    """

    truncation_gap: ClassVar[int] = NEVER
    gravity: float = 9.8
    time_step: float = 0.2
    max_velocity_1: float = 4 * np.pi
    max_velocity_2: float = 9 * np.pi

    @property
    def observation_space(self) -> Box:
        """Cosines, sines and rates."""
        high = np.array([1, 1, 1, 1, self.max_velocity_1, self.max_velocity_2])
        return Box(-high, high)

    @property
    def action_space(self) -> Discrete:
        """A torque of −1, 0 or 1."""
        return Discrete(3)

    def _observe(self, state: AcrobotState) -> jax.Array:
        first, second = state.angle_1, state.angle_2
        return _vector(
            jnp.cos(first), jnp.sin(first), jnp.cos(second), jnp.sin(second), state.velocity_1, state.velocity_2
        )

    def _derivative(self, state: AcrobotState, torque: jax.Array) -> AcrobotState:
        """Return the time derivative of the state under a torque."""
        angle_1, angle_2, velocity_1, velocity_2 = state
        cosine, sine = jnp.cos(angle_2), jnp.sin(angle_2)
        inertia = 3.5 + cosine
        coupling = 1.25 + 0.5 * cosine
        weight_2 = 0.5 * self.gravity * jnp.sin(angle_1 + angle_2)
        weight_1 = 1.5 * self.gravity * jnp.sin(angle_1) + weight_2
        force_1 = weight_1 - (0.5 * velocity_2**2 + velocity_2 * velocity_1) * sine
        acceleration_2 = (torque + coupling / inertia * force_1 - 0.5 * velocity_1**2 * sine - weight_2) / (
            1.25 - coupling**2 / inertia
        )
        acceleration_1 = -(coupling * acceleration_2 + force_1) / inertia
        return AcrobotState(velocity_1, velocity_2, acceleration_1, acceleration_2)

    def _integrate(self, state: AcrobotState, torque: jax.Array) -> AcrobotState:
        """Take one fourth-order Runge-Kutta step."""

        def moved(slope: AcrobotState, time: float) -> AcrobotState:
            return AcrobotState(*(value + time * rate for value, rate in zip(state, slope, strict=True)))

        slope_1 = self._derivative(state, torque)
        slope_2 = self._derivative(moved(slope_1, self.time_step / 2), torque)
        slope_3 = self._derivative(moved(slope_2, self.time_step / 2), torque)
        slope_4 = self._derivative(moved(slope_3, self.time_step), torque)
        slopes = zip(slope_1, slope_2, slope_3, slope_4, strict=True)
        return moved(AcrobotState(*(a + 2 * b + 2 * c + d for a, b, c, d in slopes)), self.time_step / 6)

    def reset(self, key: Key) -> tuple[AcrobotState, jax.Array]:
        """Start close to hanging down."""
        state = AcrobotState(*jax.random.uniform(key, (4,), minval=-0.1, maxval=0.1))
        return state, self._observe(state)

    def step(self, key: Key, state: AcrobotState, action: jax.Array) -> tuple[AcrobotState, Timestep]:
        """Apply the torque; the key is not used."""
        angle_1, angle_2, velocity_1, velocity_2 = self._integrate(state, (action - 1).astype(state.angle_1.dtype))
        state = AcrobotState(
            _wrap_angle(angle_1),
            _wrap_angle(angle_2),
            jnp.clip(velocity_1, -self.max_velocity_1, self.max_velocity_1),
            jnp.clip(velocity_2, -self.max_velocity_2, self.max_velocity_2),
        )
        reached = -jnp.cos(state.angle_1) - jnp.cos(state.angle_1 + state.angle_2) > 1
        return state, _timestep(self._observe(state), jnp.where(reached, 0.0, -1.0), reached)


class MountainCarState(NamedTuple):
    """The horizontal position and its rate."""

    position: jax.Array
    velocity: jax.Array


@dataclass(frozen=True)
class Valley(Environment):
    """Abstract base class of the two MountainCars: a car in the valley sin 3x, with a wall on the left.

    Observation `[2]`: position and velocity.
    """

    truncation_gap: ClassVar[int] = NEVER
    goal_position: float = 0.5

    @property
    def observation_space(self) -> Box:
        """Position and velocity."""
        return Box([-1.2, -0.07], [0.6, 0.07])

    def reset(self, key: Key) -> tuple[MountainCarState, jax.Array]:
        """Start at rest, at a position uniform in [−0.6, −0.4]."""
        position = jax.random.uniform(key, minval=-0.6, maxval=-0.4)
        state = MountainCarState(position, jnp.zeros_like(position))
        return state, _vector(*state)

    def _drive(self, state: MountainCarState, acceleration: jax.Array) -> tuple[MountainCarState, jax.Array]:
        """Move the car; return the new state and whether it is at the goal."""
        velocity = jnp.clip(state.velocity + acceleration - 0.0025 * jnp.cos(3 * state.position), -0.07, 0.07)
        position = jnp.clip(state.position + velocity, -1.2, 0.6)
        velocity = jnp.where((position <= -1.2) & (velocity < 0), 0.0, velocity)
        return MountainCarState(position, velocity), (position >= self.goal_position) & (velocity >= 0)


@register("MountainCar-v0", max_steps=200)
@dataclass(frozen=True)
class MountainCar(Valley):
    """Drive out of a valley with an engine too weak to climb directly: push left (0), nothing (1), right (2).

    Reward −1 at every step; terminates at the goal on the right.
    """

    force: float = 0.001

    @property
    def action_space(self) -> Discrete:
        """Left, nothing or right."""
        return Discrete(3)

    def step(self, key: Key, state: MountainCarState, action: jax.Array) -> tuple[MountainCarState, Timestep]:
        """Apply the force; the key is not used."""
        state, reached = self._drive(state, (action - 1) * self.force)
        return state, _timestep(_vector(*state), -1.0, reached)


@register("MountainCarContinuous-v0", max_steps=999)
@dataclass(frozen=True)
class MountainCarContinuous(Valley):
    """MountainCar with a continuous force u, clipped to [−1, 1].

    Reward 100 at the goal, minus 0.1 u² at every step (with u before clipping).
    """

    power: float = 0.0015
    goal_position: float = 0.45

    @property
    def action_space(self) -> Box:
        """A force."""
        return Box(-1, 1, (1,))

    def step(self, key: Key, state: MountainCarState, action: jax.Array) -> tuple[MountainCarState, Timestep]:
        """Apply the force; the key is not used."""
        state, reached = self._drive(state, jnp.clip(action[0], -1, 1) * self.power)
        reward = jnp.where(reached, 100.0, 0.0) - 0.1 * action[0] ** 2
        return state, _timestep(_vector(*state), reward, reached)
