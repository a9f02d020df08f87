"""Models that others trained: the numbers are transformers' own, and bad folders have one line."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="pip install posbench[hf] evaluates others' models")

import foreign
from foreign import CONTEXT, change_config, measured, save, settings, their_nll, theirs
from tiny import write_corpus
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from posbench.cli import main
from posbench.config import Beyond, EvalSplit, Protocol
from posbench.config.extensions import (
    DynamicNtkConfig,
    ExtensionConfig,
    Llama3Config,
    LongropeConfig,
    NtkConfig,
    PiConfig,
    ReropeConfig,
    StreamingConfig,
    YarnConfig,
)
from posbench.diagnostics import ATTENTION
from posbench.errors import CheckpointError, Exit, UserError
from posbench.foreign import load_foreign, open_foreign
from posbench.results import Evaluation, Row
from posbench.rules import check
from posbench.tokenizer import ForeignTokenizer

EXACT = {"rel": 2e-6}  # float32 logits of one implementation, summed in another order
CLOSE = {"rel": 2e-5}  # frequencies that differ by a float32 rounding
every_family = pytest.mark.parametrize("family", foreign.CONFIGS)
rotary = pytest.mark.parametrize("family", ["llama", "gpt_neox"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("foreign") / "text", 60)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each family; the name of one needs quotes."""
    root = tmp_path_factory.mktemp("models")
    return {name: save(root / f"a {name}=x", each) for name, each in foreign.CONFIGS.items()}


def rows(evaluation: Evaluation, metric: str = "ppl") -> dict[tuple[str, int], Row]:
    return {(row.protocol, row.eval_length): row for row in evaluation.rows if row.metric == metric}


# ---------------------------------------------------------------- the same numbers


@every_family
def test_the_loss_is_transformers_own(family: str, saved: dict[str, Path], corpus: Path) -> None:
    """Twice the length that MPT builds its bias for, too."""
    protocols = [Protocol.controlled, Protocol.nonoverlap]
    asked = settings(saved[family], corpus, ratios=[0.5, 1.0, 2.0], protocols=protocols)
    found = rows(measured(saved[family], corpus, ratios=[0.5, 1.0, 2.0], protocols=protocols))
    longer = {"max_seq_len": 2 * CONTEXT} if family == "mpt" else {}
    model = theirs(saved[family], **longer)
    for protocol in protocols:
        for length in (CONTEXT // 2, CONTEXT, 2 * CONTEXT):
            expected = their_nll(model, asked, protocol, length)
            assert found[protocol, length].status == "ok"
            assert found[protocol, length].nll == pytest.approx(expected, **EXACT)
    levels = {round(row.nll or 0, 3) for row in found.values()}
    assert len(levels) > 3  # the weights are large enough for lengths to differ


EXTENSIONS: list[tuple[ExtensionConfig, dict[str, Any], list[float]]] = [
    (PiConfig(factor=4.0), {"rope_type": "linear", "factor": 4.0}, [1, 4]),
    (DynamicNtkConfig(factor=2.0), {"rope_type": "dynamic", "factor": 2.0}, [4, 1, 2]),
    (YarnConfig(factor=4.0), {"rope_type": "yarn", "factor": 4.0}, [1, 4]),
    (
        Llama3Config(factor=4.0),
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        [1, 4],
    ),
    (
        LongropeConfig(factor=4.0, factors=[1.0, 1.5, 2.5, 4.0]),
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "long_factor": [1.0, 1.5, 2.5, 4.0],
            "short_factor": [1.0] * 4,
        },
        [2, 4],  # at 1x theirs has the short factors, and a fixed factor here holds everywhere
    ),
]


@rotary
@pytest.mark.parametrize(("extension", "rope", "ratios"), EXTENSIONS)
def test_extensions_are_transformers_own_scaling(
    family: str,
    extension: ExtensionConfig,
    rope: dict[str, Any],
    ratios: list[float],
    saved: dict[str, Path],
    corpus: Path,
) -> None:
    if family == "llama" and isinstance(extension, LongropeConfig):
        rope = rope | {key: value * 2 for key, value in rope.items() if isinstance(value, list)}
        extension = LongropeConfig(factor=4.0, factors=rope["long_factor"])
    folder = saved[family]
    asked = settings(folder, corpus, ratios=ratios, extension=extension)
    found = rows(measured(folder, corpus, ratios=ratios, extension=extension))
    plain = rows(measured(folder, corpus, ratios=ratios))
    original = {"original_max_position_embeddings": CONTEXT}
    for length in (round(ratio * CONTEXT) for ratio in ratios):
        own = theirs(folder).config.rope_parameters
        model = theirs(folder, rope_parameters=own | rope | original)  # new: theirs remembers
        row = found["controlled", length]
        expected = their_nll(model, asked, Protocol.controlled, length)
        assert row.nll == pytest.approx(expected, **CLOSE)
        assert row.extension == extension.name
    longest = "controlled", round(max(ratios) * CONTEXT)
    assert found[longest].nll != pytest.approx(plain[longest].nll, rel=1e-4)


