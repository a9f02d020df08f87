"""What tutorials and papers say of text longer than that of training, in a form a number can meet.

A claim is its words, and limits that its words set on one ratio. The limits are chosen from what
the words mean, not from what was measured; `posbench/report/verdicts.py` holds numbers against
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Word -> limits of perplexity at the longest length over that at 1x. Praise says how much is lost
# at most, dispraise how much is lost at least. An encoding that is not defined there has infinity.
DEGREES: dict[str, tuple[float, float]] = {
    "very strong": (0.0, 1.05),
    "strong": (0.0, 1.25),
    "medium": (0.0, 2.0),
    "weak": (2.0, math.inf),
    "none": (10.0, math.inf),
}
MEANINGS = {
    "very strong": "perplexity holds, at most 5 % above its own at 1x",
    "strong": "at most a quarter above",
    "medium": "at most twice, which is one bit per token lost",
    "weak": "more than twice",
    "none": "more than ten times, not finite, or not defined at that length",
}
TUTORIAL = "tutorial"  # the one this project began with


@dataclass(frozen=True)
class Claim:
    """One thing said of an encoding or an extension."""

    about: str  # its id
    source: str  # TUTORIAL, or the key of a reference
    words: str
    degree: str = ""  # how the words are read: a key of DEGREES,
    than: str = ""  # or "lower perplexity than this one at the same length",
    unjudged: str = ""  # or why no perplexity of a run as it is can tell
    up_to: float = math.inf  # the longest length it speaks of, in training lengths

    @property
    def limits(self) -> tuple[float, float]:
        """Of the ratio to its own 1x, or to the perplexity of `than`: equal is not better."""
        return DEGREES[self.degree] if self.degree else (0.0, math.nextafter(1.0, 0.0))


_ADDED_TRAINING = "it is meant to be trained on at the longer length"
_TASKS = "it speaks of algorithmic tasks, not of perplexity"

ENCODING_CLAIMS = (
    Claim("none", "kazemnejad2023", "generalises best, on small tasks", unjudged=_TASKS),
    Claim("sinusoidal", TUTORIAL, "weak", "weak"),
    Claim("sinusoidal", "vaswani2017", "may extrapolate to longer sequences", "medium"),
    Claim("learned", TUTORIAL, "none", "none"),
    Claim("rope", TUTORIAL, "medium to strong", "medium"),
    Claim("alibi", TUTORIAL, "very strong", "very strong"),
    Claim("alibi", "press2022", "perplexity holds beyond the training length", "very strong"),
    Claim("alibi_learned", "press2022", "trained slopes did not extrapolate well", "weak"),
    Claim("rope_p", "barbero2024", "a better fit within the length", unjudged="not about length"),
    Claim("rope_abf", "xiong2023", "for longer contexts", unjudged=_ADDED_TRAINING),
    Claim("rope_local_global", "gemma2025", "for longer contexts", unjudged=_ADDED_TRAINING),
    Claim("fope", "hua2024", "more stable than RoPE on longer text", than="rope"),
    Claim(
        "xpos",
        "sun2022",
        "strong, with blockwise attention",
        unjudged="posbench evaluates without blockwise attention",
    ),
    Claim("pope", "gopalakrishnan2025", "strong without any change", "strong"),
    Claim("pope", "gopalakrishnan2025", "better than RoPE on longer text", than="rope"),
    Claim("t5", "press2022", "good to about twice the length", "strong", up_to=2),
    Claim("kerple_log", "chi2022", "very strong", "very strong"),
    Claim("kerple_power", "chi2022", "strong", "strong"),
    Claim("sandwich", "chi2023", "strong, without parameters", "strong"),
    Claim("fire", "li2024", "very strong", "very strong"),
    Claim("txl", "dai2019", "strong", unjudged="it needs a memory of earlier segments"),
    Claim("fox", "lin2025", "better than RoPE on longer text", than="rope"),
    Claim("cable", "veisi2025", "strong; 1024 to 8192 tokens", "strong", up_to=8),
    Claim("cope", "golovneva2024", "generalises better", unjudged=_TASKS),
    Claim("dape", "zheng2024dape", "strong; 128 to 8192 tokens", "strong", up_to=64),
    Claim("dape_v2", "zheng2024dapev2", "strong; 128 to 8192 tokens", "strong", up_to=64),
    Claim("stickbreak", "tan2025", "strong; 2048 to 16384 tokens", "very strong", up_to=8),
    Claim("path", "yang2025path", "strong up to 8 times the length", "strong", up_to=8),
    Claim("rnope", "yang2025rnope", "better than RoPE on longer text", than="rope"),
    Claim(
        "swan",
        "puvvada2025",
        "strong, with a temperature",
        unjudged="the claim is about eval.temperature, and this is the run as trained",
    ),
    Claim(
        "drope",
        "gelberg2025",
        "strong, with a temperature",
        unjudged="the claim is about eval.temperature, and this is the run as trained",
    ),
    Claim("randomized", "ruoss2023", "strong", unjudged=_TASKS),
    Claim("pose", "zhu2024", "works to the longest position drawn (4x)", "strong", up_to=4),
    Claim("ssmax", "nakanishi2025", "better than RoPE on longer text", than="rope"),
)

EXTENSION_CLAIMS = (
    Claim("pi", "chen2023", "for longer contexts, after tuning", unjudged=_ADDED_TRAINING),
    Claim("ntk", "bloc97", "no fine-tuning, minimal degradation", "strong"),
    Claim("ntk", "peng2023", "without tuning much better than PI", than="pi"),
    Claim("dynamic_ntk", "emozilla", "no fine-tuning needed", "strong"),
    Claim("yarn", "peng2023", "more than 2x without fine-tuning", "strong", up_to=2),
    Claim("yarn", "peng2023", "better than PI", than="pi"),
    Claim("yarn", "peng2023", "better than NTK-aware", than="ntk"),
    Claim("abf", "xiong2023", "for longer contexts", unjudged=_ADDED_TRAINING),
    Claim("llama3", "dubey2024", "for longer contexts", unjudged=_ADDED_TRAINING),
    Claim("longrope", "ding2024", "8x without fine-tuning, factors searched", "strong", up_to=8),
    Claim("rerope", "su2023rerope", "no fine-tuning needed", "strong"),
    Claim("leaky_rerope", "su2023rerope", "no fine-tuning needed", "strong"),
    Claim("self_extend", "jin2024", "no fine-tuning needed", "strong"),
    Claim("lm_infinite", "han2023", "no fine-tuning, any length", "very strong"),
    Claim("streaming", "xiao2023", "perplexity holds at any length", "very strong"),
    Claim("alibi_pi", "alkhateeb2023", "better than ALiBi alone", than="none"),
)
