"""Ctrl-C ends every run: at once where an environment hangs, whatever it hangs in."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import lehr
from lehr.acting.evaluation import HostEvaluator
from lehr.training import signals
from tests.small import SMALL

TASKS = "gym:tests.envs.gym_tasks:"
CHILD = """
import json, sys
from lehr.cli import main
if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
"""


@pytest.fixture
def hanging(tmp_path):
    """`hanging(algorithm, fault, settings, parameters)`: `lehr train` on an environment that hangs."""
    started = []

    def start(algorithm, fault, settings, parameters):
        settings = {**SMALL, "total_steps": 10_000, "env": TASKS + "Breaking-v0", **settings}
        settings["env_parameters"] = {"fault": fault, "every": True, "after": 20, **parameters}
        if algorithm == "impala":
            settings = {name: value for name, value in settings.items() if name not in ("epochs", "minibatches")}
        config, script = tmp_path / "config.yaml", tmp_path / "child.py"
        config.write_text(json.dumps(settings))
        script.write_text(CHILD)
        words = ["train", algorithm, "--config", str(config), "--trust", "--run-dir", str(tmp_path / "run")]
        process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(["src", "."])},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def interrupted_twice(process):
    """The exit code, what was said, and the seconds that it took after the second Ctrl-C."""
    line = process.stdout.readline()
    assert line.startswith("hangs"), (line, process.stderr.read())
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    began = time.perf_counter()
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=30)
    return process.returncode, text, time.perf_counter() - began


@pytest.mark.parametrize(
    ("algorithm", "fault", "settings", "parameters"),
    [
        ("ppo", "hangs in C", {}, {}),
        pytest.param("ppo", "hangs", {}, {}, marks=pytest.mark.slow),
        pytest.param("ppo", "hangs", {}, {"vectorization": "async"}, marks=pytest.mark.slow),
        pytest.param("ppo", "hangs in C", {"overlap": True}, {}, marks=pytest.mark.slow),
        pytest.param("impala", "hangs", {"actors": "threads"}, {}, marks=pytest.mark.slow),
        pytest.param("impala", "hangs in C", {"actors": "processes"}, {}, marks=pytest.mark.slow),
    ],
    ids=["in C", "in Python", "in a worker", "while it learns", "in a thread", "in an actor's process"],
)
def test_a_second_ctrl_c_ends_a_run_whose_environment_hangs(algorithm, fault, settings, parameters, hanging, tmp_path):
    code, text, seconds = interrupted_twice(hanging(algorithm, fault, settings, parameters))
    assert code == 130, text
    assert seconds < signals.GRACE + 2
    assert "Traceback" not in text
    assert "lehr: interrupted." in text or "lehr: ended at once" in text
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_a_signal_stops_the_last_evaluation_on_the_host(tmp_path, monkeypatch, caplog):
    steps, evaluates = [], HostEvaluator.__call__

    def evaluate(self, learned, key, greedy):
        self.env = Signalling(self.env, steps)
        return evaluates(self, learned, key, greedy)

    monkeypatch.setattr(HostEvaluator, "__call__", evaluate)
    settings = {**SMALL, "total_steps": 64, "evaluate_episodes": 50, "run_dir": tmp_path / "run", "progress": False}
    run = lehr.train("ppo", "gym:CartPole-v1", **settings)
    assert "The last evaluation was stopped by a signal" in caplog.text
    assert len(steps) == 3  # the signal came in the third step
    assert "evaluate/return" not in run.final
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["status"] == "finished"
    assert run.state.updates == lehr.load(run.run_dir).state.updates > 0
    assert np.isfinite(lehr.evaluate(run, episodes=2).returns).all()


class Signalling:
    """An environment that gets SIGTERM in its third step."""

    def __init__(self, env, steps):
        self.env, self.steps = env, steps

    def __getattr__(self, name):
        return getattr(self.env, name)

    def start(self, *given):
        batch = self.env.start(*given)
        step = batch.step

        def counted(action):
            self.steps.append(action)
            if len(self.steps) == 3:
                signal.raise_signal(signal.SIGTERM)
            return step(action)

        batch.step = counted
        return batch


def test_a_run_that_ends_in_time_is_left_alone(monkeypatch):
    """The second Ctrl-C raises; if that ends the run, nothing else happens, and everything is as before."""
    ended, reasons = [], []
    monkeypatch.setattr(signals, "_end_process", lambda: ended.append(True))
    monkeypatch.setattr(signals, "GRACE", 0.2)
    before = signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt), signals.handled(reasons.append):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            assert reasons[-2:] == ["signal SIGTERM", "signal SIGINT"]
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the second Ctrl-C did not raise")
    time.sleep(0.4)
    assert ended == []
    assert (signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)) == before
    assert not [thread for thread in threading.enumerate() if thread.name == "lehr-signals"]


def test_a_third_ctrl_c_does_not_wait(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(signals, "_end_process", ended.set)
    with signals.handled(print):
        signal.raise_signal(signal.SIGINT)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert ended.wait(1.0)


def test_elsewhere_than_in_the_main_thread_signals_are_not_ours():
    seen = []

    def run():
        with signals.handled(print):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
