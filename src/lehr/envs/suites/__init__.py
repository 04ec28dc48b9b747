"""Other ecosystems' environments that are compiled along with training, one adapter each."""
