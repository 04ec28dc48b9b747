"""Faults: generated input and damaged runs. Each must work or be one sentence; none may take long.

    python bench/faults.py inputs [--count 2000]         schedule texts, mappings, YAML files and flags
    python bench/faults.py directories [--count 200]     every file of a run damaged, then read by every command
    python bench/faults.py checkpoints [--count 200]     every part of a checkpoint damaged: another one is loaded
    python bench/faults.py interruptions [--count 100]   runs killed and stopped anywhere, and resumed

It prints held / tried for each category, and what did not hold. A category is a function that yields cases; a case is
what was given, and a call that works, raises `InputError`, or returns an exit code and what went to standard error.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import hypothesis
import jax
import numpy as np
import yaml
from hypothesis import strategies as st

import lehr
from lehr import cli, config
from lehr.errors import InputError
from lehr.schedules import constant
from lehr.training import checkpoint, plan, program

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import faults_interruptions

from tests.schedules.strategies import texts

SECONDS = 5.0
"""No input may take longer, in CPU time, so that other processes do not matter."""
LONGEST = 2010
"""Characters of an error message."""
EXPECTED = ("RunFailed", "EnvironmentFailed", "CheckpointError")
"""Lehr's own errors at run time, which are one sentence and exit code 1."""


class Case(NamedTuple):
    """What is given, in a few words, and a call with it."""

    given: str
    call: Callable[[], Any]


class Enough(Exception):
    """Raised in place of compiling: the input was accepted."""


Cases = Iterator[Case]


def problem(case: Case, seconds: float = SECONDS) -> str | None:
    """Return what did not hold, or `None`."""
    begin = time.process_time()
    try:
        answer = case.call()
    except InputError as error:
        answer = 2, f"lehr: {error}\n"
    except Enough:
        answer = None
    except checkpoint.CheckpointError as error:
        answer = 1, f"lehr: CheckpointError: {error}\n"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {str(error)[:200]}"
    taken = time.process_time() - begin
    if taken > seconds:
        return f"took {taken:.1f} s"
    return _sentence(*answer) if isinstance(answer, tuple) else None


def _sentence(code: int, err: str) -> str | None:
    """Whether an exit code and an error message are as they should be."""
    line = err.rstrip("\n").splitlines()[-1] if err.strip() else ""
    if "Traceback" in err:
        return f"traceback: {line[:200]}"
    if code == 0 or line.startswith("lehr: Enough:"):
        return None
    if code == 1 and line.removeprefix("lehr: ").startswith(EXPECTED):
        return None
    if code != 2:
        return f"exit code {code}: {line[:200]}"
    if not line.startswith("lehr: ") or err.count("lehr: ") < 1 or len(line) > LONGEST:
        return f"not one sentence ({len(line)} characters): {line[:200]}"
    return None


