"""Code from outside Lehr: optional packages, and the user's own code, named as `module:Name`.

A name that the user types, on the command line or in a call, is imported. A name found in a file, such as the config
of a run, is imported only if it is part of Lehr or of an installed suite; otherwise the author of the file could run
any code here; unless this process runs it already. See SECURITY.md.
"""

import functools
import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from lehr.errors import InputError, quoted, shortened

ADAPTERS = {
    "brax": ("suites", "brax"),
    "craftax": ("suites", "craftax"),
    "envpool": ("host", "envpool"),  # before gym, because its environments are also Gymnasium vector environments
    "gym": ("host", "gymnasium"),
    "gymnax": ("suites", "gymnax"),
    "jaxdem": ("suites", "jaxdem"),
    "jumanji": ("suites", "jumanji"),
    "pettingzoo": ("host", "pettingzoo"),
    "pgx": ("suites", "pgx"),
    "playground": ("suites", "mujoco_playground"),
}
"""Prefixes of other ecosystems, as in `PREFIX:NAME`: the folder of the adapter, and the package it adapts."""

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_FILE = re.compile(r"[^\s,=:]+\.py(?=:[A-Za-z_])")
"""The file in `path/to/mine.py:Name`."""

_in_use: set[str] = set()
"""Names of the user's own code that runs of this process use."""


def require(package: str, extra: str, what: str = "This environment") -> ModuleType:
    """Import an optional package, or raise an error that says how to install it.

    Args:
        package: the package to import, `brax.envs` for example.
        extra: Lehr's extra that installs it.
        what: what needs it, for the error message.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hide the package's deprecation warnings from the user
            return importlib.import_module(package)
    except ImportError as error:
        root = package.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == root:
            raise InputError(
                f"{what} needs the package {root}, which is not installed: pip install 'lehr[{extra}]'."
            ) from None
        raise InputError(
            f"The package {root} is installed but cannot be imported ({error}): pip install 'lehr[{extra}]' installs "
            "compatible versions."
        ) from error


def is_reference(text: Any) -> bool:
    """Whether a text has the form `module:Name`.

    >>> is_reference("my_package.tasks:Maze"), is_reference("CartPole-v1"), is_reference("::")
    (True, False, False)
    """
    return isinstance(text, str) and _REFERENCE.fullmatch(text) is not None


def with_modules(text: str) -> str:
    """Return a text that the user typed with `module:Name` for each `path/to/mine.py:Name` whose file exists.

    That is the name which a run saves, and which another process finds in the same working directory.

    >>> with_modules("mine:Mine"), with_modules("--env=there/is/no/such.py:Maze")
    ('mine:Mine', '--env=there/is/no/such.py:Maze')
    """
    return _FILE.sub(lambda match: _module_of(match[0]), text)


def refuse_file(what: str, given: str) -> None:
    """Raise an error for `mine.py` or `path/to/mine.py:Name` in the place of a name.

    On the command line, the latter is no longer there if the file exists; see `with_modules`.

    Args:
        what: what is named, for the error message.
        given: its name, as the user gave it.
    """
    match = re.fullmatch(r"([^:]+\.py)(?::(.+))?", given)
    if match is None:
        return
    if not os.path.isfile(match[1]):  # also of a text that is too long for a path
        raise InputError(
            f"There is no file {quoted(match[1])} for the {what} {quoted(given)}; correct the path, or give "
            "'module:Name'."
        )
    module = _module_of(match[1])
    name = match[2] or "".join(part[:1].upper() + part[1:] for part in module.rpartition(".")[2].split("_"))
    raise InputError(
        f"The {what} {quoted(given)} is named by a file; name it by its module, as in {quoted(f'{module}:{name}')}."
    )


def _module_of(file: str) -> str:
    """The module of a file below the working directory; the file itself if there is none."""
    path = Path(os.path.abspath(file))
    if not os.path.isfile(path):
        return file
    folder = next((folder for folder in path.parents if folder.samefile(Path.cwd())), None)  # maybe through a link
    if folder is None:
        raise InputError(f"The file '{file}' is outside the working directory; run lehr in the file's folder.")
    parts = path.relative_to(folder).with_suffix("").parts
    for part in parts:
        if not part.isidentifier():
            raise InputError(
                f"Python cannot import the file '{file}', because {part!r} is not a Python name; rename it, for "
                f"example to {re.sub(r'^(?=[0-9])|[^0-9A-Za-z_]', '_', part)!r}."
            )
    is_package = len(parts) > 1 and parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    if module in ADAPTERS:
        raise InputError(f"The file '{file}' has the name of a suite of environments, '{module}:'; rename it.")
    spec = _spec_of(module)
    found = spec.origin if spec is not None and spec.has_location else None
    if found is None or Path(found).resolve() != path.resolve():
        other = origin(module) if found is None else f"'{found}'"
        raise InputError(
            f"The file '{file}' cannot be imported as {module!r}, because Python finds {other} first; choose another "
            f"name than {parts[0]!r}."
        )
    return module


def import_object(reference: str, what: str) -> Any:
    """Import the object `module:Name`.

    >>> import_object("math:pi", "number")
    3.141592653589793
    """
    refuse_file(what, reference)
    if not is_reference(reference):
        raise InputError(
            f"The {what} {quoted(reference)} is not of the form 'module:Name', such as 'my_package.tasks:Maze'; "
            "correct it."
        )
    module, _, path = reference.partition(":")
    try:
        found = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        missing = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if missing and not f"{module}.".startswith(f"{missing}."):
            root = missing.partition(".")[0]
            package = next((f"lehr[{extra}]" for extra, (_, theirs) in ADAPTERS.items() if theirs == root), root)
            raise InputError(
                f"The {what} {quoted(reference)} needs the package {root}, which is not installed: pip install "
                f"'{package}'."
            ) from error
        raise InputError(
            f"The {what} {quoted(reference)} could not be imported ({error}); give 'module:Name' with a module that "
            "Python finds and a name in it."
        ) from error
    return found


def text_of(thing: Any) -> str:
    """Return the text that a file stores for an object: its name, `module:Name`, or a description in angle brackets.

    >>> import math
    >>> text_of("adam"), text_of(math.sqrt), text_of(lambda x: x)
    ('adam', 'math:sqrt', '<function <lambda>>')
    """
    if isinstance(thing, str):
        return thing
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if module and name and module != "__main__" and is_reference(reference := f"{module}:{name}"):
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is thing:
            return reference
    kind = "function" if callable(thing) and not isinstance(thing, type) and name else "object"
    return f"<{kind} {name or type(thing).__name__}>"


def is_placeholder(text: Any) -> bool:
    """Whether a text is the description of an object that cannot be saved in a file.

    >>> is_placeholder("<function cosine>"), is_placeholder("0.1 -> 0")
    (True, False)
    """
    return isinstance(text, str) and text.startswith("<") and text.endswith(">")


def is_plain(thing: Any) -> bool:
    """Whether a file can hold this: numbers, texts, truth values, `None`, and lists and mappings of them.

    >>> is_plain({"sizes": (3, 4), "mode": None}), is_plain({"body": object()})
    (True, False)
    """
    if isinstance(thing, Mapping):
        return all(isinstance(name, str) and is_plain(value) for name, value in thing.items())
    if isinstance(thing, list | tuple):
        return all(map(is_plain, thing))
    return thing is None or type(thing) in (bool, int, float, str)


def offered(group: str) -> dict[str, metadata.EntryPoint]:
    """Return what installed packages register in one of Lehr's entry-point groups, by name, without importing it."""
    return {point.name: point for point in _entry_points(group, tuple(sys.path))}


