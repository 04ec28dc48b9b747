"""Acting: rollouts on the device and on the host, policies, and evaluation."""
