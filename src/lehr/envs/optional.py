"""Packages that only some environments need: imported when they are asked for, and missed in one sentence."""

import importlib
import warnings
from types import ModuleType

from lehr.errors import InputError


def load(package: str, extra: str) -> ModuleType:
    """Import a package, or say how to get it.

    Args:
        package: what to import, `brax.envs` for example.
        extra: the extra of Lehr that installs it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what others deprecate is not the user's affair
            return importlib.import_module(package)
    except ImportError as error:
        root = package.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == root:
            raise InputError(
                f"This environment needs the package {root}, which is not installed: pip install 'lehr[{extra}]'."
            ) from None
        raise InputError(
            f"The package {root} is installed but does not import ({error}): pip install 'lehr[{extra}]' brings "
            "versions that work together."
        ) from error
