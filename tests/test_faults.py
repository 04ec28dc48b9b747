"""The campaign of `bench/faults.py`, shorter: generated input and damaged runs work or are one sentence."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "bench" / "faults.py"


@pytest.fixture(scope="module")
def faults():
    spec = importlib.util.spec_from_file_location("faults", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_generated_input_works_or_is_one_sentence(faults):
    found = faults.inputs(400)
    assert {name: len(results) for name, results in found.items()} == dict.fromkeys(faults.INPUTS, 100)
    assert [result for results in found.values() for result in results if result is not None] == []


@pytest.mark.slow
def test_damaged_runs_are_read_or_are_one_sentence(faults):
    found = faults.directories(60)["damaged runs"]
    assert len(found) == 60
    assert [result for result in found if result is not None] == []


@pytest.mark.slow
def test_a_damaged_checkpoint_is_never_loaded(faults):
    found = faults.checkpoints(40)["checkpoints"]
    assert len(found) >= 40
    assert [result for result in found if result is not None] == []


def test_what_does_not_hold_is_told(faults):
    def fail(error):
        raise error

    def say(code, err):
        return lambda: (code, err)

    assert faults.problem(faults.Case("", lambda: None)) is None
    assert faults.problem(faults.Case("", lambda: fail(faults.InputError("no")))) is None
    assert faults.problem(faults.Case("", lambda: fail(KeyError("x")))) == "KeyError: 'x'"
    assert faults.problem(faults.Case("", say(2, "lehr: no.\n"))) is None
    assert faults.problem(faults.Case("", say(1, "lehr: RunFailed: no.\n"))) is None
    assert faults.problem(faults.Case("", say(1, "lehr: KeyError: 'x'\n"))) == "exit code 1: lehr: KeyError: 'x'"
    assert faults.problem(faults.Case("", say(2, "Traceback ...\nlehr: x\n"))) == "traceback: lehr: x"
    assert faults.problem(faults.Case("", say(2, f"lehr: {'x' * 3000}\n"))).startswith("not one sentence (3006")
    assert faults.problem(faults.Case("", lambda: sum(range(10**6))), seconds=0.0).startswith("took 0.")
