"""Which members are trained together, on one device or several."""

import threading

import pytest

from lehr.errors import InputError
from lehr.sweeps.api import checked_sampler, members_of
from lehr.sweeps.definition import Definition
from lehr.sweeps.directory import Member, SweepDirectory, Wave
from lehr.sweeps.running import Waves, WaveTooLarge, WaveTrainer
from lehr.training import checkpoint, population
from lehr.training.directory import RunDirectory
from lehr.training.population_record import SETTLED_SECONDS
from lehr.training.runners import device

from .conftest import DEFINITION, SMALL


class FakeDevices:
    """Devices on which a wave is finished at once, if it has at most so many members."""

    def __init__(self, count=1, most=100):
        self._count, self.most = count, most
        self.compile_seconds = 0.0
        self.trained = []

    def count(self):
        return self._count

    def train(self, directory, waves, total):
        assert total == len(directory.read_waves())
        for wave in waves:
            if wave.size > self.most:
                raise WaveTooLarge(wave, "2.0 GiB of 1.0 GiB")
            path = directory.wave_path(wave.number)
            path.mkdir(parents=True)
            RunDirectory(path).write_status("finished")
            self.trained.append(tuple(member.number for member in wave.members))


def members(*horizons, first=0):
    """Members that need a program for each of the horizons."""
    return [
        Member(number, number, 0, {"horizon": horizon}, {**SMALL, "horizon": horizon})
        for number, horizon in enumerate(horizons, first)
    ]


@pytest.fixture
def directory(tmp_path):
    with SweepDirectory.create(tmp_path / "sweep").run as run:
        yield SweepDirectory(run.path, run)


@pytest.mark.parametrize(
    ("devices", "size", "sizes"),
    [
        (1, None, [6]),
        (3, None, [2, 2, 2]),
        (4, None, [2, 2, 2]),
        (100, None, [1] * 6),
        (3, 4, [3, 3]),
        (1, 2, [2, 2, 2]),
    ],
)
def test_every_device_has_a_wave_unless_the_user_gives_the_size(devices, size, sizes, directory):
    waves = Waves(directory, WaveTrainer("ppo"), size, FakeDevices(devices))
    waves.train(members(*[8] * 6))
    assert [wave.size for wave in waves.waves] == sizes
    assert directory.read_waves() == waves.waves


def test_groups_share_the_devices(directory):
    waves = Waves(directory, WaveTrainer("ppo"), None, FakeDevices(4))
    waves.train(members(8, 16, 8, 16, 8, 16, 8, 16))
    assert [[member.number for member in wave.members] for wave in waves.waves] == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_an_evolution_is_not_divided_between_devices(directory):
    waves = Waves(directory, WaveTrainer("ppo", make_evolution=lambda plan: None), None, FakeDevices(4))
    waves.train(members(*[8] * 6))
    assert [wave.size for wave in waves.waves] == [6]


def test_waves_that_are_too_large_are_halved_and_the_others_keep_their_numbers(directory):
    devices = FakeDevices(most=2)
    waves = Waves(directory, WaveTrainer("ppo"), None, devices)
    waves.train(members(8, 8, 16, 16, 16, 16, 16, 32))
    assert [[member.number for member in wave.members] for wave in waves.waves] == [[0, 1], [2, 3], [7], [5, 6], [4]]
    assert [wave.size for wave in waves.waves] == [2, 2, 1, 2, 2]
    assert sorted(number for wave in devices.trained for number in wave) == list(range(8))
    assert directory.read_waves() == waves.waves


def test_a_wave_with_a_checkpoint_is_not_halved(directory):
    waves = Waves(directory, WaveTrainer("ppo"), None, FakeDevices(most=1))
    checkpoint.save(directory.wave_path(0) / "checkpoints", {"x": 1}, 10, {})
    with pytest.raises(InputError, match=r"^Wave 1 of the sweep needs 2.0 GiB of 1.0 GiB, and has begun on a device"):
        waves.train(members(8, 8))


def test_a_member_that_does_not_fit_alone_is_one_sentence(directory):
    waves = Waves(directory, WaveTrainer("ppo"), None, FakeDevices(most=0))
    with pytest.raises(InputError, match=r"^One member of the sweep needs 2.0 GiB of 1.0 GiB; reduce num_envs, "):
        waves.train(members(8, 8))


def test_settings_are_parsed_once_and_an_update_is_traced_once(directory, monkeypatch):
    counts = {"parsed": 0, "traced": 0}

    def counted(name, function):
        def call(*given, **options):
            counts[name] += 1
            return function(*given, **options)

        return call

    for name in ("build", "parse"):
        monkeypatch.setattr(population.config, name, counted("parsed", getattr(population.config, name)))
    monkeypatch.setattr(device, "iteration", counted("traced", device.iteration))
    definition = Definition.from_mapping({**DEFINITION, "settings": {**SMALL, "horizon": 24}})
    counts["parsed"] = 0
    sampler, need = checked_sampler(definition)
    asked = sampler.ask(100)
    trainer = WaveTrainer("ppo", progress=False)
    trainer.use(need.base)
    trainer.know(asked)
    wave = Wave(0, tuple(members_of(asked, definition.seeds)), 8)
    made = trainer._population(wave, [member.label for member in wave.members])
    made.loop(directory.run, lambda *given, **options: None)
    assert len(made.labels) == 8
    assert counts["parsed"] == 1 + 1  # what all configurations share, and the one whose program is assembled
    assert counts["traced"] == 1


def test_what_is_done_meanwhile_is_done_once_and_waited_for(directory):
    done = []
    waves = Waves(directory, WaveTrainer("ppo"), meanwhile=lambda: done.append(threading.current_thread()))
    waves.close()
    assert not done
    for seconds in (0.5 * SETTLED_SECONDS, 2 * SETTLED_SECONDS, 3 * SETTLED_SECONDS):
        waves._begin_meanwhile(0, {"time/trained": seconds})
    waves.close()
    assert len(done) == 1
    assert done[0] is not threading.current_thread()
