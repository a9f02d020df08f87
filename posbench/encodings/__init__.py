"""The encodings by name. One file per family; `base.py` is the contract."""

from __future__ import annotations

from posbench.config.encodings import EncodingConfig
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
from posbench.encodings.stick import Stickbreak

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


def build(config: EncodingConfig, shape: Shape) -> Encoding:
    """The encoding that `config` names, with its parameters not yet initialised."""
    return CLASSES[config.name](config, shape)


__all__ = ["CLASSES", "Encoding", "Hooks", "Shape", "build"]
