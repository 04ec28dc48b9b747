"""Adapters, one per ecosystem, for JAX environments that are compiled together with training."""
