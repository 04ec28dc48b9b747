"""Lehr for code that people already have: schedules in the training loops of other libraries."""
