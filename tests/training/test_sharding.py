"""The runs of `eight_devices.py`, in a process with eight simulated devices: JAX decides their number only once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lehr.errors import InputError
from lehr.training.sharding import available

EIGHT = Path(__file__).with_name("eight_devices.py")


def run_on_eight_devices(*options: str) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", str(EIGHT), *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
def test_runs_are_shared_between_eight_devices():
    run_on_eight_devices("-m", "not long")


@pytest.mark.long
def test_every_algorithm_learns_the_same_on_eight_devices():
    run_on_eight_devices("-m", "long")


def test_more_devices_than_there_are():
    with pytest.raises(InputError, match="devices is 3, but there is 1; give 1, or all"):
        available(3)