@functools.lru_cache(maxsize=16)
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[metadata.EntryPoint, ...]:
    """The entry points of a group, which take milliseconds to find, for one state of `sys.path`."""
    return tuple(metadata.entry_points(group=group))


def own_code(text: Any) -> str | None:
    """Return the module outside Lehr that a text names, as `module:Name` or as a call, `module:Name(...)`.

    >>> own_code("my_package:Mine"), own_code("my_package:Mine(0.1)"), own_code("0.1 -> 0 over 10%"), own_code("adam")
    ('my_package', 'my_package', None, None)
    """
    if not isinstance(text, str):
        return None
    called = text.partition("(")[0].strip()
    module = called.partition(":")[0]
    return module if is_reference(called) and not is_lehrs(module) else None


def remember(names: Iterable[str]) -> None:
    """Remember names of the user's own code that a run of this process uses, since the user gave or trusted them."""
    _in_use.update(names)


def is_in_use(name: str, module: str) -> bool:
    """Whether a run of this process uses this name of the user's own code, so that importing it runs nothing new."""
    return name in _in_use and module in sys.modules


def is_lehrs(module: str) -> bool:
    """Whether a module is part of Lehr."""
    return module.partition(".")[0] == "lehr"


def origin(module: str) -> str:
    """Describe the file that importing a module would run, without running anything."""
    root = module.partition(".")[0]
    spec = _spec_of(root)
    if spec is None:
        return "a module that is not installed"
    if spec.has_location:
        return f"'{spec.origin}'"
    if spec.submodule_search_locations:
        return f"the folder '{next(iter(spec.submodule_search_locations))}'"
    return "a module of Python itself" if spec.origin else f"the module {root!r}"


def _spec_of(module: str) -> importlib.machinery.ModuleSpec | None:
    """Find what importing a module would run, in the working directory last, without running anything."""
    root, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(root)
    except ValueError:  # a module created in memory, already loaded
        return importlib.machinery.ModuleSpec(root, None)
    if spec is None or (spec.origin is None and spec.submodule_search_locations):  # other folders may belong to it
        spec = importlib.machinery.PathFinder.find_spec(root, [*sys.path, ""])
    for part in inner:
        if spec is not None:
            spec = importlib.machinery.PathFinder.find_spec(part, spec.submodule_search_locations or [])
    return spec


def refuse_untrusted(what: str, name: str, module: str, where: str, is_option: bool) -> None:
    """Raise an error for a name found in a file that would run code from outside Lehr.

    Args:
        what: the setting, `env` for example.
        name: its value.
        module: the module that would be imported.
        where: the file or run that contains it.
        is_option: whether the user can give the setting instead, as an option or an argument of that name.
    """
    shown = shortened(name)
    python = f" ({what}={shown.rpartition(':')[2]} in Python)" if is_reference(shown) else ""
    otherwise = f", or name it yourself with --{what} {shown}{python}" if is_option else ""
    raise InputError(
        f"{where} has {what}: {shown}, which would run code from {origin(module)}; if you trust it, pass "
        f"--trust (trust=True in Python){otherwise}."
    )
