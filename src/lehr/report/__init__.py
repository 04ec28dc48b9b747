"""Output for people: loggers, progress, learning curves, plots of schedules, and rendered episodes."""
