"""The encodings by name. One file per family; `base.py` is the contract."""

from __future__ import annotations

from typing import Any

import torch

from posbench.config.encodings import ENCODINGS, EncodingConfig
from posbench.encodings.absolute import Learned, Sinusoidal
from posbench.encodings.base import Encoding, Hooks, Shape
from posbench.encodings.bias import Alibi, Sandwich
from posbench.encodings.fourier import Fope
from posbench.encodings.gates import Cable, Fox, Grape
from posbench.encodings.learned_bias import T5, AlibiLearned, Dpb, KerpleLog, KerplePower
from posbench.encodings.path import Path
from posbench.encodings.relative import Fire, Shaw, Txl
from posbench.encodings.rescoring import Cope, Dape
from posbench.encodings.rotary import Pope, Rope, RopeP, Xpos
from posbench.encodings.seeds import seeded
from posbench.encodings.stick import Stickbreak
from posbench.errors import UserError
from posbench.rules import check_ranges

CLASSES: dict[str, type[Encoding]] = {
    "none": Encoding,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rope": Rope,
    "rope_partial": Rope,
    "rope_p": RopeP,
    "rope_abf": Rope,
    "rope_local_global": Rope,
    "fope": Fope,
    "xpos": Xpos,
    "pope": Pope,
    "alibi": Alibi,
    "alibi_learned": AlibiLearned,
    "t5": T5,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "sandwich": Sandwich,
    "dpb": Dpb,
    "fire": Fire,
    "shaw": Shaw,
    "txl": Txl,
    "fox": Fox,
    "cable": Cable,
    "grape_ap": Grape,
    "cope": Cope,
    "dape": Dape,
    "dape_v2": Dape,
    "stickbreak": Stickbreak,
    "path": Path,
}


def build(
    encoding: EncodingConfig | str, shape: Shape, *, seed: int | None = None, **settings: Any
) -> Encoding:
    """An encoding from its settings, or from its id and the settings that differ from the default.

    Its parameters are not initialised unless a `seed` is given; they are then those of a posbench
    model of that seed, bit for bit. Raises UserError for an id or a setting that there is not.
    """
    config = _configured(encoding, settings) if isinstance(encoding, str) else encoding
    if settings and config is encoding:
        raise UserError(f"{next(iter(settings))} goes with an encoding's id; set it in the config.")
    if config.name not in CLASSES:
        raise UserError(f"{config.name!r} is not an encoding. Encodings: {', '.join(CLASSES)}.")
    built = CLASSES[config.name](config, shape)
    if seed is not None:
        with torch.no_grad():
            built.initialise(lambda name: seeded(seed, f"encoding.{name}"))
    return built


def _configured(name: str, settings: dict[str, Any]) -> EncodingConfig:
    if name not in ENCODINGS:
        raise UserError(f"{name!r} is not an encoding. Encodings: {', '.join(ENCODINGS)}.")
    try:
        config = ENCODINGS[name](**settings)
    except TypeError as error:
        raise UserError(f"encoding {name}: {error}.") from None
    check_ranges(config, f"{name}.")
    return config


__all__ = ["CLASSES", "Encoding", "Hooks", "Shape", "build"]
