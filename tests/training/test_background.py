"""What is done in the background: results, errors, order, Ctrl-C."""

import os
import signal
import threading
import time

import jax
import numpy as np
import pytest

from lehr.training import background


def test_a_result_and_an_error_come_from_the_thread():
    assert background.finished(background.start(lambda: threading.current_thread().name)) == "lehr-background"

    def fail():
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        background.finished(background.start(fail))


def test_what_comes_after_another_waits_for_it():
    order, first_may_end = [], threading.Event()
    first = background.start(lambda: (first_may_end.wait(), order.append("first")))
    second = background.start(lambda: order.append("second"), after=first)
    assert not second.running()
    first_may_end.set()
    background.finished(second)
    assert order == ["first", "second"]


def test_what_comes_after_a_failure_or_is_cancelled_makes_no_start():
    called = []
    failing = background.start(lambda: 1 / 0)
    after = background.start(lambda: called.append("after a failure"), after=failing)
    may_end = threading.Event()
    slow = background.start(may_end.wait)
    cancelled = background.start(lambda: called.append("cancelled"), after=slow)
    assert cancelled.cancel()
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "lehr-background":
            thread.join()
    assert called == []
    assert after.cancelled()


def test_ctrl_c_takes_effect_when_the_function_has_returned():
    ended = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    slow = background.start(lambda: (time.sleep(0.5), ended.append(True)))
    threading.Timer(0.1, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            background.finished(slow)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [True]


def test_a_wait_for_a_result_has_an_end():
    may_end = threading.Event()
    waiting, failing = background.start(may_end.wait), background.start(lambda: 1 / 0)
    assert not background.is_done_within(waiting, 0.01)
    may_end.set()
    assert background.is_done_within(waiting, 60)
    assert background.is_done_within(failing, 60)


def test_a_thread_shares_the_scopes_of_its_caller_unless_there_are_some():
    assert background.shares_scopes()
    for scope in (jax.enable_x64(True), jax.default_device(jax.devices()[0]), jax.default_matmul_precision("highest")):
        with scope:
            assert not background.shares_scopes()
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))):
        assert not background.shares_scopes()
    assert background.shares_scopes()


def test_the_device_starts_unless_the_caller_has_chosen_another():
    assert background.start_device().result().shape == (1,)
    with jax.default_device(jax.devices()[0]):
        assert background.start_device() is None


@pytest.mark.parametrize("given", [None, *background.MEMORY_VARIABLES])
def test_memory_of_a_gpu_is_not_reserved_unless_the_user_decides(monkeypatch, given):
    monkeypatch.setattr(os, "environ", {} if given is None else {given: "0.5"})
    background.start_device().result()
    assert os.environ == ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if given is None else {given: "0.5"})


def test_what_is_compiled_is_remembered_unless_it_failed_or_the_options_are_others(monkeypatch):
    outcomes = iter([ValueError("no memory"), "first", "second", "third", "never"])

    @background.remembered
    def compiling(program):
        def outcome():
            found = next(outcomes)
            if isinstance(found, Exception):
                raise found
            return found

        return background.start(outcome)

    def compiled():
        return background.finished(compiling("program"))

    with pytest.raises(ValueError, match="no memory"):
        compiled()
    assert [compiled(), compiled()] == ["first", "first"]
    with jax.default_matmul_precision("highest"):
        assert [compiled(), compiled()] == ["second", "second"]
    monkeypatch.setenv("LEHR_KERNELS", "off")
    assert [compiled(), compiled()] == ["third", "third"]
