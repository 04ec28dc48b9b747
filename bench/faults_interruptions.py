"""Interrupt runs in every way and at every place, resume them, and compare their ends with runs that were left alone.

    python bench/faults_interruptions.py [--count 100] [--cases ppo ...] [--seed 0]

Every algorithm, and host environments in this process, in workers and with overlap: a short run is made once without an
interruption, and once with many. It gets SIGKILL, SIGTERM, SIGINT once or twice, or SIGSTOP and SIGCONT, at a random
moment, in the middle of a checkpoint, of a row of the metrics, of an evaluation, of a resume, or at the very end, and
is resumed until it is finished. Held is an interruption whose run ended with the same state, to the bit, and the same
metrics except the time. Prints one line per case, and `held / tried`.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

SIZES = {
    "env": "CartPole-v1",
    "num_envs": 4,
    "horizon": 8,
    "hidden_sizes": [8],
    "total_steps": 32 * 36,
    "checkpoint_every": 32 * 4,
}
QUIET = {"progress": False, "tensorboard": False, "evaluate_every": 32 * 12, "evaluate_episodes": 2}
SPLIT = {"epochs": 2, "minibatches": 2}
WALK = "gym:Pendulum-v1"
ASYNC = {"env": WALK, "env_parameters": {"vectorization": "async"}, "num_envs": 2, "horizon": 16}
DREAMER = {
    **{"batch_size": 2, "batch_length": 4, "train_ratio": 0.25, "replay_size": 512, "prefill": 64},
    **{"imagination_length": 3, "recurrent_size": 8, "latents": 4, "classes": 4, "bins": 15},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a2c": ("a2c", {"entropy_coef": "0.03 -> 0.001 cosine"}),
    "appo": ("appo", {**SPLIT, "lag": 2}),
    "dreamer": ("dreamer", DREAMER),
    "gail": ("gail", SPLIT),
    "impala": ("impala", {"lag": 1}),
    "ppg": ("ppg", {**SPLIT, "policy_updates": 4, "auxiliary_epochs": 1, "auxiliary_minibatches": 2}),
    "ppo": ("ppo", {**SPLIT, "env": "Pendulum-v1", "normalise_observations": True, "normalise_rewards": True}),
    "ppo, controllers": (
        "ppo",
        {**SPLIT, "learning_rate": "adaptive_kl(1e-3)", "entropy_coef": "auto(target_entropy=0.5, rate=0.1)"},
    ),
    "recurrent_ppo": ("recurrent_ppo", {**SPLIT, "env": "CartPole-Hidden-v1", "recurrent_size": 8}),
    "trpo": ("trpo", {"value_minibatches": 2}),
    "ppo, host": ("ppo", {**SPLIT, "env": WALK, "normalise_rewards": True}),
    "ppo, host, overlap": ("ppo", {**SPLIT, "env": WALK, "overlap": True}),
    "ppo, host, async": ("ppo", {**SPLIT, **ASYNC}),
    "impala, host, overlap": ("impala", {"env": WALK, "overlap": True}),
    "appo, host, async, overlap": ("appo", {**SPLIT, **ASYNC, "overlap": True}),
}
"""Algorithms and settings; those that are not named here are added with their defaults."""

PLACES: dict[str, tuple[str, str, int]] = {
    "compiling": ("lehr.training.loop:Loop", "_compile", 1),
    "syncing a file": ("os", "fsync", 12),
    "writing arrays": ("numpy", "savez", 2),
    "renaming": ("pathlib:Path", "rename", 4),
    "replacing": ("os", "replace", 4),
    "removing a checkpoint": ("shutil", "rmtree", 2),
    "evaluating": ("lehr.training.loop:Loop", "_evaluate", 1),
    "reporting": ("lehr.training.loop:Loop", "_report", 6),
    "logging a row": ("lehr.report.loggers:JsonLines", "log", 10),
    "flushing rows": ("lehr.report.loggers:JsonLines", "flush", 6),
    "resuming": ("lehr.training.checkpoint", "newest", 1),
    "opening the run": ("lehr.training.directory:RunDirectory", "open", 1),
    "writing the status": ("lehr.training.directory:RunDirectory", "write_status", 2),
}
"""Where a run is interrupted: before a call of a function, and the most calls that are waited for."""

END = {
    "ending": ("lehr.training.loop:Loop", "save", 3),
    "drawing the curve": ("lehr.training.api", "learning_curve", 1),
    "writing the last status": ("lehr.training.directory:RunDirectory", "write_status", 2),
}
"""Places at the very end of a run."""

ANYTIME = "any moment"
KINDS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT", "SIGINT twice", "SIGSTOP")
PATIENCE = 300.0


class Order(NamedTuple):
    """What one process does: train or resume a run, and be interrupted once, in one of the calls of `place`."""

    kind: str = ""
    place: str = ""
    calls: int = 0
    seconds: float = 0.0


class Outcome(NamedTuple):
    """How a process ended."""

    interrupted: bool
    code: int
    """Its exit code, or minus the signal that ended it."""
    text: str
    """What it printed."""


# In the child --------------------------------------------------------------------------------------------------------


def _interrupt(kind: str, mark: Path) -> None:
    mark.touch()
    if kind == "SIGINT twice":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    else:
        os.kill(os.getpid(), signal.Signals[kind])


def _arm(order: Order, mark: Path) -> None:
    """Arrange that this process is interrupted."""
    import importlib

    from lehr.training import loop

    if order.place == ANYTIME:
        compile_program = loop.Loop._compile

        def begin(self: Any) -> None:
            compile_program(self)
            threading.Timer(order.seconds, _interrupt, (order.kind, mark)).start()

        loop.Loop._compile = begin  # type: ignore[method-assign]
        return
    path, name, _ = (PLACES | END)[order.place]
    module, _, attribute = path.partition(":")
    owner: Any = importlib.import_module(module)
    owner = getattr(owner, attribute) if attribute else owner
    original, calls = getattr(owner, name), []

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == order.calls:
            _interrupt(order.kind, mark)
        return original(*arguments, **named)

    setattr(owner, name, staticmethod(counted) if isinstance(owner.__dict__.get(name), classmethod) else counted)


def _train_or_resume(algorithm: str, settings: dict[str, Any], run: Path, order: Order, mark: Path) -> None:
    import lehr

    if order.kind:
        _arm(order, mark)
    if (run / "config.yaml").exists():
        lehr.resume(run)
    else:
        shutil.rmtree(run, ignore_errors=True)
        lehr.train(algorithm, run_dir=run, **_files(algorithm, run.parent), **settings)


def _files(algorithm: str, folder: Path) -> dict[str, Any]:
    """Return the settings that name files, of algorithms that need some."""
    from lehr import algorithms, envs
    from lehr.spaces import Spaces

    env = envs.make("CartPole-v1")
    return algorithms.find(algorithm).trial_settings(Spaces(env.observation_space, env.action_space), folder)


def _assert_same(run: Path, whole: Path) -> None:
    import jax
    import numpy as np

    import lehr

    one, other = lehr.load(run), lehr.load(whole)
    leaves = [jax.tree_util.tree_leaves_with_path(result.state) for result in (one, other)]
    for (path, here), (_, there) in zip(*leaves, strict=True):
        if jax.dtypes.issubdtype(here.dtype, jax.dtypes.prng_key):
            here, there = jax.random.key_data(here), jax.random.key_data(there)
        assert np.asarray(here).tobytes() == np.asarray(there).tobytes(), jax.tree_util.keystr(path)
    assert one.metrics.keys() == other.metrics.keys()
    for name, column in one.metrics.items():
        if not name.startswith("time/"):
            np.testing.assert_array_equal(column, other.metrics[name], err_msg=name)
    for result in (one, other):
        assert json.loads((result.run_dir / "status.json").read_text())["status"] == "finished"


# In the parent -------------------------------------------------------------------------------------------------------


def _in_child(work: Callable[[], None], place: Path) -> tuple[int, str]:
    """Run a function in a fork of this process, which has imported everything and started nothing.

    A process that stops is sent SIGCONT, and then SIGTERM.
    """
    output = place / "output"
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            try:
                work()
                code = 0
            except KeyboardInterrupt:
                code = 130
            except SystemExit as ending:
                code = ending.code if isinstance(ending.code, int) else 1
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    deadline = time.monotonic() + PATIENCE
    while True:
        found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if found and os.WIFSTOPPED(status):
            time.sleep(0.1)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.05)
            os.kill(pid, signal.SIGTERM)
        elif found:
            return os.waitstatus_to_exitcode(status), output.read_text(errors="replace")
        elif time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 124, f"it did not end within {PATIENCE:g} seconds"
        time.sleep(0.005)


def _drawn(draw: random.Random, is_last: bool) -> Order:
    kind = draw.choice(KINDS)
    if is_last and draw.random() < 0.5:
        place = draw.choice(sorted(END))
        return Order("SIGKILL", place, draw.randint(1, END[place][2]))
    if draw.random() < 0.3:
        return Order(kind, ANYTIME, seconds=draw.uniform(0.0, 0.5))
    place = draw.choice(sorted(PLACES))
    return Order(kind, place, draw.randint(1, PLACES[place][2]))


def _try_case(name: str, count: int, draw: random.Random, place: Path) -> tuple[int, int]:
    """Interrupt a case `count` times; return how many interruptions held, and how many there were."""
    algorithm, given = CASES.get(name, (name, {}))
    settings = SIZES | QUIET | given
    whole, mark = place / "whole", place / "interrupted"
    code, text = _in_child(partial(_train_or_resume, algorithm, settings, whole, Order(), mark), place)
    if code:
        raise RuntimeError(f"The run of {name} without interruption ended with code {code}:\n{text}")
    held = tried = copies = 0
    while tried < count:
        run, here, history = place / f"run{copies}", 0, []
        copies += 1
        while True:
            order = _drawn(draw, here > 2) if tried + here < count else Order()
            mark.unlink(missing_ok=True)
            code, text = _in_child(partial(_train_or_resume, algorithm, settings, run, order, mark), place)
            if mark.exists():
                here += 1
                history.append(f"{order.kind} while {order.place} ({order.calls}): code {code}")
            status = json.loads((run / "status.json").read_text())["status"] if (run / "status.json").exists() else ""
            expected = code in (0, -signal.SIGKILL, -signal.SIGTERM, 130, 143) and mark.exists()
            if status == "finished" and code == 0:
                code, text = _in_child(partial(_assert_same, run, whole), place)
                break
            if not (expected or code == 0):
                break
        tried += here
        held += here if code == 0 else 0
        if code:
            print(f"{name}: not held: {'; '.join(history)}\n{text}", file=sys.stderr, flush=True)
        shutil.rmtree(run, ignore_errors=True)
    return held, tried


def _serve(count: int, cases: list[str], seed: int) -> tuple[int, int]:
    """The campaign, in a process that has not used JAX."""
    from lehr import algorithms
    from lehr.training import api  # noqa: F401  so that children need not import it

    covered = {algorithm for algorithm, _ in CASES.values()}
    names = cases or [*CASES, *(name for name in algorithms.names() if name not in covered)]
    held = tried = 0
    for number, name in enumerate(names):
        share = (count - tried) // (len(names) - number) or 1
        with tempfile.TemporaryDirectory(prefix="lehr-interrupted-") as place:
            found = _try_case(name, share, random.Random(f"{seed} {name}"), Path(place))
        held, tried = held + found[0], tried + found[1]
        print(f"{name}: {found[0]} / {found[1]}", flush=True)
    print(f"interruptions: {held} / {tried}", flush=True)
    return held, tried


def campaign(count: int, cases: list[str] | None = None, seed: int = 0) -> tuple[int, int]:
    """Interrupt runs `count` times, in a process of its own; return how many held, and how many were tried."""
    with tempfile.TemporaryDirectory(prefix="lehr-compiled-") as cache:
        command = [sys.executable, __file__, "--serve", "--count", str(count), "--seed", str(seed)]
        settings = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05"}
        settings |= {"JAX_PLATFORMS": "cpu"}
        process = subprocess.run(
            [*command, *(["--cases", *cases] if cases else [])],
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            text=True,
        )
    print(process.stdout, end="", flush=True)
    last = process.stdout.strip().splitlines()[-1] if process.stdout.strip() else ""
    if process.returncode or not last.startswith("interruptions: "):
        raise RuntimeError(f"The campaign ended with code {process.returncode}.")
    held, tried = last.removeprefix("interruptions: ").split(" / ")
    return int(held), int(tried)


def main() -> int:
    """Run the campaign; return 0 if everything held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="number of interruptions (default: 100)")
    parser.add_argument("--cases", nargs="*", default=[], help=f"some of: {'; '.join(CASES)} (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    held, tried = (_serve if arguments.serve else campaign)(arguments.count, arguments.cases, arguments.seed)
    return 0 if arguments.serve or held == tried else 1


if __name__ == "__main__":
    sys.exit(main())
