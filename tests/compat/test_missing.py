"""If a package is missing, one sentence says what to install."""

import subprocess
import sys

import pytest


def test_without_stable_baselines3():
    code = (
        "import sys; sys.modules['stable_baselines3'] = None\n"
        "from lehr.compat.sb3 import ScheduleCallback\n"
        "try: ScheduleCallback(ent_coef=0.1)\n"
        "except ValueError as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip().endswith("not installed: pip install 'lehr[sb3]'.")


@pytest.mark.parametrize(
    ("missing", "said"),
    [("ray", "not installed"), pytest.param("pyarrow", "cannot be imported", marks=pytest.mark.slow)],
)
def test_without_rllib(missing, said):
    if missing != "ray":
        pytest.importorskip("ray")
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from lehr.compat.rllib import schedules\n"
        "try: schedules(lr=0.1)\n"
        "except ValueError as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said in shown
    assert "pip install 'lehr[rllib]'" in shown
