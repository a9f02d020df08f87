"""The papers behind encodings, extensions and protocols, and their BibTeX entries.

Authors are the first one "and others": enough to find a paper, and nothing that may be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from posbench.catalog import ENCODING_CARDS, EXTENSION_CARDS, POLICY_CARDS, PROTOCOL_CARDS
from posbench.version import __version__


@dataclass(frozen=True)
class Reference:
    """One paper, or one post that is cited like a paper."""

    key: str
    author: str  # as BibTeX writes it
    year: int  # as the cards cite it: of the proceedings where there are some
    title: str
    arxiv: str = ""
    where: str = ""  # for what is not on arXiv
    serves: tuple[str, ...] = ()  # ids of cards that cite it without an arXiv number

    @property
    def short(self) -> str:
        """`Press et al. 2022`."""
        first, *others = self.author.split(" and ")
        name = first.strip("{}").split(",")[0]
        return f"{name}{' et al.' if others else ''} {self.year}"

    def bibtex(self) -> str:
        """Its entry."""
        fields = {"title": f"{{{escaped(self.title)}}}", "author": escaped(self.author)}
        fields["year"] = str(self.year)
        if self.arxiv:
            fields |= {"eprint": self.arxiv, "archivePrefix": "arXiv"}
        else:
            fields["howpublished"] = escaped(self.where)
        lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
        return "\n".join([f"@misc{{{self.key},", *lines, "}"])


def escaped(text: str) -> str:
    """`text` with what LaTeX takes for a command made plain; braces stay."""
    return re.sub(r"([&%$#_])", r"\\\1", text)


def _paper(key: str, author: str, year: int, title: str, arxiv: str) -> Reference:
    return Reference(key, f"{author} and others", year, title, arxiv)


REFERENCES = (
    _paper("vaswani2017", "Vaswani, Ashish", 2017, "Attention Is All You Need", "1706.03762"),
    Reference(
        "radford2019",
        "Radford, Alec and others",
        2019,
        "Language Models are Unsupervised Multitask Learners",
        where="OpenAI",
        serves=("learned",),
    ),
    _paper(
        "haviv2022",
        "Haviv, Adi",
        2022,
        "Transformer Language Models without Positional Encodings Still Learn Positional "
        "Information",
        "2203.16634",
    ),
    _paper(
        "kazemnejad2023",
        "Kazemnejad, Amirhossein",
        2023,
        "The Impact of Positional Encoding on Length Generalization in Transformers",
        "2305.19466",
    ),
    _paper(
        "su2021",
        "Su, Jianlin",
        2021,
        "RoFormer: Enhanced Transformer with Rotary Position Embedding",
        "2104.09864",
    ),
    _paper(
        "black2022",
        "Black, Sid",
        2022,
        "GPT-NeoX-20B: An Open-Source Autoregressive Language Model",
        "2204.06745",
    ),
    _paper(
        "barbero2024",
        "Barbero, Federico",
        2024,
        "Round and Round We Go! What makes Rotary Positional Encodings useful?",
        "2410.06205",
    ),
    _paper(
        "xiong2023",
        "Xiong, Wenhan",
        2023,
        "Effective Long-Context Scaling of Foundation Models",
        "2309.16039",
    ),
    Reference("gemma2025", "{Gemma Team}", 2025, "Gemma 3 Technical Report", "2503.19786"),
    _paper(
        "hua2024",
        "Hua, Ermo",
        2024,
        "Fourier Position Embedding: Enhancing Attention's Periodic Extension for Length "
        "Generalization",
        "2412.17739",
    ),
    _paper("sun2022", "Sun, Yutao", 2022, "A Length-Extrapolatable Transformer", "2212.10554"),
    _paper(
        "gopalakrishnan2025",
        "Gopalakrishnan, Anand",
        2025,
        'Decoupling the "What" and "Where" With Polar Coordinate Positional Embeddings',
        "2509.10534",
    ),
    Reference(
        "press2022",
        "Press, Ofir and others",
        2022,
        "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
        "2108.12409",
        serves=("stride1",),
    ),
    _paper(
        "raffel2020",
        "Raffel, Colin",
        2020,
        "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
        "1910.10683",
    ),
    _paper(
        "chi2022",
        "Chi, Ta-Chung",
        2022,
        "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation",
        "2205.09921",
    ),
    _paper(
        "chi2023",
        "Chi, Ta-Chung",
        2023,
        "Dissecting Transformer Length Extrapolation via the Lens of Receptive Field Analysis",
        "2212.10356",
    ),
    _paper(
        "wang2022",
        "Wang, Wenxiao",
        2022,
        "CrossFormer: A Versatile Vision Transformer Hinging on Cross-scale Attention",
        "2108.00154",
    ),
    _paper(
        "li2024",
        "Li, Shanda",
        2024,
        "Functional Interpolation for Relative Positions Improves Long Context Transformers",
        "2310.04418",
    ),
    _paper(
        "shaw2018",
        "Shaw, Peter",
        2018,
        "Self-Attention with Relative Position Representations",
        "1803.02155",
    ),
    _paper(
        "dai2019",
        "Dai, Zihang",
        2019,
        "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context",
        "1901.02860",
    ),
    _paper(
        "lin2025",
        "Lin, Zhixuan",
        2025,
        "Forgetting Transformer: Softmax Attention with a Forget Gate",
        "2503.02130",
    ),
    _paper(
        "veisi2025",
        "Veisi, Ali",
        2025,
        "Context-aware Biases for Length Extrapolation",
        "2503.08067",
    ),
    _paper(
        "zhang2025", "Zhang, Yifan", 2025, "Group Representational Position Encoding", "2512.07805"
    ),
    _paper(
        "golovneva2024",
        "Golovneva, Olga",
        2024,
        "Contextual Position Encoding: Learning to Count What's Important",
        "2405.18719",
    ),
    _paper(
        "zheng2024dape",
        "Zheng, Chuanyang",
        2024,
        "DAPE: Data-Adaptive Positional Encoding for Length Extrapolation",
        "2405.14722",
    ),
    _paper(
        "zheng2024dapev2",
        "Zheng, Chuanyang",
        2024,
        "DAPE V2: Process Attention Score as Feature Map for Length Extrapolation",
        "2410.04798",
    ),
    _paper(
        "tan2025",
        "Tan, Shawn",
        2025,
        "Scaling Stick-Breaking Attention: An Efficient Implementation and In-depth Study",
        "2410.17980",
    ),
    _paper(
        "yang2025path",
        "Yang, Songlin",
        2025,
        "PaTH Attention: Position Encoding via Accumulating Householder Transformations",
        "2505.16381",
    ),
    _paper(
        "yang2025rnope",
        "Yang, Bowen",
        2025,
        "Rope to Nope and Back Again: A New Hybrid Attention Strategy",
        "2501.18795",
    ),
    _paper(
        "puvvada2025",
        "Puvvada, Krishna C.",
        2025,
        "SWAN-GPT: An Efficient and Scalable Approach for Long-Context Language Modeling",
        "2504.08719",
    ),
    _paper(
        "child2019",
        "Child, Rewon",
        2019,
        "Generating Long Sequences with Sparse Transformers",
        "1904.10509",
    ),
    _paper(
        "gelberg2025",
        "Gelberg, Yoav",
        2025,
        "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings",
        "2512.12167",
    ),
    _paper(
        "ruoss2023",
        "Ruoss, Anian",
        2023,
        "Randomized Positional Encodings Boost Length Generalization of Transformers",
        "2305.16843",
    ),
    _paper(
        "zhu2024",
        "Zhu, Dawei",
        2024,
        "PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise Training",
        "2309.10400",
    ),
    Reference(
        "nakanishi2025",
        "Nakanishi, Ken M.",
        2025,
        "Scalable-Softmax Is Superior for Attention",
        "2501.19399",
    ),
    _paper(
        "chen2023",
        "Chen, Shouyuan",
        2023,
        "Extending Context Window of Large Language Models via Positional Interpolation",
        "2306.15595",
    ),
    Reference(
        "bloc97",
        "{bloc97}",
        2023,
        "NTK-Aware Scaled RoPE allows LLaMA models to have extended (8k+) context size without "
        "any fine-tuning and minimal perplexity degradation",
        where="Post in r/LocalLLaMA",
        serves=("ntk",),
    ),
    Reference(
        "emozilla",
        "{emozilla}",
        2023,
        "Dynamically Scaled RoPE further increases performance of long context LLaMA with zero "
        "fine-tuning",
        where="Post in r/LocalLLaMA",
        serves=("dynamic_ntk",),
    ),
    _paper(
        "peng2023",
        "Peng, Bowen",
        2023,
        "YaRN: Efficient Context Window Extension of Large Language Models",
        "2309.00071",
    ),
    _paper("dubey2024", "Dubey, Abhimanyu", 2024, "The Llama 3 Herd of Models", "2407.21783"),
    _paper(
        "ding2024",
        "Ding, Yiran",
        2024,
        "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens",
        "2402.13753",
    ),
    Reference(
        "su2023rerope",
        "Su, Jianlin",
        2023,
        "ReRoPE",
        where="kexue.fm/archives/9708",
        serves=("rerope", "leaky_rerope"),
    ),
    _paper(
        "jin2024",
        "Jin, Hongye",
        2024,
        "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning",
        "2401.01325",
    ),
    _paper(
        "han2023",
        "Han, Chi",
        2023,
        "LM-Infinite: Zero-Shot Extreme Length Generalization for Large Language Models",
        "2308.16137",
    ),
    _paper(
        "xiao2023",
        "Xiao, Guangxuan",
        2023,
        "Efficient Streaming Language Models with Attention Sinks",
        "2309.17453",
    ),
    _paper(
        "alkhateeb2023",
        "Al-Khateeb, Faisal",
        2023,
        "Position Interpolation Improves ALiBi Extrapolation",
        "2310.13017",
    ),
    _paper(
        "fang2025",
        "Fang, Lizhe",
        2025,
        "What is Wrong with Perplexity for Long-context Language Modeling?",
        "2410.23771",
    ),
    _paper(
        "olsson2022",
        "Olsson, Catherine",
        2022,
        "In-context Learning and Induction Heads",
        "2209.11895",
    ),
)

_CITED = {
    **{card.id: card.source for card in PROTOCOL_CARDS},
    # The extension `none` cites nothing; the encoding of that name does.
    **{card.id: card.paper for card in EXTENSION_CARDS},
    **{card.id: card.paper for card in (*ENCODING_CARDS, *POLICY_CARDS)},
}


def references_of(ids: Iterable[str]) -> list[Reference]:
    """What the cards of these encodings, extensions and protocols cite, each once, by year."""
    wanted = set(ids)
    numbers = {n for each in wanted for n in re.findall(r"arXiv:([\d.]+\d)", _CITED.get(each, ""))}
    found = [each for each in REFERENCES if each.arxiv in numbers or wanted & {*each.serves}]
    return sorted(found, key=lambda each: (each.year, each.key))


def own_bibtex() -> str:
    """The entry of posbench itself."""
    return "\n".join(
        [
            "@software{posbench,",
            "  title = {{posbench: honest measurement of positional encodings}},",
            "  author = {{The posbench authors}},",
            f"  version = {{{__version__}}},",
            "}",
        ]
    )
