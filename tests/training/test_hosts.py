"""Runs of two processes, each with four simulated devices, that meet on this machine."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lehr.errors import InputError
from lehr.report.loggers.jsonl import read
from lehr.training import checkpoint, hosts
from lehr.training.addresses import VARIABLES, Addresses
from lehr.training.directory import RunDirectory

TRAIN = (
    *("train", "a2c", "--num-envs", "16", "--horizon", "8", "--hidden-sizes", "8", "--no-tensorboard"),
    *("--total-steps", "25600", "--checkpoint-every", "2560", "--evaluate-episodes", "2"),
)
"""200 updates, with a checkpoint after every 20."""


class Processes:
    """Starts the processes of runs, and ends them with the test.

    Args:
        folder: for what they print.
        cache: for their compiled programs.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache, self.started = folder, cache, []

    def start(self, *words: str, processes: int = 2, **more: str) -> list[subprocess.Popen]:
        with socket.create_server(("localhost", 0)) as free:
            address = f"localhost:{free.getsockname()[1]}"
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={8 // processes}"
        given = os.environ | {"XLA_FLAGS": flags, "LEHR_CACHE": str(self.cache), **more}
        found = []
        for index in range(processes):
            own = zip(VARIABLES, (address, str(processes), str(index)), strict=True)
            command = [sys.executable, "-m", "lehr", *words, "--distributed"]
            with (self.folder / f"errors{index}").open("w") as errors:
                found.append(subprocess.Popen(command, env=given | dict(own), stdout=subprocess.DEVNULL, stderr=errors))
        self.started += found
        return found

    def said(self, index: int) -> str:
        """The last line that a process of the latest run printed."""
        return (self.folder / f"errors{index}").read_text().strip().splitlines()[-1]

    def wait(self, processes: list[subprocess.Popen]) -> list[int]:
        return [process.wait(100) for process in processes]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def processes(tmp_path, cache):
    made = Processes(tmp_path, cache)
    yield made
    for process in made.started:
        process.kill()
        process.wait()


def wait_for_update(run: Path, update: int, processes: list[subprocess.Popen]) -> None:
    """Wait until a run has a checkpoint of this update or a later one."""
    while not [step for step in checkpoint.steps(run / "checkpoints") if step >= update]:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)


def state(run: Path) -> dict[str, np.ndarray]:
    found = np.load(run / "checkpoints" / f"{200:012d}" / "state.npz")
    return {name: found[name] for name in found}


@pytest.mark.slow
def test_two_processes_that_die_and_resume_train_what_one_process_with_all_devices_does(processes, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert processes.wait(processes.start(*TRAIN, "--run-dir", str(one), processes=1)) == [0]

    words, update = (*TRAIN, "--run-dir", str(two)), 40
    for dies in (1, 0):  # first a process that follows, then the one that leads
        lives = 1 - dies
        started = processes.start(*words)
        wait_for_update(two, update, started)
        started[dies].kill()
        killed = time.monotonic()
        assert started[lives].wait(60) == 1
        assert time.monotonic() - killed < 20
        assert re.fullmatch(
            rf"lehr: Process {dies} of 2 on \S+ is gone, and a run needs all its processes; start them again with 'lehr "
            rf"resume {two} --distributed'\.",
            processes.said(lives),
        )
        words, update = ("resume", str(two)), 120
    assert checkpoint.steps(two / "checkpoints")[-1] < 200

    started = processes.start(*words)
    assert processes.wait(started) == [0, 0]
    assert RunDirectory(two).read_status()["status"] == "finished"
    expected, found = state(one), state(two)
    assert len(expected) >= 20
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    history, same = read(one / "metrics.jsonl"), read(two / "metrics.jsonl")
    np.testing.assert_array_equal(same["update"], np.arange(1, 201))  # each row once
    for name in history.keys() - {"time/elapsed", "time/steps_per_second"}:
        np.testing.assert_array_equal(same[name], history[name], err_msg=name)


@pytest.mark.slow
def test_a_signal_to_any_process_stops_all_of_them_in_good_order(processes, tmp_path):
    run = tmp_path / "run"
    started = processes.start(*TRAIN, "--total-steps", "10M", "--run-dir", str(run))
    wait_for_update(run, 20, started)
    started[1].send_signal(signal.SIGTERM)
    assert processes.wait(started) == [128 + signal.SIGTERM] * 2
    assert RunDirectory(run).read_status()["reason"] == "signal SIGTERM"


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_address_that_does_not_answer_is_given_up_after_a_limit(processes):
    leader, other = processes.start(*TRAIN, LEHR_CONNECT_SECONDS="0.5")
    other.kill()
    assert leader.wait(60) == 2
    assert re.fullmatch(
        r"lehr: Not all of 2 processes met at localhost:\d+ within 0\.5 s; check the address and that all were started, "
        r"or set LEHR_CONNECT_SECONDS to wait longer\.",
        processes.said(0),
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("10.0.0.1:1234", "2", "2"), "JAX_PROCESS_ID is 2, but JAX_NUM_PROCESSES is 2; give a number from 0 to 1."),
        (("10.0.0.1:1234", "0", "0"), "JAX_NUM_PROCESSES is 0; give 1 or more."),
        (("10.0.0.1:1234", "two", "0"), "JAX_NUM_PROCESSES is 'two'; give a number."),
        (
            ("10.0.0.1", "2", "0"),
            "JAX_COORDINATOR_ADDRESS is '10.0.0.1'; give the host and a port, such as 10.0.0.1:1234.",
        ),
        (
            ("10.0.0.1:1234", "2", ""),
            "JAX_COORDINATOR_ADDRESS is set, but JAX_PROCESS_ID is not; set all of JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES, JAX_PROCESS_ID, or none.",
        ),
    ],
)
def test_addresses_that_cannot_be_are_refused_in_one_sentence(given, message, monkeypatch):
    for name, text in zip(VARIABLES, given, strict=True):
        monkeypatch.setenv(name, text)
    with pytest.raises(InputError) as error:
        Addresses.find()
    assert str(error.value) == message


def test_a_run_that_another_host_does_not_see_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "FILE_SECONDS", 0.1)
    status = tmp_path / "run" / "status.json"
    with pytest.raises(
        InputError, match=r"does not see the run '.*run' that process 0 writes; put it on a file system"
    ):
        hosts.wait_for(status, "{}")
    status.parent.mkdir()
    status.write_text("{}")
    hosts.wait_for(status, "{}")
    with pytest.raises(InputError, match="does not see"):  # another run, at the same place of a disk of its own
        hosts.wait_for(status, "{ }")