def command(*words: Any) -> tuple[int, str]:
    """Run a command in this process; return its exit code and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as end:
            code = int(end.code or 0)
    return code, err.getvalue()


@contextlib.contextmanager
def nothing_is_compiled() -> Iterator[None]:
    """Networks are only shapes, and a run ends where its initial state would be compiled."""

    def enough(*_: Any) -> None:
        raise Enough

    networks: Any = importlib.import_module("lehr.networks.build")  # the package has a function of that name
    really = networks._initialise
    shapes = mock.patch.object(networks, "_initialise", lambda make, key: jax.eval_shape(partial(really, make), key))
    with shapes, mock.patch.object(program, "initial_state", enough), mock.patch.object(plan, "complete", enough):
        yield


# Generated input ---------------------------------------------------------------------------------------------------

ATOMS = (
    "1e9999999", "1e400", "1e39", "-1", "0", "nan", "inf", "-inf", "1e-60", "9" * 5000, "0x" + "f" * 5000, "1_000",
    "٣", "½", "1e", ".", "->", "→", "- >", "%", "101%", "1e30%", ",", ",,", "(", ")", "((((((", "=", ":", "::",
    ".os:path", "math:pi", "builtins:int", "os:system", "lehr:train", "lehr.envs:make", "module:", ":Name", "a:b:c",
    "gym:", "gym:x", "gym::", "", " ", "\t", "\n", "\r\n", "\x00", "\x1b[31m", "é", "𝟙", "\ud800", "'", '"', "\\",
    "$", "$x$", "{", "}", "[", "]", "[]", "{}", "None", "null", "true", "no", "warmup", "from", "over", "until",
    "repeat", "repeat 1e9", "repeat 1e400", "at", "step", "cosine", "polynomial", "polynomial(1e30)", "exponential",
    "k", "M", "B", "1kk", "2.5M", "plateau(", "plateau(0.1)", "auto(target_entropy=1)", "adaptive_kl(1, target=0)",
    "kl_penalty(1e400)", "<function f>", "<object>", "x" * 10_000, "1," * 1000, "[" * 2000, "18446744073709551616",
    "3.5e38", "1e30", "-9223372036854775809", "/", "..", "~", "a/b", "--", "-", "--env", "@file", "#", "&a", "*a",
    "!!int x", "!!python/name:os.system", "2001-99-99", "1:60:60", "0b2", "0o9", "? a", "- a", "|", ">", "a: b: c",
    "<<: 1",
)  # fmt: skip

VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.sampled_from([63, 64, 1400, 17000]).map(lambda bits: 2**bits),
        st.floats(), st.text(max_size=8), st.sampled_from(ATOMS), texts(),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(ATOMS), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def drawn(strategy: st.SearchStrategy[Any], count: int, seed: int) -> list[Any]:
    """Draw examples of a hypothesis strategy, the same ones for the same seed."""
    found: list[Any] = []
    health = list(hypothesis.HealthCheck)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=health,
    )
    @hypothesis.given(strategy)
    def take(example: Any) -> None:
        found.append(example)

    take()
    return found[:count]


def mutated(text: str, chance: random.Random) -> str:
    """Change a text in a few places: cut, double, swap or replace a piece, or insert something hostile."""
    for _ in range(chance.randint(1, 3)):
        begin, end = sorted(chance.randint(0, len(text)) for _ in range(2))
        piece = text[begin:end]
        choices = ["", piece * 2, piece[::-1], chance.choice(ATOMS), piece + chance.choice(ATOMS), piece.upper()]
        text = text[:begin] + chance.choice(choices) + text[end:]
    return text


def schedule_texts(count: int, seed: int) -> Cases:
    """Lines of the grammar, valid and mutated, bound to a budget, evaluated, printed and parsed again."""
    chance = random.Random(seed)
    valid = drawn(texts(), count // 4 + 1, seed)
    lines = [*ATOMS, *valid]
    while len(lines) < count:
        lines.append(mutated(chance.choice(valid), chance))
    budgets = (1, 1000, 1e6, 2**48, 10**400, "1M", 0, -1, float("nan"), None)

    def use(text: str, budget: Any) -> None:
        made: Any = lehr.schedule(text)
        assert str(lehr.schedule(str(made))) == str(made)
        bound = made.bind(budget) if budget is not None else made
        if hasattr(bound, "phases") and bound.is_bound:
            [bound(step) for step in (0, 1, 500, 10**9)]

    for line in lines[:count]:
        budget = chance.choice(budgets)
        yield Case(f"schedule({line[:60]!r}, {str(budget)[:20]})", partial(use, line, budget))


def mappings(count: int, seed: int) -> Cases:
    """Mappings, points and other objects, as schedules and as the settings of algorithms."""
    chance = random.Random(seed)
    classes = {name: plan.settings_classes(name) for name in ("ppo", "impala", "ppg")}
    keys = ["shape", "start", "end", "power", "warmup", "from", "over", "until", "repeat"]
    values = drawn(VALUES, count, seed)

    def construct(settings: list[type], given: dict[str, Any]) -> None:
        made = config.build(settings, given)
        config.to_mapping(*made)
        for one in made:
            config.coefficients(one, 1e6)

    for number in range(count):
        value = chance.choice(values)
        if number % 3 == 0:
            spec: Any = {chance.choice(keys): chance.choice(values) for _ in range(chance.randint(1, 5))}
            spec = {"start": 1, "end": 0} | spec if chance.random() < 0.5 else spec
        elif number % 3 == 1:
            spec = [[chance.choice(values), chance.choice(values)] for _ in range(chance.randint(0, 3))]
        else:
            name, settings = chance.choice(list(classes.items()))
            known = [field.name for one in settings for field in config.describe(one)]
            given = {chance.choice(known): chance.choice(values) for _ in range(chance.randint(1, 3))}
            yield Case(f"{name} with {_short(given)}", partial(construct, settings, given))
            continue
        spec = chance.choice([spec, spec, value])
        yield Case(f"schedule({_short(spec)})", partial(lehr.schedule, spec, 1e6))


def yaml_files(count: int, seed: int) -> Cases:
    """Config files: those of a run, mutated, and hostile ones; read, and built as `lehr train --config` does."""
    chance = random.Random(seed)
    classes = plan.settings_classes("ppo")
    sound = yaml.safe_dump({"algorithm": "ppo", **config.to_mapping(*config.build(classes, {}))}, sort_keys=False)
    lines = sound.splitlines(keepends=True)
    path = Path(tempfile.mkdtemp()) / "config.yaml"

    def read(content: bytes) -> tuple[int, str]:
        path.write_bytes(content)
        with nothing_is_compiled():
            return command("train", "--config", path, "--no-progress", "--run-dir", path.parent / "run")

    for number in range(count):
        few = "".join(["algorithm: ppo\n", *chance.sample(lines[1:], 3)])
        text = few if chance.random() < 0.3 else mutated(few if number % 4 else sound, chance)
        if chance.random() < 0.3:
            name = chance.choice(lines).partition(":")[0]
            text = f"algorithm: ppo\n{name}: {chance.choice(ATOMS)}\n"
        content = text.encode("utf-8", "surrogatepass")
        if chance.random() < 0.1:
            content = bytes(chance.randrange(256) if chance.random() < 0.02 else byte for byte in content)
        yield Case(f"--config with {content[-60:]!r}", partial(read, content))


def flags(count: int, seed: int) -> Cases:
    """Flags of the commands with hostile values; a run ends where it would be compiled."""
    chance = random.Random(seed)
    names = {
        algorithm: [field.name for one in plan.settings_classes(algorithm) for field in config.describe(one)]
        for algorithm in ("ppo", "impala", "trpo", "recurrent_ppo")
    }
    others = (
        ("schedule", "1 -> 0", "--width"), ("schedule", "1 -> 0", "--height"), ("schedule", "1 -> 0", "--total"),
        ("schedule", "1 -> 0", "--at"), ("schedule", "1 -> 0", "--plot"), ("schedule",), ("list",),
        ("list", "runs", "--root"), ("eval", "none", "--episodes"), ("eval",), ("play", "none", "--max-steps"),
        ("plot",), ("plot", "none", "--out"), ("resume",), ("train",), ("train", "ppo"),
        ("train", "ppo", "--config"), ("train", "ppo", "--from"), ("train", "ppo", "--run-dir"), (), ("check-env",),
    )  # fmt: skip
    numbers = ("0", "1", "2", "8", "1e9", "1e30", "2147483648", "4294967296", "-5", "0.5", "64,64", "1e6,1e6", "1e5")

    def run(words: list[str]) -> tuple[int, str]:
        here = os.getcwd()
        os.chdir(tempfile.mkdtemp())
        try:
            with nothing_is_compiled():
                return command(*words)
        finally:
            os.chdir(here)

    for _ in range(count):
        value = chance.choice(ATOMS if chance.random() < 0.6 else numbers)
        value = value.replace("\x00", "")  # which no argument of a process can contain
        if chance.random() < 0.3:
            words = [*chance.choice(others), value]
        else:
            algorithm = chance.choice(list(names))
            words = ["train", algorithm, f"--{chance.choice(names[algorithm]).replace('_', '-')}", value]
        yield Case(f"lehr {_short(words)}", partial(run, words))


def _short(thing: Any) -> str:
    with contextlib.suppress(ValueError):  # integers that Python does not print
        return repr(thing)[:100]
    return f"a {type(thing).__name__} with a huge number"


INPUTS: dict[str, Callable[[int, int], Cases]] = {
    "schedule texts": schedule_texts,
    "mappings": mappings,
    "YAML files": yaml_files,
    "flags": flags,
}


def inputs(count: int, seed: int = 0) -> dict[str, list[str | None]]:
    """Try so many generated inputs, in equal parts; return what did not hold of each category, `None` where it held."""
    constant(1)(jax.numpy.float32(1))  # what the first call compiles is not the input's
    found: dict[str, list[str | None]] = {}
    for name, category in INPUTS.items():
        found[name] = [_told(case) for case in category(-(-count // len(INPUTS)), seed)]
    return found


def _told(case: Case, seconds: float = SECONDS) -> str | None:
    wrong = problem(case, seconds)
    return None if wrong is None else f"{case.given}: {wrong}"


# Damaged runs ------------------------------------------------------------------------------------------------------

RUN = {"num_envs": 4, "horizon": 8, "epochs": 1, "minibatches": 2, "hidden_sizes": "8", "evaluate_episodes": 2}
STEPS = 32


def sound_run(path: Path) -> Path:
    """Train a small run."""
    words = [word for name, value in RUN.items() for word in (f"--{name.replace('_', '-')}", value)]
    code, err = command("train", "ppo", *words, "--total-steps", 4 * STEPS, "--no-progress", "--run-dir", path)
    assert code == 0, err
    return path


def _numbers(content: bytes, number: str) -> bytes:
    """JSON with every number replaced."""

    def replaced(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: replaced(value) for name, value in tree.items()}
        if isinstance(tree, list):
            return [replaced(value) for value in tree]
        return "NUMBER" if isinstance(tree, int | float) and not isinstance(tree, bool) else tree

    lines = [
        json.dumps(replaced(json.loads(line))) for line in ([content] if b"\n " in content else content.splitlines())
    ]
    return "\n".join([*lines, ""]).replace('"NUMBER"', number).encode()


def _cut(share: float, content: bytes) -> bytes:
    return content[: int(share * len(content))]


def _flipped(place: float, content: bytes) -> bytes:
    at = min(int(place * len(content)), len(content) - 1)
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :] if content else b"\xff"


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut in half": partial(_cut, 0.5),
    "without its last byte": lambda content: content[:-1],
    "with a flipped byte": partial(_flipped, 0.3),
    "zeroed": lambda content: bytes(len(content)),
    "not UTF-8": lambda content: b"\xff\xfe" + content,
    "another JSON": lambda content: b"[1, 2, 3]\n",
    "nested deeply": lambda content: b"[" * 100_000,
    "doubled": lambda content: 2 * content,
    "with NaN": partial(_numbers, number="NaN"),
    "with huge numbers": partial(_numbers, number="1e400"),
    "with huge whole numbers": partial(_numbers, number="9" * 400),
    "with negative numbers": partial(_numbers, number="-1"),
    "with texts": partial(_numbers, number='"x"'),
}


def damages(run: Path, file: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Name and function of each damage to one file of a run."""

    def rewrite(change: Callable[[bytes], bytes]) -> None:
        file.write_bytes(change(file.read_bytes()))

    for name, change in CONTENTS.items():
        if not name.startswith("with ") or file.suffix in (".json", ".jsonl") or "byte" in name:
            yield name, partial(rewrite, change)

    def replace(make: Callable[[], object]) -> None:
        file.unlink()
        make()

    yield "missing", file.unlink
    yield "a directory", lambda: replace(file.mkdir)
    yield "a broken link", lambda: replace(lambda: file.symlink_to(run / "nowhere"))
    yield "a link to itself", lambda: replace(lambda: file.symlink_to(file))
    yield "a link to /dev/null", lambda: replace(lambda: file.symlink_to("/dev/null"))


