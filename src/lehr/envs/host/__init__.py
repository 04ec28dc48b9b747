"""Environments that live on the host, in Python or C++: the protocol, and one adapter for each ecosystem."""
