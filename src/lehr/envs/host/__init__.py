"""Environments that run on the host, in Python or C++: the protocol, and one adapter per ecosystem."""
