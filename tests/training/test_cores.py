"""One CPU device for each core."""

import os
import subprocess
import sys

import jax
import pytest

from lehr.training.cores import number_of_cores, use_cores

COUNT = """
import jax
from lehr.training import cores
cores.number_of_cores = lambda: 3
cores.use_cores()
print(jax.device_count())
"""


@pytest.mark.parametrize(
    ("variables", "devices"), [({}, 3), ({"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, 2)]
)
def test_every_core_is_a_device_unless_the_user_chose_otherwise(variables, devices):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | variables
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == [str(devices)], done.stderr


def test_once_jax_has_begun_nothing_changes():
    before = jax.device_count()
    use_cores()
    assert jax.device_count() == before


def test_the_number_of_cores_is_what_this_process_may_use():
    assert 1 <= number_of_cores() <= (os.cpu_count() or 1)
