"""Training runs: the plan, the compiled program, the host loop, and the run's files."""
