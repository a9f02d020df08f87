"""Tiny models of Hugging Face's own classes, with random weights, saved as people save theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from posbench.config import Device, EvalConfig, EvalSettings, Protocol, TextConfig
from posbench.data import Dataset, prepare_foreign
from posbench.foreign import open_foreign
from posbench.jobs.evaluate import evaluate
from posbench.plan import Plan, plan
from posbench.results import Evaluation

CONTEXT = 16
SIZE = {"vocab_size": 257, "initializer_range": 0.3}
LLAMA: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "gpt2": transformers.GPT2Config(
        n_positions=2 * CONTEXT, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=256, eos_token_id=256, **SIZE,
    ),
    "llama": transformers.LlamaConfig(num_key_value_heads=1, **LLAMA, **SIZE),
    "gpt_neox": transformers.GPTNeoXConfig(rotary_pct=0.5, **LLAMA, **SIZE),
    "bloom": transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=2, **SIZE),
    "mpt": transformers.MptConfig(
        d_model=32, n_heads=2, n_layers=2, max_seq_len=CONTEXT, **SIZE
    ),
}  # fmt: skip


def byte_tokenizer() -> Tokenizer:
    """One token per byte, in the byte-level alphabet, and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    return made


def save(folder: Path, config: transformers.PretrainedConfig, **how: Any) -> Path:
    """A model of `config` with weights large enough for its predictions to differ."""
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, **how)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def change_config(folder: Path, **changes: Any) -> Path:
    """Other values in the config.json of a folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def settings(folder: Path, corpus: Path, **changes: Any) -> EvalSettings:
    """Few targets, at 1x, 2x and 4x unless told otherwise; keys of EvalConfig go there."""
    config = EvalConfig(max_targets=128, bootstrap=100, protocols=[Protocol.controlled])
    made = EvalSettings(
        models=f"hf:{folder}",
        context=CONTEXT,
        data=TextConfig(path=str(corpus), test=0.5),
        eval=config,
        device=Device.cpu,
        threads=1,
    )
    for key, value in changes.items():
        setattr(config if hasattr(config, key) else made, key, value)
    return made


def measured(folder: Path, corpus: Path, **changes: Any) -> Evaluation:
    """What posbench measures of the model in `folder`."""
    return evaluate(settings=settings(folder, corpus, **changes))


def planned(asked: EvalSettings) -> tuple[Dataset, Plan]:
    """The text of an evaluation, and the windows that it reads."""
    checkpoint = open_foreign(asked.models, asked.context)
    assert asked.data is not None
    dataset, _ = prepare_foreign(asked.data, checkpoint.tokenizer())
    return dataset, plan(dataset.test, checkpoint.context, asked.eval, "cpu")


def theirs(folder: Path, **changes: Any) -> Any:
    """The model as transformers loads it, with other settings in its config."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    for key, value in changes.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config)
    return model.eval()


@torch.no_grad()
def their_nll(model: Any, asked: EvalSettings, protocol: Protocol, length: int) -> float:
    """transformers' own loss on the windows of one protocol: the mean over all targets."""
    dataset, made = planned(asked)
    total, count = 0.0, 0
    for windows in made.layouts[protocol, length].windows:
        for start in windows.starts.tolist():
            ids = torch.from_numpy(dataset.test.tokens[start : start + windows.length + 1].copy())
            labels: Tensor = ids[None, 1:].long().clone()
            labels[:, : -windows.scored] = -100
            read = ids[None, :-1].long()
            loss = model(input_ids=read, labels=read, shift_labels=labels).loss
            total += float(loss.double()) * windows.scored
            count += windows.scored
    return total / count
