"""Dataclass ↔ mapping ↔ YAML ↔ command line: several frozen dataclasses as one flat namespace.

>>> from dataclasses import dataclass
>>> from typing import Annotated
>>> from lehr.schedules import Coefficient
>>> @dataclass(frozen=True)
... class Config:
...     entropy_coef: Annotated[Coef, Coefficient(aliases=("ent_coef",))] = 0.01
...     num_envs: int = 8
>>> (config,) = build([Config], {"ent-coef": "0.03 -> 0.001", "num_envs": "4k"})
>>> config
Config(entropy_coef='0.03 -> 0.001', num_envs=4000)
>>> coefficients(config, total_steps=1000)["entropy_coef"](500)
0.0155
"""

from lehr.config.build import (
    build,
    canonical,
    coefficients,
    merge,
    parse,
    to_mapping,
    underscored,
    with_coefficients,
    with_preset,
)
from lehr.config.fields import (
    AutoBool,
    Coef,
    CountOrAll,
    CountOrAuto,
    FieldDescription,
    HashableDict,
    Plugin,
    check_counts,
    count_of,
    describe,
)
from lehr.config.files import checked_yaml, from_yaml, to_yaml
from lehr.config.flags import add_flags, given_flags, help_of, refuse_unknown
from lehr.config.spelling import Conversion, Names

__all__ = [
    "AutoBool",
    "Coef",
    "Conversion",
    "CountOrAll",
    "CountOrAuto",
    "FieldDescription",
    "HashableDict",
    "Names",
    "Plugin",
    "add_flags",
    "build",
    "canonical",
    "check_counts",
    "checked_yaml",
    "coefficients",
    "count_of",
    "describe",
    "from_yaml",
    "given_flags",
    "help_of",
    "merge",
    "parse",
    "refuse_unknown",
    "to_mapping",
    "to_yaml",
    "underscored",
    "with_coefficients",
    "with_preset",
]
