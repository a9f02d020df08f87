"""What a plugin needs, in one import: `from posbench.plugin import Encoding, Hooks, ...`.

A plugin is a Python file with an encoding of somebody's own; `posbench new-encoding NAME` writes
one, `posbench check-encoding NAME.py` says which promises it keeps.
"""

from __future__ import annotations

from posbench.config.encodings import EncodingConfig
from posbench.config.fields import setting
from posbench.encodings.base import Encoding, Generators, Hooks, Shape, precise
from posbench.encodings.bias import ByDistance, per_head
from posbench.errors import UnsupportedError, UserError

__all__ = [
    "ByDistance",
    "Encoding",
    "EncodingConfig",
    "Generators",
    "Hooks",
    "Shape",
    "UnsupportedError",
    "UserError",
    "per_head",
    "precise",
    "setting",
]
