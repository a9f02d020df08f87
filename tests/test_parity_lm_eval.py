"""The preset `lm_eval_rolling` against lm-evaluation-harness itself: same checkpoint, same text."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="pip install posbench[hf] evaluates others' models")
pytest.importorskip("lm_eval", reason="pip install posbench[lm-eval] compares with it")

import foreign
from foreign import CONTEXT, measured, planned, save, settings, theirs
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tiny import write_corpus
from transformers import PreTrainedTokenizerFast

from posbench.config import Protocol
from posbench.targets import Text


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / request.param, foreign.CONFIGS[request.param])


@pytest.mark.parametrize("ratio", [1.0, 1.25, 2.0])
def test_the_same_number(folder: Path, ratio: float, tmp_path: Path) -> None:
    """Theirs predicts every token of a text and puts a prefix before the first.

    So the first token that posbench reads is given as that prefix, and the rest as the text.
    """
    corpus, length = write_corpus(tmp_path / "text", 40), round(ratio * CONTEXT)
    asked = settings(folder, corpus, ratios=[ratio], protocols=[Protocol.lm_eval_rolling])
    dataset, plan = planned(asked)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    harness = HFLM(
        pretrained=theirs(folder), tokenizer=tokenizer, max_length=length, batch_size=1,
        device="cpu", logits_cache=False,
    )  # fmt: skip

    def log_likelihood(text: Text) -> float:
        first, *rest = dataset.test.tokens[text.start : text.start + text.size + 1].tolist()
        words = dataset.tokenizer.decode(rest)
        assert tokenizer.encode(words, add_special_tokens=False) == rest
        harness.custom_prefix_token_id = first
        request = Instance("loglikelihood_rolling", {}, (words,), 0)
        [total] = harness.loglikelihood_rolling([request], disable_tqdm=True)
        return float(total)

    texts = plan.places.stretches
    reaches_back = any(text.size % length for text in texts)  # the last window of a text
    assert reaches_back == (ratio != 1)
    expected = -sum(map(log_likelihood, texts)) / sum(text.size for text in texts)
    [row] = measured(folder, corpus, ratios=[ratio], protocols=[Protocol.lm_eval_rolling]).rows
    assert row.n_targets == sum(text.size for text in texts)
    assert row.nll == pytest.approx(expected, abs=1e-4)