def damaged_runs(count: int, seed: int) -> Iterator[Case]:
    """Every file of a run damaged in every way, as many as `count`, in random order; each read by every command."""
    place = Path(tempfile.mkdtemp())
    origin = sound_run(place / "sound")
    files = [path.relative_to(origin) for path in sorted(origin.rglob("*")) if path.is_file()]
    ways = [(file, name) for file in files for name, _ in damages(origin, origin / file)]
    random.Random(seed).shuffle(ways)
    readers: dict[str, Callable[[Path], Any]] = {
        "list runs": lambda run: command("list", "runs", "--root", run.parent),
        "plot": lambda run: command("plot", run, "--out", place / "curve.png"),
        "load": lambda run: lehr.load(run) and None,
        "eval": lambda run: command("eval", run, "--episodes", 1),
        "resume": lambda run: command("resume", run, "--no-progress"),
    }
    for file, name in ways[: max(1, count // len(readers))]:
        run = shutil.copytree(origin, place / "runs" / "damaged")
        dict(damages(run, run / file))[name]()
        for reader, read in readers.items():
            yield Case(f"{reader} with {file} {name}", partial(read, run))
        shutil.rmtree(place / "runs")
    shutil.rmtree(place)


def directories(count: int, seed: int = 0) -> dict[str, list[str | None]]:
    """Read damaged runs with every command; return what did not hold, `None` where it held."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"damaged runs": [_told(case, 60.0) for case in damaged_runs(count, seed)]}


# Damaged checkpoints -----------------------------------------------------------------------------------------------


def damaged_checkpoints(count: int, seed: int) -> Iterator[Case]:
    """The last checkpoint of a run with one part of a file overwritten, part by part: an intact one must be loaded."""
    chance, place = random.Random(seed), Path(tempfile.mkdtemp())
    origin = sound_run(place / "sound")
    sound = {_bits(origin)}
    last = sorted((origin / "checkpoints").iterdir())[-1].relative_to(origin)
    shutil.copytree(origin, place / "older")
    shutil.rmtree(place / "older" / last)
    sound.add(_bits(place / "older"))
    files = [path.relative_to(origin) for path in sorted((origin / last).iterdir())]
    share = -(-count // len(files))
    for file in files:
        content = (origin / file).read_bytes()
        size = -(-len(content) // share)
        for begin in range(0, len(content), size):
            damage = chance.randbytes(len(content[begin : begin + size]))
            run = shutil.copytree(origin, place / "damaged")
            (run / file).write_bytes(content[:begin] + damage + content[begin + size :])
            yield Case(f"{file} from byte {begin}", partial(_check_loaded, run, sound))
            shutil.rmtree(run)
    shutil.rmtree(place)


def _bits(run: Path) -> bytes:
    """All bits of the state of a run."""
    state = lehr.load(run).state.saved
    keys = jax.tree.map(lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key), state)
    plain = jax.tree.map(lambda x, is_key: jax.random.key_data(x) if is_key else x, state, keys)
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain))


def _check_loaded(run: Path, sound: set[bytes]) -> None:
    if _bits(run) not in sound:
        raise AssertionError("the state that was loaded is of no checkpoint")


def checkpoints(count: int, seed: int = 0) -> dict[str, list[str | None]]:
    """Load runs with a damaged checkpoint; return what did not hold, `None` where it held."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"checkpoints": [_told(case, 60.0) for case in damaged_checkpoints(count, seed)]}


def interruptions(count: int, seed: int = 0) -> dict[str, list[str | None]]:
    """Interrupt runs; see `bench/faults_interruptions.py`, which prints what did not hold."""
    held, tried = faults_interruptions.campaign(count, seed=seed)
    return {"interruptions": [None] * held + ["see above"] * (tried - held)}


# The command -------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, tuple[Callable[[int, int], dict[str, list[str | None]]], int]] = {
    "inputs": (inputs, 2000),
    "directories": (directories, 200),
    "checkpoints": (checkpoints, 200),
    "interruptions": (interruptions, 100),
}
"""What can be tried, with the default count."""


def main() -> int:
    """Print held / tried, and what did not hold; exit with 1 if anything did not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=list(SECTIONS))
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    section, count = SECTIONS[arguments.section]
    failures = 0
    for name, results in section(count if arguments.count is None else arguments.count, arguments.seed).items():
        wrong = [result for result in results if result is not None]
        for result in wrong:
            print(f"  {result!r}")
        print(f"{name:<16} {len(results) - len(wrong)} / {len(results)}", flush=True)
        failures += len(wrong)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
