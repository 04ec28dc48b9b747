"""What people look at: logs, progress, curves, plots of schedules, and films."""