@rotary
@pytest.mark.parametrize(
    "extension", [PiConfig(factor=1.0), NtkConfig(factor=1.0), YarnConfig(factor=1.0)]
)
def test_a_factor_of_one_changes_no_bit(
    family: str, extension: ExtensionConfig, saved: dict[str, Path], corpus: Path
) -> None:
    found = rows(measured(saved[family], corpus, extension=extension))
    plain = rows(measured(saved[family], corpus))
    assert [row.nll for row in found.values()] == [row.nll for row in plain.values()]


def test_a_free_factor_is_that_of_each_length(saved: dict[str, Path], corpus: Path) -> None:
    free = rows(measured(saved["llama"], corpus, extension=PiConfig()))
    fixed = rows(measured(saved["llama"], corpus, extension=PiConfig(factor=4.0)))
    assert free["controlled", 4 * CONTEXT].nll == fixed["controlled", 4 * CONTEXT].nll
    assert free["controlled", 2 * CONTEXT].nll != fixed["controlled", 2 * CONTEXT].nll


def test_scaling_of_its_own_holds_whatever_was_read_before(
    saved: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    """A dynamic scale is that of the text: transformers itself keeps that of the longest so far."""
    folder = shutil.copytree(saved["llama"], tmp_path / "dynamic")
    own = theirs(folder).config.rope_parameters
    change_config(folder, rope_parameters=own | {"rope_type": "dynamic", "factor": 2.0})
    lengths = [4 * CONTEXT, 2 * CONTEXT, CONTEXT]
    how: dict[str, Any] = {"ratios": [4.0, 2.0, 1.0]}
    how["protocols"] = [Protocol.controlled, Protocol.position]
    found, asked = rows(measured(folder, corpus, **how)), settings(folder, corpus, **how)
    for protocol in how["protocols"]:
        for length in lengths:
            expected = their_nll(theirs(folder), asked, protocol, length)
            assert found[protocol, length].nll == pytest.approx(expected, **EXACT)
    assert {row.variant for row in found.values()} == {"rope_type=dynamic"}
    with pytest.raises(UserError, match=r"rope_type dynamic.*yarn would stretch them twice"):
        measured(folder, corpus, extension=YarnConfig())


# ---------------------------------------------------------------- what a row says


def test_beyond_the_table_of_gpt2(saved: dict[str, Path], corpus: Path) -> None:
    found = rows(measured(saved["gpt2"], corpus))
    assert [row.status for row in found.values()] == ["ok", "ok", "unsupported"]
    reason = found["controlled", 4 * CONTEXT].reason
    assert reason == f"learned table has 32 rows; {4 * CONTEXT} positions requested"
    clamped = rows(measured(saved["gpt2"], corpus, beyond=Beyond.clamp))
    assert {row.status for row in clamped.values()} == {"ok"}
    assert clamped["controlled", CONTEXT].nll == found["controlled", CONTEXT].nll
    assert {row.variant for row in clamped.values()} == {"beyond=clamp"}


def test_rows_and_record_say_what_was_measured(saved: dict[str, Path], corpus: Path) -> None:
    encodings = {}
    for family, folder in saved.items():
        evaluation = measured(folder, corpus, ratios=[1.0])
        row, [record] = evaluation.rows[0], evaluation.runs
        encodings[family] = row.encoding
        assert (row.model, row.seed, row.train_length) == (f"hf:{folder.name}", 0, CONTEXT)
        assert row.run_id == record["run_id"] == open_foreign(f"hf:{folder}", CONTEXT).id
        assert row.bpb == pytest.approx((row.nll or 0) / np.log(2))  # a token is a byte here
        assert record["config"]["model_type"] == family
        assert len(record["checkpoint_sha256"]) == 64
        assert record["protocol"]["split"] == "test"
        assert evaluation.provenance["transformers"]
    assert encodings == {
        "gpt2": "learned",
        "llama": "rope",
        "gpt_neox": "rope_partial",
        "bloom": "alibi",
        "mpt": "alibi",
    }


def test_ids_follow_the_weights(saved: dict[str, Path], tmp_path: Path) -> None:
    same = shutil.copytree(saved["llama"], tmp_path / saved["llama"].name)
    before = open_foreign(f"hf:{saved['llama']}", None)
    assert open_foreign(f"hf:{same}", None).id == before.id
    config = theirs(same).config
    config.initializer_range = 0.1
    assert open_foreign(f"hf:{save(tmp_path / 'b' / same.name, config)}", None).id != before.id
    save(same, config)  # over the old one
    assert open_foreign(f"hf:{same}", None).id != before.id
    shards = save(tmp_path / "c" / same.name, foreign.CONFIGS["llama"], max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 1
    assert load_foreign(open_foreign(f"hf:{shards}", None), 257).rows == 257


def test_the_training_length_is_what_the_config_says(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    told = {"gpt2": "n_positions", "llama": "max_position_embeddings", "mpt": "max_seq_len"}
    for family, key in told.items():
        checkpoint = open_foreign(f"hf:{saved[family]}", None)
        rows = 2 * CONTEXT if family == "gpt2" else CONTEXT
        assert (checkpoint.context, checkpoint.context_from) == (rows, key)
    folder = shutil.copytree(saved["llama"], tmp_path / "yarn")
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    change_config(folder, max_position_embeddings=4 * CONTEXT)
    change_config(folder, rope_parameters=rope | {"original_max_position_embeddings": CONTEXT})
    assert open_foreign(f"hf:{folder}", None).context == CONTEXT


def test_all_documents_may_be_scored(saved: dict[str, Path], corpus: Path) -> None:
    few = measured(saved["llama"], corpus, ratios=[1.0], max_targets=10**6)
    every = measured(saved["llama"], corpus, ratios=[1.0], max_targets=10**6, split=EvalSplit.all)
    assert every.rows[0].n_docs > 1.5 * few.rows[0].n_docs
    run = settings(
        saved["llama"], corpus, split=EvalSplit.all, models=None, context=None, data=None
    )
    with pytest.raises(UserError, match=r"eval\.split=all holds text that the run was trained"):
        check(run)


@every_family
def test_diagnostics_and_presets_of_every_family(
    family: str, saved: dict[str, Path], corpus: Path
) -> None:
    protocols = [each for each in Protocol if each is not Protocol.longppl_self]
    found = measured(saved[family], corpus, ratios=[1.0, 2.0], protocols=protocols, max_targets=32)
    bad = {
        (row.protocol, row.metric, row.eval_length, row.status, row.reason)
        for row in found.rows
        if row.status not in ("ok", "skipped")
    }
    beyond = {each for each in bad if family == "gpt2" and "table has 32 rows" in each[-1]}
    assert bad == beyond
    moved = [row.value for row in found.rows if row.metric == "max_abs_delta_nll"]
    if family == "gpt2":
        assert (moved[0] or 0) > 1e-2
    else:
        assert max(each or 0 for each in moved) < 1e-3


@every_family
@torch.no_grad()
def test_attention_is_looked_at_where_transformers_computes_it(
    family: str, saved: dict[str, Path], corpus: Path
) -> None:
    found = measured(saved[family], corpus, ratios=[2.0], protocols=[Protocol.attention])
    asked = settings(saved[family], corpus, ratios=[2.0], protocols=[Protocol.attention])
    dataset, plan = foreign.planned(asked)
    model = theirs(saved[family], max_seq_len=2 * CONTEXT, _attn_implementation="eager")
    firsts = []
    for end in plan.probes:
        ids = torch.from_numpy(dataset.test.tokens[end - 2 * CONTEXT : end].astype(np.int64))
        shares = torch.cat(model(ids[None], output_attentions=True).attentions)  # [L, H, T, T]
        firsts.append(shares[:, :, 1:, 0].mean(-1))
    expected = torch.stack(firsts).mean(0)
    for head in found.attention:
        assert head.mass_on_first == pytest.approx(float(expected[head.layer, head.head]), **CLOSE)
    assert len(found.attention) == expected.numel()
    assert len([row for row in found.rows if row.status == "ok"]) == len(ATTENTION)


# ---------------------------------------------------------------- the command


def words(folder: Path | str, corpus: Path, out: Path, *more: str) -> list[str]:
    fixed = [
        "eval.max_targets=64",
        "eval.bootstrap=100",
        "eval.protocols=[controlled]",
        "device=cpu",
    ]
    text = ["data=text", f"data.path={corpus}", "data.test=0.5", f"hydra.run.dir={out}"]
    return ["eval-extrapolate", f"model=hf:{folder}", *text, *fixed, *more]


def test_the_command_needs_no_network_and_knows_what_it_has_done(
    saved: dict[str, Path],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The path has a space and an equals sign, and is relative here."""

    def refuse(*given: Any) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(saved["llama"].parent)
    out = tmp_path / "out"
    line = words(saved["llama"].name, corpus, out)
    assert main(line) == Exit.OK
    assert main(line) == Exit.OK
    assert "already holds this evaluation" in capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    assert str(saved["llama"]) in results["provenance"]["evaluations"][0]["asked"]["models"][0]
    assert main([*line, "context=8"]) == Exit.USER
    assert "context" in capsys.readouterr().err


def test_a_sweep_over_extensions_and_a_list_of_models(
    saved: dict[str, Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(saved["llama"].parent))
    line = words(f"~/{saved['llama'].name}", corpus, tmp_path / "list")
    line[1] = f"model=[hf:~/{saved['llama'].name},hf:{saved['mpt']}]"
    assert main([*line, "extension=pi"]) == Exit.OK
    with (tmp_path / "list" / "results.csv").open() as file:
        told = {(row["encoding"], row["status"]) for row in csv.DictReader(file)}
    assert told == {("rope", "ok"), ("alibi", "unsupported")}
    swept = [word for word in words(saved["llama"], corpus, tmp_path) if "run.dir" not in word]
    sweep = ["-m", "extension=none,yarn", "hydra/launcher=basic", f"hydra.sweep.dir={tmp_path}/s"]
    assert main([*swept, *sweep]) == Exit.OK
    jobs = sorted(path.parent.name for path in (tmp_path / "s").glob("*/results.csv"))
    assert jobs == ["0-none", "1-yarn"]


# ---------------------------------------------------------------- folders that are none


def broken(kind: str, folder: Path) -> Path:
    """A copy of a good folder with one thing wrong."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    match kind:
        case "pickle":
            weights.rename(folder / "pytorch_model.bin")
        case "no weights":
            weights.unlink()
        case "shards":
            weights.unlink()
            index = {"weight_map": {"model.norm.weight": [1]}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        case "cut off":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "no config":
            config.unlink()
        case "config":
            config.write_text("{")
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
        case "tokenizer":
            (folder / "tokenizer.json").write_text("{}")
        case "adapter":
            (folder / "adapter_config.json").write_text("{}")
        case "layers":
            change_config(folder, num_hidden_layers=3)
        case "width":
            change_config(folder, intermediate_size=64)
        case "type":
            change_config(folder, model_type="bert")
        case "code":
            change_config(folder, model_type="mine", auto_map={"AutoConfig": "mine.Config"})
            (folder / "mine.py").write_text("raise SystemExit('code was run')")
        case "quantised":
            change_config(folder, quantization_config={"quant_method": "bitsandbytes"})
    return folder


BROKEN = [
    ("pickle", CheckpointError, "a pickle, which can run code"),
    ("no weights", CheckpointError, "has no model.safetensors"),
    ("shards", CheckpointError, "names no file of weights"),
    ("cut off", CheckpointError, "model.safetensors cannot be read"),
    ("no config", UserError, "the folder has no config.json"),
    ("config", CheckpointError, "config.json cannot be read"),
    ("no tokenizer", CheckpointError, "has no tokenizer.json"),
    ("tokenizer", CheckpointError, "tokenizer.json cannot be read"),
    ("adapter", UserError, "holds an adapter"),
    ("layers", CheckpointError, "layers.2.* and 8 more are missing"),
    ("width", CheckpointError, "missing or of another shape"),
    ("type", UserError, "model_type 'bert'; posbench evaluates gpt2, llama"),
    ("code", UserError, "model_type 'mine'"),
    ("quantised", UserError, "is quantised"),
]


@pytest.mark.parametrize(("kind", "error", "told"), BROKEN, ids=[each[0] for each in BROKEN])
def test_a_bad_folder_is_refused_in_one_line(
    kind: str,
    error: type[Exception],
    told: str,
    saved: dict[str, Path],
    corpus: Path,
    tmp_path: Path,
) -> None:
    folder = broken(kind, shutil.copytree(saved["llama"], tmp_path / "model"))
    with pytest.raises(error, match=told) as raised:
        measured(folder, corpus)
    assert "\n" not in str(raised.value)
    assert str(folder) in str(raised.value)


def test_a_good_model_is_measured_beside_a_bad_one(
    saved: dict[str, Path], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = broken("layers", shutil.copytree(saved["llama"], tmp_path / "bad"))
    line = words(saved["llama"], corpus, tmp_path / "out")
    line[1] = f"model=[hf:{bad},hf:{saved['llama']}]"
    assert main(line) == Exit.CHECKPOINT
    with (tmp_path / "out" / "results.csv").open() as file:
        told = {(row["run_id"].split("-")[0], row["status"]) for row in csv.DictReader(file)}
    assert told == {("bad", "skipped"), ("a_llama_x", "ok")}
    assert "no usable checkpoint" in capsys.readouterr().err


def test_the_length_of_bloom_has_to_be_given(saved: dict[str, Path], corpus: Path) -> None:
    with pytest.raises(UserError, match=r"does not say how long .* add context=N"):
        measured(saved["bloom"], corpus, context=None)


@pytest.mark.parametrize("extension", [ReropeConfig(), StreamingConfig()])
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_extensions_of_the_attention_itself_are_refused(
    extension: ExtensionConfig, family: str, saved: dict[str, Path], corpus: Path
) -> None:
    with pytest.raises(UserError, match="changes how attention is computed"):
        measured(saved[family], corpus, extension=extension)


MISTAKES = [
    ("model=hf:nowhere", "no such folder"),
    ("model=hf:openai-community/gpt2", "not fetched from the hub"),
    ("model=tiny", "model=hf:FOLDER"),
    ("model=hf:", "model=hf:FOLDER"),
    ("model=hf:a runs=b", "Leave out one of the two"),
    ("model=hf:a data=copy", "a task"),
    ("model=hf:a extension=pi extension.finetune_steps=5", "extension.finetune_steps=5"),
    ("model=hf:a eval.temperature=logn", "eval.temperature=logn"),
    ("model=hf:a,hf:b", "model=[hf:a,hf:b]"),
    ("data=stdlib", "data goes with model=hf:FOLDER"),
    ("data.path=x", "goes with data=OPTION"),
    ("context=64", "context goes with model=hf:FOLDER"),
]


@pytest.mark.parametrize(("typed", "told"), MISTAKES)
def test_what_does_not_go_together(
    typed: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["eval-extrapolate", *typed.split(), f"hydra.run.dir={out}"]) == Exit.USER
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("version", "told"), [(None, "not installed"), ("4.57.1", "5.24 or later")]
)
def test_the_library_is_missing_or_old(
    version: str | None, told: str, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    with pytest.raises(UserError, match=told):
        open_foreign(f"hf:{saved['llama']}", None)


# ---------------------------------------------------------------- their tokenizers


def test_special_tokens_in_a_text_are_text() -> None:
    tokenizer = ForeignTokenizer(foreign.byte_tokenizer().to_str())
    [ids] = tokenizer.encode(["a<|endoftext|>é"])
    assert tokenizer.decode(ids.tolist()) == "a<|endoftext|>é"
    assert len(ids) == len("a<|endoftext|>é".encode())
    assert tokenizer.byte_lengths[ids].tolist() == [1] * len(ids)


def test_padding_and_truncation_of_a_tokenizer_are_off() -> None:
    inner = foreign.byte_tokenizer()
    inner.enable_padding(length=50)
    inner.enable_truncation(5)
    assert len(ForeignTokenizer(inner.to_str()).encode(["0123456789"])[0]) == 10


def test_bytes_of_a_vocabulary_with_spaces_and_byte_tokens() -> None:
    names = ["<unk>", "<0xC3>", "<0xA9>", "\u2581a", "b"]
    inner = Tokenizer(
        models.BPE(
            {name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>"
        )
    )
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    assert ForeignTokenizer(inner.to_str()).byte_lengths.tolist() == [5, 1, 1, 2, 1]


def test_a_tokenizer_that_loses_text_gives_no_bits_per_byte(
    saved: dict[str, Path], corpus: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved["llama"], tmp_path / "lossy")
    inner = foreign.byte_tokenizer()
    inner.normalizer = normalizers.Replace("o", "")
    inner.save(str(folder / "tokenizer.json"))
    evaluation = measured(folder, corpus, ratios=[1.0])
    assert evaluation.rows[0].status == "ok"
    assert evaluation.rows[0].bpb is None
    assert evaluation.runs[0]["counts_bytes"] is False
