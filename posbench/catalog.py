"""What there is to choose from, in words and without torch: `posbench list` and `--help`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EncodingCard:
    """One encoding as `posbench list encodings --json` prints it."""

    id: str
    family: str
    summary: str
    form: str  # which part of the contract it uses
    parameters: (
        str  # formula of settings, L training length, C width, H heads, D head size, N layers
    )
    max_length: str
    cost: str
    extrapolation_claim: str  # what its paper, or the tutorial this project began with, says
    used_by: str
    paper: str


@dataclass(frozen=True)
class ExtensionCard:
    """One context extension as `posbench list extensions --json` prints it."""

    id: str
    summary: str
    formula: str
    applies_to: str
    length_dependent: str
    paper: str


# What a rule for inverse frequencies applies to.
ROTARY = "rope, rope_partial, rope_p, rope_abf, xpos, pope"

# What a rule for positions applies to: where a rotation alone decides the score.
ROTATION = "rope, rope_partial, rope_p, rope_abf"

ENCODING_CARDS = (
    EncodingCard(
        id="none",
        family="absolute",
        summary="no positional encoding; the causal mask alone orders the tokens",
        form="nothing",
        parameters="0",
        max_length="none",
        cost="none",
        extrapolation_claim="better than explicit encodings on small synthetic tasks",
        used_by="some layers of Llama 4, SmolLM3 and Command R7B",
        paper="Haviv et al. 2022, arXiv:2203.16634; Kazemnejad et al. 2023, arXiv:2305.19466",
    ),
    EncodingCard(
        id="sinusoidal",
        family="absolute",
        summary="fixed sines and cosines of the position, added to the embeddings",
        form="embed",
        parameters="0",
        max_length="none",
        cost="one addition per token",
        extrapolation_claim="weak",
        used_by="the original Transformer",
        paper="Vaswani et al. 2017, arXiv:1706.03762",
    ),
    EncodingCard(
        id="learned",
        family="absolute",
        summary="one trained vector per position; undefined beyond the training length",
        form="embed",
        parameters="L*C",
        max_length="training length",
        cost="one look-up per token",
        extrapolation_claim="none",
        used_by="GPT-2, BERT, OPT",
        paper="Radford et al. 2019 (GPT-2)",
    ),
    EncodingCard(
        id="rope",
        family="rotary",
        summary="rotate pairs of query and key channels by an angle that grows with position",
        form="rotate",
        parameters="0",
        max_length="none",
        cost="two rotations per layer",
        extrapolation_claim="medium to strong",
        used_by="Llama, Mistral, Qwen, Gemma, GPT-NeoX",
        paper="Su et al. 2021, arXiv:2104.09864",
    ),
    EncodingCard(
        id="rope_partial",
        family="rotary",
        summary="RoPE on the leading channels of a head; the others carry no position",
        form="rotate",
        parameters="0",
        max_length="none",
        cost="two rotations of a part of each head per layer",
        extrapolation_claim="none of its own; as RoPE",
        used_by="GPT-J, GPT-NeoX, Pythia, Phi",
        paper="Black et al. 2022 (GPT-NeoX-20B), arXiv:2204.06745",
    ),
    EncodingCard(
        id="rope_p",
        family="rotary",
        summary="RoPE whose slowest pairs do not turn: channels for meaning alone",
        form="rotate",
        parameters="0",
        max_length="none",
        cost="two rotations per layer",
        extrapolation_claim="none beyond the training length; a lower perplexity within it",
        used_by="Gemma 4, in layers with full attention",
        paper="Barbero et al. 2024, arXiv:2410.06205",
    ),
    EncodingCard(
        id="rope_abf",
        family="rotary",
        summary="RoPE trained with base 500,000: slower pairs, less decay with distance",
        form="rotate",
        parameters="0",
        max_length="none",
        cost="two rotations per layer",
        extrapolation_claim="none without training at the longer length",
        used_by="Llama 3; Code Llama with base 1,000,000",
        paper="Xiong et al. 2023, arXiv:2309.16039",
    ),
    EncodingCard(
        id="xpos",
        family="rotary",
        summary="RoPE whose scores decay with distance, the fast pairs most",
        form="rotate",
        parameters="0",
        max_length="30 / log10(1 + 1/gamma) times scale_base: 27 training lengths by default",
        cost="two rotations per layer",
        extrapolation_claim="strong, beside blockwise attention at evaluation (not here)",
        used_by="Kosmos-1",
        paper="Sun et al. 2022, arXiv:2212.10554",
    ),
    EncodingCard(
        id="pope",
        family="rotary",
        summary="scores from magnitudes of q and k and an angle of position alone",
        form="rotate",
        parameters="N*H*D",
        max_length="none",
        cost="queries and keys twice as wide",
        extrapolation_claim="strong, with no change at evaluation",
        used_by="no public model known",
        paper="Gopalakrishnan et al. 2025, arXiv:2509.10534",
    ),
    EncodingCard(
        id="alibi",
        family="bias",
        summary="subtract slope times distance from the score, one slope per head",
        form="distance_bias",
        parameters="0",
        max_length="none",
        cost="one addition per score",
        extrapolation_claim="very strong",
        used_by="Bloom, MPT, Baichuan2-13B",
        paper="Press et al. 2022, arXiv:2108.12409",
    ),
    EncodingCard(
        id="alibi_learned",
        family="bias",
        summary="ALiBi whose slopes are trained, from ALiBi's own",
        form="distance_bias",
        parameters="H",
        max_length="none",
        cost="one addition per score",
        extrapolation_claim="weak: trained slopes did not extrapolate well",
        used_by="a comparison in the ALiBi paper",
        paper="Press et al. 2022, arXiv:2108.12409",
    ),
    EncodingCard(
        id="t5",
        family="bias",
        summary="a trained bias per head and bucket of distances",
        form="distance_bias",
        parameters="buckets*H",
        max_length="none",
        cost="one addition per score",
        extrapolation_claim="medium: good to about twice the training length, then worse",
        used_by="T5, Flan-T5, UL2",
        paper="Raffel et al. 2020, arXiv:1910.10683",
    ),
    EncodingCard(
        id="kerple_log",
        family="bias",
        summary="a bias that falls with the logarithm of the distance, trained per head",
        form="distance_bias",
        parameters="2*H",
        max_length="none",
        cost="one addition per score",
        extrapolation_claim="very strong",
        used_by="a baseline of FIRE and DAPE",
        paper="Chi et al. 2022, arXiv:2205.09921",
    ),
    EncodingCard(
        id="kerple_power",
        family="bias",
        summary="a bias that falls with a power of the distance, trained per head",
        form="distance_bias",
        parameters="2*H",
        max_length="none",
        cost="one addition per score",
        extrapolation_claim="strong",
        used_by="a comparison in the KERPLE paper",
        paper="Chi et al. 2022, arXiv:2205.09921",
    ),
    EncodingCard(
        id="sandwich",
        family="bias",
        summary="the product of two sinusoidal embeddings as a bias, scaled per head",
        form="distance_bias",
        parameters="0",
        max_length="none",
        cost="one addition per score",
        extrapolation_claim="strong, without parameters",
        used_by="a baseline of later papers",
        paper="Chi et al. 2023, arXiv:2212.10356",
    ),
    EncodingCard(
        id="dpb",
        family="bias",
        summary="a small network from the distance to a bias per head",
        form="distance_bias",
        parameters="3*width + width*width + width*H",
        max_length="none",
        cost="one addition per score",
        extrapolation_claim="none for text; made for images of any size",
        used_by="CrossFormer; Swin v2 has a like one",
        paper="Wang et al. 2022, arXiv:2108.00154",
    ),
    EncodingCard(
        id="fire",
        family="relative",
        summary="a small network of log distance over log query position",
        form="score_mod",
        parameters="N*(2*width + width*H + 2)",
        max_length="none",
        cost="a network of `width` units per pair of tokens, all scores in memory",
        extrapolation_claim="very strong",
        used_by="a baseline of DAPE",
        paper="Li et al. 2024, arXiv:2310.04418",
    ),
    EncodingCard(
        id="shaw",
        family="relative",
        summary="a trained vector per clipped distance, added to the keys",
        form="rescore",
        parameters="N*(clip + 1)*D",
        max_length="none",
        cost="one product per query and vector, all scores in memory",
        extrapolation_claim="none",
        used_by="Music Transformer",
        paper="Shaw et al. 2018, arXiv:1803.02155",
    ),
    EncodingCard(
        id="txl",
        family="relative",
        summary="scores of content and of sinusoids of the distance, each with a trained bias",
        form="rotate",
        parameters="N*(C*C + 2*C)",
        max_length="none",
        cost="queries and keys widened by C channels",
        extrapolation_claim="strong, with memory of earlier segments",
        used_by="Transformer-XL, XLNet",
        paper="Dai et al. 2019, arXiv:1901.02860",
    ),
)

EXTENSION_CARDS = (
    ExtensionCard(
        id="none",
        summary="the model as it was trained",
        formula="f' = f",
        applies_to="every encoding",
        length_dependent="no",
        paper="",
    ),
    ExtensionCard(
        id="pi",
        summary="position interpolation: every frequency divided by s",
        formula="f' = f / s",
        applies_to=ROTARY,
        length_dependent="unless extension.factor is set",
        paper="Chen et al. 2023, arXiv:2306.15595",
    ),
    ExtensionCard(
        id="ntk",
        summary="NTK-aware: a larger base, so that low frequencies stretch and high ones stay",
        formula="theta' = theta * s^(d/(d-2))",
        applies_to=ROTARY,
        length_dependent="unless extension.factor is set",
        paper="bloc97 2023; Peng et al. 2023, arXiv:2309.00071, eq. 16",
    ),
    ExtensionCard(
        id="dynamic_ntk",
        summary="NTK-aware scaling that grows with the text; one scale for all its tokens",
        formula="theta * s^(d/(d-2)), s = max(1, factor n/L - (factor - 1))",
        applies_to=ROTARY,
        length_dependent="yes",
        paper="emozilla 2023; Peng et al. 2023, arXiv:2309.00071",
    ),
    ExtensionCard(
        id="ntk_by_parts",
        summary="slow pairs divided by s, fast pairs left alone, a ramp between",
        formula="f' = f (w/s + 1 - w), w = clamp((32 - turns) / 31, 0, 1)",
        applies_to=ROTARY,
        length_dependent="unless extension.factor is set",
        paper="Peng et al. 2023, arXiv:2309.00071, section 3.2",
    ),
    ExtensionCard(
        id="yarn",
        summary="interpolation by parts and a softmax temperature",
        formula="f' = ramp * f/s + (1 - ramp) * f; cos, sin * (0.1 ln s + 1)",
        applies_to=ROTARY,
        length_dependent="unless extension.factor is set",
        paper="Peng et al. 2023, arXiv:2309.00071",
    ),
    ExtensionCard(
        id="llama3",
        summary="like ntk_by_parts, between 1 and 4 turns within the training length",
        formula="f' = f (w/s + 1 - w), w = clamp((4 - turns) / 3, 0, 1)",
        applies_to=ROTARY,
        length_dependent="unless extension.factor is set",
        paper="Dubey et al. 2024 (Llama 3), arXiv:2407.21783; their code",
    ),
    ExtensionCard(
        id="abf",
        summary="another base at every length; meant to be followed by training",
        formula="theta' = 500000",
        applies_to=ROTARY,
        length_dependent="no",
        paper="Xiong et al. 2023, arXiv:2309.16039",
    ),
    ExtensionCard(
        id="longrope",
        summary="each pair divided by a factor of its own, given as a list",
        formula="f'_c = f_c / factor_c beyond L; cos, sin * sqrt(1 + ln s / ln L)",
        applies_to=ROTARY,
        length_dependent="unless extension.factor is set",
        paper="Ding et al. 2024, arXiv:2402.13753",
    ),
    ExtensionCard(
        id="rerope",
        summary="every distance from a window on counts as that window",
        formula="distance = min(i - j, window)",
        applies_to=ROTATION,
        length_dependent="no",
        paper="Su 2023, kexue.fm/archives/9708",
    ),
    ExtensionCard(
        id="leaky_rerope",
        summary="from a window on, distances grow more slowly",
        formula="distance = window + (i - j - window) / step",
        applies_to=ROTATION,
        length_dependent="no",
        paper="Su 2023, kexue.fm/archives/9708",
    ),
    ExtensionCard(
        id="self_extend",
        summary="from a window on, positions are counted in groups of tokens",
        formula="distance = floor(i/G) - floor(j/G) + window - floor(window/G)",
        applies_to=ROTATION,
        length_dependent="no",
        paper="Jin et al. 2024, arXiv:2401.01325",
    ),
)
