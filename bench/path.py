"""The way of one PPO update through the code: which files and functions are touched while it is traced.

    python bench/path.py

A file counts if one of its functions is called, a function by its lines, docstring included. Two groups are counted
apart, since whoever follows an update need not open them: what stands behind a protocol (the environment, the network,
the distribution of actions, the schedules, the reward model), and the vocabulary, which is the values that stages pass
to each other, and reductions over devices that return what they are given if there is one. Files that are entered from
more than one other file are listed with those.
"""

import collections
import inspect
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax

import lehr
from lehr.algorithms import ppo
from lehr.networks import NetworkConfig
from lehr.training.iteration import iteration
from lehr.training.program import assemble

ROOT = Path(lehr.__file__).parent
BEHIND = ("envs/", "networks/", "kernels/", "schedules/", "rewards/", "maths/distributions.py", "spaces.py", "masks.py")
"""What an update knows by its protocol alone."""
VOCABULARY = ("types.py", "maths/across.py")
"""What its stages have in common."""


def traced() -> tuple[set[CodeType], dict[str, set[str]]]:
    """The functions that are called while one default update is traced, and from which files each file is entered."""
    program, state = assemble("ppo", "CartPole-v1", ppo.Config(), NetworkConfig(), 500_000)
    jax.clear_caches()
    called: set[CodeType] = set()
    entered: dict[str, set[str]] = collections.defaultdict(set)

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not _is_ours(frame.f_code):
            return
        called.add(frame.f_code)
        caller = frame.f_back
        while caller is not None and not _is_ours(caller.f_code):
            caller = caller.f_back
        here = _file(frame.f_code)
        if caller is not None and _file(caller.f_code) != here:
            entered[here].add(_file(caller.f_code))

    sys.setprofile(watch)
    try:
        jax.eval_shape(lambda state: iteration(program, state), state)
    finally:
        sys.setprofile(None)
    return called, entered


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(str(ROOT))


def _file(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(ROOT))


def lines(called: set[CodeType]) -> int:
    """Lines of these functions, each line once: a function inside another is part of it."""
    touched: dict[str, set[int]] = collections.defaultdict(set)
    for code in called:
        source, first = inspect.getsourcelines(code)
        touched[_file(code)].update(range(first, first + len(source)))
    return sum(map(len, touched.values()))


def main() -> None:
    called, entered = traced()
    behind = {code for code in called if _file(code).startswith(BEHIND)}
    words = {code for code in called if _file(code).startswith(VOCABULARY)}
    parts = {"on the way": called - behind - words, "vocabulary": words, "behind a protocol": behind}
    for title, part in parts.items():
        files = sorted({_file(code) for code in part})
        print(f"{title}: {len(files)} files, {len(part)} functions, {lines(part)} lines")
        for file in files:
            mine = {code for code in part if _file(code) == file}
            print(f"  {file:32} {lines(mine):4} lines   from {', '.join(sorted(entered[file])) or 'here'}")


if __name__ == "__main__":
    main()
