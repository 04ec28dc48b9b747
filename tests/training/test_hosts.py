"""Runs of two processes, each with four simulated devices, that meet on this machine."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lehr.errors import InputError
from lehr.report.loggers.jsonl import read
from lehr.training import agreement, checkpoint, hosts
from lehr.training.addresses import VARIABLES, Addresses
from lehr.training.directory import RunDirectory
from lehr.training.plan import make_plan
from lehr.training.record import RunFailed

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

    def start(
        self, *words: str, processes: int = 2, of_the_last: tuple[str, ...] = (), **more: str
    ) -> list[subprocess.Popen]:
        with socket.create_server(("localhost", 0)) as free:
            address = f"localhost:{free.getsockname()[1]}"
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={8 // processes}"
        given = os.environ | {"XLA_FLAGS": flags, "LEHR_CACHE": str(self.cache), **more}
        found = []
        for index in range(processes):
            own = zip(VARIABLES, (address, str(processes), str(index)), strict=True)
            command = [sys.executable, "-m", "lehr", *words, "--distributed"]
            command += of_the_last if index == processes - 1 else ()
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


@pytest.mark.slow
def test_a_process_that_dies_after_the_end_is_one_sentence(processes, tmp_path):
    run = tmp_path / "run"
    leader, other = processes.start(*TRAIN, "--total-steps", "2560", "--run-dir", str(run))
    wait_for_update(run, 0, [leader, other])
    while RunDirectory(run).read_status()["status"] != "finished":
        time.sleep(0.005)
    other.kill()
    assert leader.wait(20) == 1  # JAX would wait for more than a minute, and abort
    assert re.fullmatch(
        r"lehr: Process 1 of 2 on \S+ was lost before its end; the run is complete\.", processes.said(0)
    )


# Connections ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def connected(monkeypatch):
    """Process 0 of two with a short patience, the link of process 1 to it, and what process 0 says when it ends."""
    monkeypatch.setattr(hosts, "SILENT_SECONDS", 1)
    monkeypatch.setattr(hosts, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(hosts, "_postpone_aborts", lambda: None)
    said = []
    # The listener of an earlier test may hear only now that its connection is closed.
    monkeypatch.setattr(hosts.Hosts, "_end", lambda self, *told: None if self._is_over else said.append(told))
    with socket.create_server(("localhost", 0)) as server:
        theirs = hosts._Link(socket.create_connection(server.getsockname()), "Process 0")
        ours = hosts._Link(server.accept()[0], "Process 1 of 2")
    leader = hosts.Hosts(0, 2)
    leader.connect({1: ours})
    yield leader, theirs, said
    leader._is_over = True
    theirs.close()


def wait_until(condition, seconds=10.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.slow
def test_a_process_that_hangs_is_noticed_and_one_that_computes_for_long_is_not(connected):
    _, theirs, said = connected
    for _ in range(10):
        assert theirs.receive() == {"beat": True}  # process 0 does nothing else
        theirs.send({"beat": True})
    assert said == []
    wait_until(lambda: said)
    text = "Process 1 of 2 has not answered for 1 s, and a run needs all its processes; start them again."
    assert said == [(text, 1)]


def test_an_order_to_a_process_that_is_gone_waits_for_the_sentence_that_says_so(connected):
    leader, theirs, said = connected
    theirs.close()
    failed = []

    def give_orders():
        try:
            while True:
                leader.order("advance", updates=1)
        except BaseException as error:
            failed.append(error)

    threading.Thread(target=give_orders, daemon=True).start()
    wait_until(lambda: said)
    time.sleep(0.2)
    assert failed == []
    assert said == [("Process 1 of 2 is gone, and a run needs all its processes; start them again.", 1)]
    leader.order("end")  # a process may have left by then


def test_a_stop_is_not_lost_while_process_0_prepares_the_run(connected):
    leader, theirs, _ = connected
    theirs.send({"stop": "signal SIGINT", "number": 0})
    wait_until(lambda: leader._stop_reason)
    reasons = []
    leader.when_stopped(reasons.append)
    assert reasons == ["signal SIGINT"]
    leader.begin()  # the next run
    leader.when_stopped(reasons.append)
    assert len(reasons) == 1


def test_a_program_that_goes_on_after_a_run_that_failed_does_not_hear_of_it_again(connected, monkeypatch):
    monkeypatch.setattr(hosts, "GRACE", 0.2)
    leader, theirs, said = connected
    leader.begin()
    theirs.send({"failed": "failed: num_envs is 15", "code": 2, "number": 1})  # as this process does
    theirs.send({"copies": "of the first run", "number": 1})
    wait_until(lambda: leader._links[1].inbox.qsize())
    leader.begin()
    theirs.send({"failed": "failed: again, but late", "code": 2, "number": 1})
    theirs.send({"copies": "of the second run", "number": 2})
    assert leader.answers() == [{"copies": "of the second run", "number": 2}]
    time.sleep(0.5)
    assert said == []
    theirs.send({"failed": "failed: in the second run", "code": 2, "number": 2})
    wait_until(lambda: said)
    assert said == [("Process 1 of 2 failed: in the second run", 2)]


def test_a_run_does_not_begin_without_a_process_that_is_at_its_end(connected):
    leader, theirs, said = connected
    leader.begin()
    leader.order("end")
    theirs.send({"leaves": True, "number": 1})
    wait_until(lambda: leader._links[1].is_at_its_end)
    assert said == []
    with pytest.raises(RunFailed, match="Process 1 of 2 has ended, and a run needs all its processes"):
        leader.begin()


@pytest.mark.parametrize("message", ["leaves", "waits"])
def test_a_process_that_ends_between_two_runs_ends_the_next_one(connected, message):
    leader, theirs, said = connected
    leader.begin()
    leader.begin()
    theirs.send({message: True, "number": 1})  # it knows of the first run only
    wait_until(lambda: said)
    assert said == [("Process 1 of 2 ended before this run did; start all processes again.", 1)]


def test_a_run_does_not_begin_without_a_process_that_is_gone(connected):
    leader, theirs, _ = connected
    leader.order("end")
    theirs.close()
    wait_until(lambda: not leader._links[1].is_open)
    with pytest.raises(RunFailed, match="has ended"):
        leader.begin()


def test_one_process_alone_does_not_remember_its_last_run():
    hosts.ALONE.when_stopped(print)
    assert hosts.ALONE._stop is None


def test_strangers_do_not_keep_process_0_from_meeting_the_others(monkeypatch):
    told = {}
    client = SimpleNamespace(key_value_set=lambda key, text: told.update({key: json.loads(text)}))
    monkeypatch.setattr(
        hosts, "_jax_state", lambda: SimpleNamespace(coordinator_address="localhost:1234", client=client)
    )
    found = []
    meeting = threading.Thread(target=lambda: found.append(hosts._links_to_others(3)), daemon=True)
    meeting.start()
    wait_until(lambda: told)
    host, port, token = told[hosts._KEY]
    with contextlib.ExitStack() as strangers:
        for text in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b"\0\0\3\0" + b"[" * 768):
            strangers.enter_context(socket.create_connection((host, port))).sendall(text)
        links = [hosts._Link(socket.create_connection((host, port)), "Process 0") for _ in range(3)]
        links[0].send({"token": "guessed", "index": 1, "host": "elsewhere"})
        for index in (2, 1):
            links[index].send({"token": token, "index": index, "host": "here"})
        meeting.join(10)
    assert [(index, link.name) for index, link in found[0].items()] == [
        (1, "Process 1 of 3 on here"),
        (2, "Process 2 of 3 on here"),
    ]


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_processes_with_different_settings_do_not_start(processes, tmp_path):
    run = ("--run-dir", str(tmp_path / "run"))
    assert processes.wait(processes.start(*TRAIN, *run, of_the_last=("--seed", "3"))) == [2, 2]
    said = (
        "In process 1, seed is 3, but in process 0 it is 0; start all processes with the same command, settings, data "
        "and versions."
    )
    assert processes.said(1) == f"lehr: {said}"
    assert re.fullmatch(rf"lehr: Process 1 of 2 on \S+ failed: {re.escape(said)}", processes.said(0))
    assert processes.wait(processes.start(*TRAIN, "--total-steps", "128", *run)) == [0, 0]  # in the same directory


def test_what_processes_must_have_in_common():
    plan = make_plan("a2c", {"learning_rate": "1e-3 -> 0", "entropy_coef": lambda step: 0.01})
    here = agreement.premises(plan, resumes=False)
    assert here["learning_rate"] == "1e-3 -> 0"
    assert here["jax"] == jax.__version__
    assert "entropy_coef" not in here  # a function has no text
    agreement.check(here, dict(here), 1)
    for name, value in (("command", "resume"), ("num_envs", "7"), ("jax", "0.1"), ("backend", "gpu")):
        with pytest.raises(InputError, match=rf"In process 1, {name} is .*, but in process 0 it is {value}; start all"):
            agreement.check(here, here | {name: value}, 1)
    with pytest.raises(InputError, match="In process 1, demos is missing, but in process 0 it is abc"):
        agreement.check(here, here | {"demos": "abc"}, 1)


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


def test_a_port_in_use_is_one_sentence():
    with socket.create_server(("", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(InputError) as error:
            Addresses(address, 2, 0).initialise_jax()
    assert str(error.value) == (
        f"JAX_COORDINATOR_ADDRESS is {address}, but process 0 cannot listen to port {address[10:]} (Address already in "
        "use); choose another one, and check that only one process has JAX_PROCESS_ID=0."
    )


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
