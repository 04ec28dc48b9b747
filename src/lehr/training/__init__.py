"""A run: its plan, its compiled program, the loop around it, and its files."""
