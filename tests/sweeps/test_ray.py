"""Sweeps on a Ray cluster: two nodes with a CPU each, in processes of this machine."""

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import lehr
from lehr import cli, config
from lehr.errors import InputError
from lehr.sweeps import cluster
from lehr.sweeps.api import members_of
from lehr.sweeps.cluster import RayDevices
from lehr.sweeps.definition import Definition
from lehr.sweeps.directory import SweepDirectory
from lehr.sweeps.running import Waves, WaveTrainer
from lehr.sweeps.samplers import make_sampler
from lehr.training import checkpoint, ray_hosts
from lehr.training.record import RunFailed
from lehr.training.runners.population import TooLarge

from .conftest import DEFINITION, SMALL
from .test_api import assert_same

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own processes warn of what is not ours

LONG = {**DEFINITION, "settings": {**SMALL, "total_steps": 32 * 800, "checkpoint_every": 32 * 20}, "confirm": False}
"""A sweep with many checkpoints, to interrupt."""


@pytest.fixture(scope="module")
def nodes():
    """A cluster whose head has no devices, with two nodes of one device each; this process is connected to it."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    place = tempfile.mkdtemp(prefix="lehr-ray-")  # killed workers leave files; names of sockets must be short
    patched = pytest.MonkeyPatch()
    patched.setenv("TMPDIR", place)
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        found.add_node(num_cpus=1)
    ray.init(address=found.address, log_to_driver=False, logging_level="error")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
    yield found
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    ray.shutdown()
    found.shutdown()
    patched.undo()
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The long sweep in waves of four, trained here."""
    return lehr.sweep(LONG, out=tmp_path_factory.mktemp("here") / "long", wave_size=4, progress=False)


def after_parcels(monkeypatch, count, action):
    """Do something once, after so many parcels from wave 0 have arrived."""
    arrived = []

    def unpack(path, parcel):
        cluster_unpack(path, parcel)
        if path.name == "000":
            arrived.append(parcel)
            if len(arrived) == count:
                action()

    cluster_unpack = cluster.unpack
    monkeypatch.setattr(cluster, "unpack", unpack)


def begun(monkeypatch):
    """Collect the numbers of waves as they are handed out, with the latest update that they go on from."""
    found = []
    begin = cluster._Round._begin

    def noted(self, worker, wave):
        found.append(
            (wave.number, max(checkpoint.steps(self.directory.wave_path(wave.number) / "checkpoints"), default=0))
        )
        begin(self, worker, wave)

    monkeypatch.setattr(cluster._Round, "_begin", noted)
    return found


