"""Runs the code that pages, scripts and notebooks show, with small sizes instead of theirs."""

import contextlib
import io
import re
import shlex
import warnings
from dataclasses import fields
from pathlib import Path

import yaml

import lehr
from lehr import algorithms, config
from lehr.cli import main
from lehr.training.plan import RunConfig

SMALL = {
    "num_envs": 4,
    "horizon": 8,
    "minibatches": 2,
    "epochs": 1,
    "hidden_sizes": [8],
    "evaluate_episodes": 2,
    "tensorboard": False,
    "progress": False,
}
SHARE = 500
"""Budgets are divided by this."""
THEIRS = {"total_timesteps": "total_steps", "n_envs": "num_envs", "n_steps": "horizon", "n_epochs": "epochs"}
"""Names of another library for what is made smaller here."""
NOT_RUN = ("pip", "ray")
"""Commands that change the machine; they are read over."""
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)


def smaller(monkeypatch):
    """Let `lehr.train` and `lehr.resume` train little. The command line calls them too."""
    train, resume = lehr.train, lehr.resume

    def small_train(algorithm="ppo", env=None, **given):
        if given.keys() & THEIRS.keys():
            given = canonical(algorithm, given)
        known = {field.name for field in fields(algorithms.find(algorithm).Config)}
        fitting = {
            name: value for name, value in SMALL.items() if name in known or name not in ("minibatches", "epochs")
        }
        given |= {**fitting, "total_steps": steps(given.get("total_steps", 500_000))}
        if env is not None:
            given["env"] = env
        given["env"] = replaced(given.get("env", "CartPole-v1"))
        return train(algorithm, **given)

    def small_resume(run, **given):
        return resume(run, **given | {"total_steps": steps(given["total_steps"])})

    monkeypatch.setattr(lehr, "train", small_train)
    monkeypatch.setattr(lehr, "resume", small_resume)


def canonical(algorithm, given):
    """The settings under our names, which must mean the same as theirs."""
    classes = [RunConfig, *algorithms.settings_of(algorithm)]
    _, settings, *_ = config.build(classes, given)
    ours = {THEIRS.get(name, name): value for name, value in given.items() if name != "batch_size"}
    ours["minibatches"] = given["n_envs"] * given["n_steps"] // given["batch_size"]
    assert config.build(classes, ours)[1] == settings
    return ours


def steps(text):
    """A budget such as `150k`, divided."""
    number = str(text).replace("_", "")
    factor = {"k": 1e3, "M": 1e6}.get(number[-1], 1)
    return max(64, int(float(number.rstrip("kM")) * factor / SHARE))


def replaced(env):
    """Brax's smallest environment instead of those that take a minute to compile."""
    return "brax:fast" if isinstance(env, str) and env.startswith("brax:") else env


def small_sweep(definition):
    """A definition of a sweep with few members that train little."""
    settings = {**definition["settings"], **SMALL, "total_steps": steps(definition["settings"]["total_steps"]) + 256}
    settings = {name: value for name, value in settings.items() if name not in ("tensorboard", "progress")}
    return {**definition, "settings": settings, "samples": 4, "seeds": 2, "confirm": {"top": 1, "seeds": 2}}


def run_page(page: Path, names: dict) -> None:
    """Run the blocks of a page in order: write those with a title to files, execute Python, call commands."""
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert blocks
    for language, title, text in blocks:
        if title:
            Path(title).write_text(shrunk(title, text), encoding="utf-8")
        elif language == "python":
            exec(compile(text, page.name, "exec"), names)
        elif language == "sh":
            for line in text.splitlines():
                run_command(shlex.split(line, comments=True))
        else:
            assert language == "text", f"{page.name} has a block of {language} that nobody runs"


def commands(page: Path) -> list[list[str]]:
    """The words of each command of `lehr` in a page, without the first."""
    lines = [line for language, _, text in BLOCK.findall(page.read_text(encoding="utf-8")) for line in text.splitlines()
             if language == "sh"]  # fmt: skip
    return [words[1:] for words in map(shlex.split, lines) if words[0] == "lehr"]


def shrunk(title, text):
    if title.endswith(".yaml") and "samples" in text:
        return yaml.safe_dump(small_sweep(yaml.safe_load(text)))
    return text


def run_command(words):
    """Run a command of `lehr`, which must succeed."""
    if words[0] in NOT_RUN:
        return
    assert words[0] == "lehr", words
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(words[1:])
    assert code == 0, f"{shlex.join(words)}: {printed.getvalue()}"


@contextlib.contextmanager
def others_may_warn():
    """Warnings of other packages are not errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
