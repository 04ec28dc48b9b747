"""A first run: train PPO on CartPole with an annealed entropy coefficient, look at the result, and use the policy.

Run it with `python examples/first_run.py`. It takes a few seconds, and needs `pip install "lehr[gym]"`.
"""

import gymnasium

import lehr

result = lehr.train(
    "ppo", env="CartPole-v1", total_steps=150_000, entropy_coef="0.03 -> 0.001 cosine", learning_rate="2e-3 -> 0"
)
print(f"Mean return of 100 episodes: {result.final['evaluate/return']:.0f}, at most 500")
print(f"Everything about the run is in {result.run_dir}; its curve is {result.run_dir / 'curve.png'}")

# The policy, in Gymnasium's own CartPole.
env = gymnasium.make("CartPole-v1")
observation, _ = env.reset(seed=0)
total, ended = 0.0, False
while not ended:
    observation, reward, terminated, truncated, _ = env.step(result.policy(observation))
    total, ended = total + float(reward), terminated or truncated
print(f"Return of an episode in Gymnasium: {total:.0f}")
