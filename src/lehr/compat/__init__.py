"""Lehr's schedules in other libraries: Brax, RLlib and Stable-Baselines3."""
