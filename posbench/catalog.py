"""What there is to choose from, in words and without torch: `posbench list` and `--help`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EncodingCard:
    """One encoding as `posbench list encodings --json` prints it."""

    id: str
    family: str
    summary: str
    formula: str  # of the score of key j for query i, or of what is added to the token x_p
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


@dataclass(frozen=True)
class ProtocolCard:
    """One way to measure as `posbench list protocols --json` prints it."""

    id: str
    kind: str  # own: protocol v1; diagnostic; preset: follows published code
    scores: str  # which tokens, with what before them
    differs: str  # from `controlled`: what the number hides, or shows beside it
    source: str


# What a rule for inverse frequencies applies to.
ROTARY = "rope, rope_partial, rope_p, rope_abf, rope_local_global, fope, xpos, pope"

# What a rule for positions applies to: where a rotation alone decides the score.
ROTATION = "rope, rope_partial, rope_p, rope_abf, rope_local_global"

# What a rule for distances applies to: a plain rotation, a bias by distance alone, or nothing.
DISTANCES = f"none, {ROTATION}, alibi, alibi_learned, t5, kerple_log, kerple_power, sandwich, dpb"

ENCODING_CARDS = (
    EncodingCard(
        id="none",
        family="absolute",
        summary="no positional encoding; the causal mask alone orders the tokens",
        formula="q_i.k_j / sqrt(D), j <= i",
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
        formula="x_p + scale (sin p f_0, cos p f_0, sin p f_1, ...), f_c = base^(-2c/C)",
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
        formula="x_p + W_p, p < L",
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
        formula="pair c of q_i turned by i f_c, of k_j by j f_c, f_c = theta^(-2c/D)",
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
        formula="as rope in the first d = fraction D channels, f_c = theta^(-2c/d)",
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
        formula="as rope; f_c = 0 for c >= floor(share D/2)",
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
        formula="as rope; theta = 500000",
        form="rotate",
        parameters="0",
        max_length="none",
        cost="two rotations per layer",
        extrapolation_claim="none without training at the longer length",
        used_by="Llama 3; Code Llama with base 1,000,000",
        paper="Xiong et al. 2023, arXiv:2309.16039",
    ),
    EncodingCard(
        id="rope_local_global",
        family="rotary",
        summary="RoPE with a far larger base, hence slower pairs, in every fourth layer",
        formula="as rope; theta = 1000000 in layer n = 1..N where 4 divides n",
        form="rotate",
        parameters="0",
        max_length="none",
        cost="two rotations per layer",
        extrapolation_claim="none without training at the longer length",
        used_by="Gemma 3, in every sixth layer, beside windows in the others (not here)",
        paper="Gemma Team 2025 (Gemma 3), arXiv:2503.19786",
    ),
    EncodingCard(
        id="fope",
        family="rotary",
        summary="RoPE whose pairs turn by fixed random series of frequencies, the slow ones cut",
        formula=(
            "as rope; pair m at p times e^(i f_m p) + sum over c of a_cm e^(i f_c p), "
            "those with too few turns in L are 0"
        ),
        form="rotate",
        parameters="0",
        max_length="none",
        cost="two rotations per layer, with tables of cos and sin for each head",
        extrapolation_claim="strong: perplexity more stable than RoPE's beyond the training length",
        used_by="Intern-S1-Pro",
        paper="Hua et al. 2024, arXiv:2412.17739",
    ),
    EncodingCard(
        id="xpos",
        family="rotary",
        summary="RoPE whose scores decay with distance, the fast pairs most",
        formula=(
            "as rope; pair c of q_i times zeta_c^(i/B), of k_j times zeta_c^(-j/B), "
            "zeta_c = (2c/D + gamma) / (1 + gamma)"
        ),
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
        formula=(
            "sum over c of softplus(q_ic) softplus(k_jc) cos((i - j) f_c - phase_c) / sqrt(D), "
            "f_c = theta^(-c/D)"
        ),
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
        formula="q_i.k_j / sqrt(D) - 2^(-8h/H) (i - j), h = 1..H (H a power of two)",
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
        formula="q_i.k_j / sqrt(D) - 2^(-e_h) (i - j), e_h from 8h/H on",
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
        formula=(
            "q_i.k_j / sqrt(D) + scale W_(b, h), b = i - j below n = buckets/2, "
            "then n + floor(n ln((i - j)/n) / ln(max_distance/n)), at most buckets - 1"
        ),
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
        formula="q_i.k_j / sqrt(D) - p_h ln(1 + a_h (i - j)), p_h > 0, a_h > 0",
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
        formula="q_i.k_j / sqrt(D) - a_h (i - j)^p_h, a_h > 0, 0 < p_h < 2",
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
        formula=(
            "q_i.k_j / sqrt(D) + H/8h sum over k = 1..d/2 of (cos((i - j) base^(-2k/d)) - 1), "
            "d = dimension"
        ),
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
        formula="q_i.k_j / sqrt(D) + w_h.silu(V silu(u ln(1 + i - j) + b) + c)",
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
        formula=(
            "q_i.k_j / sqrt(D) + w_h.relu(u z + b), "
            "z = ln(1 + c (i - j)) / ln(1 + c max(i, threshold))"
        ),
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
        formula="q_i.(k_j + a_r) / sqrt(D), r = min(i - j, clip)",
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
        formula="((q_i + u).k_j + (q_i + v).W R_(i-j)) / sqrt(D), R sinusoids of C channels",
        form="rotate",
        parameters="N*(C*C + 2*C)",
        max_length="none",
        cost="queries and keys widened by C channels",
        extrapolation_claim="strong, with memory of earlier segments",
        used_by="Transformer-XL, XLNet",
        paper="Dai et al. 2019, arXiv:1901.02860",
    ),
    EncodingCard(
        id="fox",
        family="content",
        summary="gates read from each token fade all that came before it",
        formula="q_i.k_j / sqrt(D) + sum over l = j+1..i of ln sigmoid(w_h.x_l + b_h)",
        form="key_bias",
        parameters="N*(C*H + H)",
        max_length="none",
        cost="one small projection per layer; dense scores on a CPU",
        extrapolation_claim="better than RoPE beyond the training length",
        used_by="Forgetting Transformer",
        paper="Lin et al. 2025, arXiv:2503.02130",
    ),
    EncodingCard(
        id="cable",
        family="content",
        summary="FoX with the sign of its gates turned: biases by cumulated softplus",
        formula="q_i.k_j / sqrt(D) - sum over l = j+1..i of softplus(w_h.x_l + b_h)",
        form="key_bias",
        parameters="N*(C*H + H)",
        max_length="none",
        cost="one small projection per layer; dense scores on a CPU",
        extrapolation_claim="strong; 1024 to 8192 tokens",
        used_by="",
        paper="Veisi et al. 2025, arXiv:2503.08067",
    ),
    EncodingCard(
        id="grape_ap",
        family="content",
        summary="the path to a key is longer the less its tokens are like the query",
        formula=(
            "q_i.k_j / sqrt(D) + 2^(-8h/H) sum over l = j+1..i of ln sigmoid(p_i.R_l p_l / size)"
        ),
        form="rescore",
        parameters="N*C*H*size",
        max_length="none",
        cost="dense scores, twice",
        extrapolation_claim="",
        used_by="",
        paper="Zhang et al. 2025, arXiv:2512.07805",
    ),
    EncodingCard(
        id="cope",
        family="content",
        summary="positions count only tokens that a gate of the query lets count",
        formula=(
            "q_i.k_j / sqrt(D) + q_i.e_p, p = sum over l = j..i of sigmoid(q_i.k_l / sqrt(D)), "
            "at most steps - 1"
        ),
        form="rescore",
        parameters="N*D*steps",
        max_length="none",
        cost="dense scores and two look-ups per score",
        extrapolation_claim="generalises better out of domain",
        used_by="",
        paper="Golovneva et al. 2024, arXiv:2405.18719",
    ),
    EncodingCard(
        id="dape",
        family="content",
        summary="a small network over the heads adapts a bias to the scores",
        formula=(
            "s + b + f(s, b) over all heads, s = q_i.k_j / sqrt(D), b = -p_h ln(1 + a_h (i - j))"
        ),
        form="rescore",
        parameters="N*(2*H*hidden + hidden + hidden*H + 2*H)",
        max_length="none",
        cost="dense scores and a network of width 32 per score",
        extrapolation_claim="strong; 128 to 8192 tokens",
        used_by="",
        paper="Zheng et al. 2024, arXiv:2405.14722",
    ),
    EncodingCard(
        id="dape_v2",
        family="content",
        summary="DAPE as a convolution over neighbouring keys",
        formula="as dape; f convolves over neighbouring keys, kernel = 3",
        form="rescore",
        parameters="N*(kernel*2*H*hidden + hidden + kernel*hidden*H + 2*H)",
        max_length="none",
        cost="dense scores and a convolution of width 32 per score",
        extrapolation_claim="strong; 128 to 8192 tokens",
        used_by="",
        paper="Zheng et al. 2024, arXiv:2410.04798",
    ),
    EncodingCard(
        id="stickbreak",
        family="content",
        summary="nearer keys take their share of the attention first; no softmax",
        formula=(
            "weight of j = sigmoid(z_ij) times the product over l = j+1..i-1 of "
            "(1 - sigmoid(z_il)), z = q.k / sqrt(D), j < i"
        ),
        form="attend",
        parameters="0",
        max_length="none",
        cost="dense scores",
        extrapolation_claim="2048 to 16384 tokens with lower perplexity",
        used_by="",
        paper="Tan et al. 2025, arXiv:2410.17980",
    ),
    EncodingCard(
        id="path",
        family="content",
        summary="reflections chosen by the tokens between key and query",
        formula="q_i.(H_i ... H_(j+1) k_j) / sqrt(D), H_t = I - beta_t w_t w_t^T",
        form="attend",
        parameters="N*(2*C*rank + 3*C + C*H + H)",
        max_length="none",
        cost="a triangular solve per 64 tokens, dense scores",
        extrapolation_claim="strong up to 8 times the training length",
        used_by="",
        paper="Yang et al. 2025, arXiv:2505.16381",
    ),
)

# Policies around rope; each is a preset of settings that combine with any encoding.
POLICY_CARDS = (
    EncodingCard(
        id="rnope",
        family="policy",
        summary="RoPE in three layers of four, no position in every fourth",
        formula="as rope in layer n = 1..N, as none where 4 divides n",
        form="layers=every4th",
        parameters="0",
        max_length="none",
        cost="two rotations in three layers of four",
        extrapolation_claim="better than RoPE, as good within the training length",
        used_by="Llama 4, SmolLM3",
        paper="Yang et al. 2025, arXiv:2501.18795",
    ),
    EncodingCard(
        id="swan",
        family="policy",
        summary="RoPE in a window of half a training length, every fourth layer full and NoPE",
        formula="as rnope; rope layers see i - j < L/2",
        form="layers=every4th window=context/2",
        parameters="0",
        max_length="none",
        cost="a window in three layers of four",
        extrapolation_claim="strong; the paper adds a log-scaled temperature at evaluation",
        used_by="Command R7B, with other sizes",
        paper="Puvvada et al. 2025, arXiv:2504.08719",
    ),
    EncodingCard(
        id="swa",
        family="policy",
        summary="RoPE that sees one training length back: what every extrapolation must beat",
        formula="as rope; every layer sees i - j < L",
        form="window=context",
        parameters="0",
        max_length="none",
        cost="a window in every layer",
        extrapolation_claim="flat beyond the training length, and no use of more context",
        used_by="Mistral 7B, with another window",
        paper="Child et al. 2019, arXiv:1904.10509; Chi et al. 2022, arXiv:2205.09921, fig. 5",
    ),
    EncodingCard(
        id="drope",
        family="policy",
        summary="RoPE that is dropped after 85% of the training; evaluated without position",
        formula="as rope for the first 85% of the steps, as none from then on",
        form="drop_at=0.85",
        parameters="0",
        max_length="none",
        cost="two rotations per layer, none at evaluation",
        extrapolation_claim="strong, with a temperature at evaluation (eval.temperature=drope)",
        used_by="no public model beyond the paper's",
        paper="Gelberg et al. 2025, arXiv:2512.12167",
    ),
    EncodingCard(
        id="randomized",
        family="policy",
        summary="RoPE trained at sorted random positions from four training lengths",
        formula="as rope; in training L different positions of 0..4L-1, sorted",
        form="positions=randomized",
        parameters="0",
        max_length="none",
        cost="two rotations per layer",
        extrapolation_claim="strong on algorithmic tasks",
        used_by="no public model known",
        paper="Ruoss et al. 2023, arXiv:2305.16843",
    ),
    EncodingCard(
        id="pose",
        family="policy",
        summary="RoPE trained on two parts of a text with a random gap between their positions",
        formula="as rope; in training 0..m-1, m+u..L-1+u, m of 1..L-1, u of 0..3L",
        form="positions=pose",
        parameters="0",
        max_length="none",
        cost="two rotations per layer",
        extrapolation_claim="to the longest position drawn, trained at the short length",
        used_by="fine-tuned Llama models",
        paper="Zhu et al. 2024, arXiv:2309.10400",
    ),
    EncodingCard(
        id="ssmax",
        family="policy",
        summary="RoPE with scores times s ln n for n visible keys; s trained for each head",
        formula="as rope; scores times s_h ln n, n the keys that query i sees",
        form="temperature=ssmax",
        parameters="N*H",
        max_length="none",
        cost="one multiplication of the queries per layer",
        extrapolation_claim="better than RoPE; attention does not flatten with length",
        used_by="a variant without weights in Llama 4",
        paper="Nakanishi 2025, arXiv:2501.19399",
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
        paper="Dubey et al. 2024 (Llama 3), arXiv:2407.21783, and their code",
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
        summary="each pair divided by a factor of its own, given as a list or searched for",
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
    ExtensionCard(
        id="lm_infinite",
        summary="only the first tokens and a window are seen; no distance exceeds the window",
        formula="seen: j < sinks or i - j < window; distance = min(i - j, window)",
        applies_to=DISTANCES,
        length_dependent="no",
        paper="Han et al. 2023, arXiv:2308.16137",
    ),
    ExtensionCard(
        id="streaming",
        summary="only the first tokens and a window are seen, at their places in such a cache",
        formula="seen: j < sinks or i - j < window; sinks: min(i, sinks + window - 1) - j",
        applies_to=DISTANCES,
        length_dependent="no",
        paper="Xiao et al. 2023, arXiv:2309.17453",
    ),
    ExtensionCard(
        id="alibi_pi",
        summary="position interpolation of ALiBi: every slope divided by s",
        formula="slope' = slope / s",
        applies_to="alibi, alibi_learned",
        length_dependent="unless extension.factor is set",
        paper="Al-Khateeb et al. 2023, arXiv:2310.13017",
    ),
)

PROTOCOL_CARDS = (
    ProtocolCard(
        id="controlled",
        kind="own",
        scores=(
            "The same target tokens at every length. A window ends at the same token whatever its "
            "length and lies inside one document; its last tokens are the targets."
        ),
        differs="Only how far back the model can look changes from column to column.",
        source="protocol v1",
    ),
    ProtocolCard(
        id="nonoverlap",
        kind="own",
        scores=(
            "Spans of text, each inside one document, cut into blocks of the length; every token "
            "of a block is scored."
        ),
        differs=(
            "Includes the early-token effect: the first tokens of a block have little context, and "
            "longer blocks have fewer of them, so this number can fall with length although "
            "nothing beyond the training length is used."
        ),
        source="protocol v1",
    ),
    ProtocolCard(
        id="sliding",
        kind="own",
        scores=(
            "The spans of nonoverlap under windows that move on by a stride; each token is scored "
            "once, the first window's all."
        ),
        differs=(
            "A token that is not in the first window has at least the length less the stride "
            "before it; at the longest length there is but the first window."
        ),
        source="protocol v1",
    ),
    ProtocolCard(
        id="position",
        kind="own",
        scores=(
            "One pass at the longest length; each loss is booked under its position in the window."
        ),
        differs=(
            "The row of a length averages the positions below it, the early ones too; the curve "
            "shows where the loss rises."
        ),
        source="protocol v1",
    ),
    ProtocolCard(
        id="tail",
        kind="own",
        scores="The last positions of one window of the length at the start of each span.",
        differs="Every length scores other tokens, so text and context change together.",
        source="protocol v1",
    ),
    ProtocolCard(
        id="shift",
        kind="diagnostic",
        scores="Windows of the training length at positions that begin further on.",
        differs=(
            "The largest change of any loss: rounding for an encoding of distances alone, a "
            "finding for one of absolute positions, and no statement about longer text."
        ),
        source="protocol v1",
    ),
    ProtocolCard(
        id="context_ablation",
        kind="diagnostic",
        scores=(
            "The targets of controlled, with the tokens farther back than the training length "
            "replaced by those of another document."
        ),
        differs="By how much the loss rises: what the far tokens themselves were worth.",
        source="protocol v1",
    ),
    ProtocolCard(
        id="longppl_self",
        kind="diagnostic",
        scores=(
            "Of the targets of controlled, those whose loss a judging run lowers by more than 2 "
            "nats, to less than 2, when it sees the longest context and not 1x."
        ),
        differs=(
            "Only tokens that hang on far context; with no judge named, each run picks its own, "
            "and two runs must not be compared."
        ),
        source="Fang et al. 2025 (LongPPL), arXiv:2410.23771",
    ),
    ProtocolCard(
        id="attention",
        kind="diagnostic",
        scores="Attention weights of all queries in a few windows, layer by layer, head by head.",
        differs="Where heads look, not what that is good for; attention.csv has each head.",
        source="protocol v1",
    ),
    ProtocolCard(
        id="induction",
        kind="diagnostic",
        scores="Random tokens, half of the length, and the same again.",
        differs="By how much the loss falls at the repeat: use of what stands half a length back.",
        source="Olsson et al. 2022, arXiv:2209.11895",
    ),
    ProtocolCard(
        id="alibi_paper",
        kind="preset",
        scores="Every token of the text once, in blocks of the length.",
        differs=(
            "As nonoverlap: the early-token effect falls with length, which ALiBi's own appendix "
            "B warns of. (The published code drops losses that are not finite; here they show.)"
        ),
        source="Press et al. 2022 (ALiBi), arXiv:2108.12409; their eval_lm.py",
    ),
    ProtocolCard(
        id="stride1",
        kind="preset",
        scores="Every token from a window of its own, full from the first length on.",
        differs=(
            "No early-token effect but in the first window. Every sixteenth window is read and "
            "stands for sixteen, because each target costs a whole one."
        ),
        source="Press et al. 2022 (ALiBi), appendix B; --context-window in their code",
    ),
    ProtocolCard(
        id="yarn_truncate",
        kind="preset",
        scores="The first tokens of each document, as many as the length, in one window.",
        differs=(
            "A cumulative mean: each length averages all that came before, so a cliff at the end "
            "hardly shows. Beginnings of documents read unlike the rest of them."
        ),
        source="Peng et al. 2023 (YaRN), arXiv:2309.00071; eval/perplexity.py with --truncate",
    ),
    ProtocolCard(
        id="yarn_sliding",
        kind="preset",
        scores="Every token once under windows at a stride of 256.",
        differs=(
            "Window means are averaged without weights: the first window, with its early tokens, "
            "counts as much as one with a stride of tokens."
        ),
        source="Peng et al. 2023 (YaRN), arXiv:2309.00071; eval/perplexity.py",
    ),
    ProtocolCard(
        id="hf_stride",
        kind="preset",
        scores="Every token once under windows at a stride of half their length.",
        differs=(
            "A target has half the length before it or more; each window weighs one label less "
            "than it scores."
        ),
        source="transformers documentation, perplexity.md",
    ),
    ProtocolCard(
        id="lm_eval_rolling",
        kind="preset",
        scores="Every token once, in disjoint windows; the last one reaches back to full length.",
        differs=(
            "As nonoverlap, but for the last window of a text, whose tokens have more context "
            "than a block of their own would give them."
        ),
        source="lm-evaluation-harness, get_rolling_token_windows",
    ),
    ProtocolCard(
        id="last256",
        kind="preset",
        scores="The last 256 positions of one window in each text.",
        differs=(
            "Every length scores other tokens, deeper in the text; at 256 or less, half of the "
            "context."
        ),
        source="Zheng et al. 2024 (DAPE), arXiv:2405.14722; eval_last in their code",
    ),
    ProtocolCard(
        id="llama_cpp",
        kind="preset",
        scores="The second half of each whole chunk of the length.",
        differs=(
            "No target has less than half of the length before it, and half of the text is never "
            "scored; other tokens at every length."
        ),
        source="llama.cpp, llama-perplexity",
    ),
)
