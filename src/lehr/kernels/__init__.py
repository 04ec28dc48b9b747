"""What replaces XLA's own code where that is faster: each with a switch, and with plain JAX to fall back on."""