def wait_for(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def node_of(worker):
    import ray

    return ray.get_runtime_context().get_node_id()


@pytest.mark.slow
def test_a_sweep_on_ray_has_the_bits_of_one_here(nodes, tmp_path):
    here = lehr.sweep(DEFINITION, out=tmp_path / "here", wave_size=3, progress=False)
    there = lehr.sweep(DEFINITION, out=tmp_path / "there", wave_size=3, on="ray", progress=False)
    assert there.is_finished
    assert there.compile_seconds > 0
    assert_same(there.directory, here.directory)
    assert there.results.scores.tolist() == here.results.scores.tolist()
    assert (there.directory / "report.html").exists()


@pytest.mark.slow
def test_the_waves_of_a_node_that_dies_go_on_elsewhere_from_their_last_checkpoints(
    nodes, whole, tmp_path, monkeypatch, caplog
):
    """The node of wave 0 is killed after the wave has sent its second checkpoint."""
    import ray

    place = []
    begin = cluster._Round._begin

    def located(self, worker, wave):
        if wave.number == 0 and not place:
            place.append(self.devices.ray.get(worker.actor.__ray_call__.remote(node_of)))
        begin(self, worker, wave)

    def kill():
        node = next(node for node in nodes.worker_nodes if node.node_id == place[0])
        nodes.remove_node(node, allow_graceful=False)

    monkeypatch.setattr(cluster._Round, "_begin", located)
    handed_out = begun(monkeypatch)
    after_parcels(monkeypatch, 2, kill)
    with caplog.at_level(logging.WARNING, "lehr"):
        found = lehr.sweep(LONG, out=tmp_path / "killed", wave_size=4, on="ray", progress=False)
    nodes.add_node(num_cpus=1)
    wait_for(lambda: ray.cluster_resources()["CPU"] == 2)
    assert [bool(re.match(r"Wave 1 of 2 on .* was lost \((Actor|Node)", line)) for line in caplog.messages] == [True]
    assert found.is_finished
    assert sorted(handed_out[:2]) == [(0, 0), (1, 0)]
    assert len(handed_out) == 3
    assert handed_out[2][0] == 0
    assert handed_out[2][1] >= 40, "it goes on from its second checkpoint at least"
    assert_same(found.directory, whole.directory)


@pytest.mark.slow
def test_a_wave_that_is_lost_again_and_again_ends_the_sweep_which_can_be_resumed(nodes, whole, tmp_path, monkeypatch):
    handed_out = begun(monkeypatch)
    begin = cluster._Round._begin

    def kill(self, worker, wave):
        begin(self, worker, wave)
        if wave.number == 1:
            self.devices.ray.kill(worker.actor)

    monkeypatch.setattr(cluster._Round, "_begin", kill)
    with pytest.raises(RunFailed, match=r"Wave 2 of 2 on .* lost 3 times in a row without a checkpoint .* resume the"):
        lehr.sweep(LONG, out=tmp_path / "lost", wave_size=4, on="ray", progress=False)
    assert len([number for number, _ in handed_out if number == 1]) == 3
    assert json.loads((tmp_path / "lost" / "status.json").read_text())["status"] == "failed"
    monkeypatch.undo()
    resumed = lehr.resume_sweep(tmp_path / "lost", progress=False)
    assert_same(resumed.directory, whole.directory)


@pytest.mark.slow
def test_ctrl_c_saves_all_waves_and_the_sweep_goes_on_with_or_without_ray(nodes, whole, tmp_path, monkeypatch):
    after_parcels(monkeypatch, 2, lambda: signal.raise_signal(signal.SIGINT))
    stopped = lehr.sweep(LONG, out=tmp_path / "stopped", wave_size=4, on="ray", progress=False)
    assert not stopped.is_finished
    directory = SweepDirectory(stopped.directory)
    status = directory.run.read_status()
    assert (status["status"], status["reason"]) == ("stopped", "signal SIGINT")
    first = json.loads((directory.wave_path(0) / "status.json").read_text())
    assert (first["status"], first["reason"]) == ("stopped", "signal SIGINT")
    monkeypatch.undo()
    after_parcels(monkeypatch, 2, lambda: signal.raise_signal(signal.SIGINT))
    assert not lehr.resume_sweep(directory.path, on="ray", progress=False).is_finished
    monkeypatch.undo()
    assert_same(lehr.resume_sweep(directory.path, progress=False).directory, whole.directory)


@pytest.mark.slow
def test_every_device_has_work_and_the_command_finds_the_cluster_by_its_address(nodes, tmp_path):
    config.to_yaml(tmp_path / "sweep.yaml", {**DEFINITION, "samples": 3, "seeds": 1, "confirm": False})
    environment = os.environ | {"RAY_ADDRESS": nodes.address}
    words = [sys.executable, "-m", "lehr", "sweep", "sweep.yaml", "--on", "ray", "--out", "there"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"waves running: 0  100%", done.stderr)
    assert [len(wave.members) for wave in SweepDirectory(tmp_path / "there").read_waves()] == [2, 1]


class Limited(WaveTrainer):
    """Trains waves of at most two members, and has something to say about each."""

    def train(self, wave, path, title="", report=None):
        if wave.size > 2:
            raise TooLarge("2.0 GiB of 1.0 GiB")
        logging.getLogger("lehr").warning(f"wave {wave.number} has two members")
        return super().train(wave, path, title, report)


@pytest.mark.slow
def test_waves_that_are_too_large_for_a_device_are_halved_and_warnings_come_back(nodes, tmp_path, monkeypatch, caplog):
    definition = Definition.from_mapping(DEFINITION)
    trainer = Limited(definition.algorithm, progress=False)
    with SweepDirectory.create(tmp_path / "s").run as run, contextlib.closing(RayDevices(trainer)) as devices:
        directory = SweepDirectory(run.path, run)
        waves = Waves(directory, trainer, 4, devices)
        with caplog.at_level(logging.WARNING, "lehr"):
            waves.train(members_of(make_sampler(definition).ask(4), definition.seeds))
        assert [wave.size for wave in waves.waves] == [2] * 4
        assert all(directory.is_finished(wave) for wave in waves.waves)
    assert sorted(caplog.messages) == [f"wave {number} has two members" for number in range(4)]


@pytest.mark.slow
def test_a_cluster_with_gpus_trains_on_them_alone(nodes):
    node = nodes.add_node(num_cpus=0, num_gpus=2)
    with contextlib.closing(RayDevices(WaveTrainer("ppo", progress=False))) as devices:
        assert devices.count() == 2
        devices.hire(5)
        places = []
        while len(places) < 2:
            places += [devices.answer(worker) for worker in devices.answered()]
        free = devices.ray.available_resources()
        assert (free.get("GPU", 0), free.get("CPU", 0)) == (0, 2)
    nodes.remove_node(node)


@pytest.mark.slow
def test_a_mistake_that_a_worker_finds_is_one_sentence(nodes, tmp_path, monkeypatch):
    import ray

    handed_out = begun(monkeypatch)
    definition = {**DEFINITION, "settings": {**SMALL, "env": "gym:CartPole-v1"}}
    with pytest.raises(InputError, match="gym:CartPole-v1 runs on the host, but a population is one compiled program"):
        lehr.sweep(definition, out=tmp_path / "s", on="ray", progress=False)
    assert len(handed_out) <= 2, "it is not tried again"
    wait_for(lambda: ray.available_resources().get("CPU") == 2)


@pytest.mark.slow
def test_one_run_has_a_process_on_each_node(nodes, tmp_path, monkeypatch, capfdbinary):
    monkeypatch.chdir(tmp_path)
    words = ["--num-envs", "4", "--horizon", "8", "--hidden-sizes", "8", "--total-steps", "64", "--no-tensorboard"]
    assert cli.main(["train", "a2c", *words, "--evaluate-episodes", "0", "--run-dir", "run", "--on", "ray"]) == 0
    assert b"finished after 64 of 64 env steps" in capfdbinary.readouterr().out
    found = checkpoint.latest_meta(tmp_path / "run" / "checkpoints")
    assert (found["step"], found["devices"], found["processes"]) == (2, 2, 2)


@pytest.mark.slow
def test_a_node_that_is_lost_ends_the_run_in_one_sentence_and_it_goes_on_with_others(nodes, tmp_path):
    run = tmp_path / "run"
    train = ["train", "a2c", "--num-envs", "4", "--horizon", "8", "--hidden-sizes", "8", "--no-tensorboard"]
    train += ["--total-steps", "10M", "--checkpoint-every", "320", "--evaluate-episodes", "0", "--run-dir", str(run)]
    environment = os.environ | {"RAY_ADDRESS": nodes.address, "PYTHONPATH": os.pathsep.join(sys.path)}

    def start(*words):
        command = [sys.executable, "-m", "lehr", *words, "--on", "ray"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)

    words, update = train, 0
    for lost in (1, 0):
        started = start(*words)
        wait_for(lambda update=update: checkpoint.latest_meta(run / "checkpoints").get("step", 0) > update)
        nodes.remove_node(node_with_process(nodes, lost), allow_graceful=False)
        said, errors = started.communicate(timeout=100)
        assert started.returncode == 1
        sentence = re.compile(
            rf"lehr: Process {lost} of 2 on \S+ (is gone|has not answered for 25 s), and a run needs all its processes; "
            rf"start them again with 'lehr resume {run} --on ray'\."
        )
        assert [bool(sentence.fullmatch(line)) for line in (said + errors).splitlines() if "lehr:" in line] == [True]
        nodes.add_node(num_cpus=1)
        wait_for(lambda: sum(node["Resources"].get("CPU", 0) for node in nodes_alive()) == 2)
        words, update = ["resume", str(run)], checkpoint.latest_meta(run / "checkpoints")["step"]
    more = str((update + 20) * 32)
    finished = start(*words, "--total-steps", more)
    said, errors = finished.communicate(timeout=100)
    assert finished.returncode == 0, said + errors
    assert checkpoint.latest_meta(run / "checkpoints")["step"] == update + 20


def nodes_alive():
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def node_with_process(nodes, number):
    """The node of the cluster on which a process of a run is: its Ray actor was started by that node's raylet."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"HostProcess" in (path / "cmdline").read_bytes():
                for child in (path / "task" / path.name / "children").read_text().split():
                    if f"JAX_PROCESS_ID={number}\0".encode() in Path("/proc", child, "environ").read_bytes():
                        raylet = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                        found = {node.all_processes["raylet"][0].process.pid: node for node in nodes.worker_nodes}
                        return found[raylet]
    raise AssertionError(f"process {number} does not run")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "ray", "--distributed"], "--on ray starts the processes of a run, which --distributed would join;"),
        (["--on", "ray", "--seeds", "3"], "--on ray is for a single run, but --seeds is 3; drop one of them, or use"),
        (["--on", "slurm"], "--on is 'slurm'; it must be 'ray', or left out to train on this machine."),
    ],
)
def test_a_run_on_ray_refuses_what_it_cannot_do(words, message, capsys, monkeypatch):
    monkeypatch.setattr(ray_hosts, "run_on_ray", lambda words: pytest.fail("it began"))
    assert cli.main(["train", "a2c", *words]) == 2
    assert capsys.readouterr().err.startswith(f"lehr: {message}")


def test_what_is_started_on_the_nodes_does_not_start_others(monkeypatch):
    started = []
    monkeypatch.setattr(ray_hosts, "run_on_ray", lambda words: started.append(words) or 0)
    assert cli.main(["train", "a2c", "--on", "ray", "--seed", "1", "--on=ray", "--on", "ray"]) == 0
    assert started == [["train", "a2c", "--seed", "1"]]


@pytest.mark.parametrize("on", ["slurm", "", "Ray"])
def test_other_places_are_one_sentence(on, tmp_path, capsys):
    config.to_yaml(tmp_path / "sweep.yaml", DEFINITION)
    assert cli.main(["sweep", str(tmp_path / "sweep.yaml"), "--on", on, "--out", str(tmp_path / "s")]) == 2
    expected = f"lehr: on is '{on}'; it must be 'ray', or left out to train on this machine.\n"
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "s").exists()


def test_without_ray_installed_there_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"^--on ray needs the package ray, .*: pip install 'lehr\[ray\]'\.$"):
        lehr.sweep(DEFINITION, out=tmp_path / "s", on="ray", progress=False)
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_an_address_without_a_cluster_is_one_sentence(tmp_path):
    pytest.importorskip("ray")
    config.to_yaml(tmp_path / "sweep.yaml", DEFINITION)
    environment = os.environ | {"RAY_ADDRESS": "nonsense"}
    words = [sys.executable, "-m", "lehr", "sweep", "sweep.yaml", "--on", "ray", "--out", "there"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 2
    assert done.stderr == (
        "lehr: RAY_ADDRESS is 'nonsense', where no Ray cluster answers (Invalid address format: nonsense); correct it, "
        "or unset it to start a local one.\n"
    )
    assert not (tmp_path / "there").exists()
