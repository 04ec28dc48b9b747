"""Environments that come with Lehr."""
