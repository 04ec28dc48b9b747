"""Sweeps: many runs with different schedules, trained at once, and what they show."""
