"""Acting: rollouts on the device and on the host, policies to call, and evaluation."""
