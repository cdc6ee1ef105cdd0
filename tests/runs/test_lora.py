"""Adapters in runs: trained alone, resumed, sampled, merged or written alone by export, and trained further."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import FitConfig, UserError, fit
from jvarlen.cli import main
from jvarlen.models import DecoderConfig, LoraConfig, add_lora, from_hugging_face, merge_lora, to_hugging_face
from jvarlen.runs.config import CheckpointConfig, OptimizerConfig
from jvarlen.runs.model import RunModel, initial_params, peak_rate
from jvarlen.training.trainable import names_of
from tests.runs.test_model import DECODER, config_of, save_model
from tests.runs.test_model_commands import assert_same_leaves, tokenizer_file

LORA = LoraConfig(rank=2, alpha=3, targets=("layers.*.attention.[qv].kernel", "layers.*.mlp.up.kernel"), dropout=0.1)
SETTINGS = {"lora_rank": 2, "lora_alpha": 3, "lora_on": LORA.targets, "lora_dropout": 0.1}
ADAPTED = dataclasses.replace(DECODER, lora=LORA)
RATE = OptimizerConfig(learning_rate=1e-2)
STEPS = 4


def named(params):
    return dict(zip(names_of(params), jax.tree.leaves(params), strict=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that trained adapters of a model in bfloat16 over two devices: its folder, settings and parameters."""
    folder = tmp_path_factory.mktemp("lora")
    save_model(folder / "llama")
    tokenizer_file(folder / "llama" / "tokenizer.json", num_words=300)
    (folder / "text.txt").write_text("".join(f"w{i} a plan of w{i + 3}\n" for i in range(7, 97)))
    config = config_of(
        folder,
        files=(folder / "text.txt",),
        **SETTINGS,
        parallel="data2.zero3",
        optimizer=RATE,
        max_steps=STEPS,
        checkpoints=CheckpointConfig(checkpoint_every=2),
    )
    return folder, config, fit(config).state


@pytest.mark.slow
def test_adapters_alone_are_trained_and_a_resumed_run_has_the_same_bits(trained, tmp_path):
    folder, config, state = trained
    first = named(add_lora(from_hugging_face(folder / "llama")[1], ADAPTED, config.seed))
    after = named(state.params)
    assert first.keys() == after.keys()
    adapters = {name for name in first if "lora" in name}
    assert len(adapters) == 2 * 3 * DECODER.num_layers
    for name, leaf in after.items():
        assert leaf.dtype == (jnp.float32 if name in adapters else jnp.bfloat16)
        assert np.array_equal(leaf, first[name]) == (name not in adapters), name
    kept = [leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim == 2]
    assert sorted(kept) == sorted([after[name].shape for name in adapters] * 2)  # two moments
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / str(STEPS))
    directory = dataclasses.replace(config.directory, run_dir=tmp_path / "run")
    resumed = fit(dataclasses.replace(config, directory=directory))
    assert resumed.summary.num_steps == STEPS
    assert resumed.state.key == state.key
    assert_same_leaves(resumed.state._replace(key=None), state._replace(key=None))


@pytest.mark.slow
def test_export_merges_adapters_or_writes_them_alone_beside_their_model(trained, tmp_path, capsys):
    folder, _, state = trained
    run = str(folder / "run")
    assert main(["export", run, str(tmp_path / "merged")]) == 0
    decoder, merged = from_hugging_face(tmp_path / "merged")
    assert decoder.lora is None
    assert_same_leaves(merged, merge_lora(state.params, ADAPTED))
    assert main(["export", run, str(tmp_path / "adapters"), "--adapters"]) == 0
    num_adapters = sum(leaf.size for name, leaf in named(state.params).items() if "lora" in name)
    assert (
        f"{num_adapters:,} parameters of adapters of {folder / 'llama'} after {STEPS} steps" in capsys.readouterr().out
    )
    again, params = from_hugging_face(tmp_path / "adapters")
    assert again.adapted == ADAPTED.adapted
    assert_same_leaves(params, state.params)
    assert main(["export", str(tmp_path / "adapters"), str(tmp_path / "merged_later")]) == 0
    for path in (tmp_path / "merged").iterdir():
        assert path.read_bytes() == (tmp_path / "merged_later" / path.name).read_bytes(), path.name
    texts = []
    capsys.readouterr()
    for source in (run, str(tmp_path / "adapters")):
        assert main(["sample", source, "--prompt", "a plan", "--max-new-tokens", "6", "--no-progress"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""


@pytest.mark.slow
def test_adapters_are_trained_further_from_a_run_and_from_their_directory(trained, tmp_path, capsys):
    folder, _, state = trained
    assert main(["export", str(folder / "run"), str(tmp_path / "adapters"), "--adapters"]) == 0
    for name in ("run", "adapters"):
        source = (folder if name == "run" else tmp_path) / name
        next_run = tmp_path / f"next_of_{name}"
        settings = config_of(
            tmp_path, files=(folder / "text.txt",), model=source, run_dir=next_run
        )  # a rate at which nothing changes
        assert (RunModel.of(settings).decoder.adapted, RunModel.of(settings).tokenizer.name) == (
            *(ADAPTED.adapted, "tokenizer.json"),
        )
        run = fit(settings)
        assert_same_leaves(merge_lora(run.state.params, ADAPTED), merge_lora(state.params, ADAPTED))
        printed = capsys.readouterr().out
        assert "parameters in bfloat16 and float32, its weights" in printed
        assert "of adapters of rank 2: attention.q, attention.v, mlp.up" in printed
        assert {path.name for path in (next_run / "model").iterdir()} == {"config.json", "tokenizer.json"}
        assert main(["export", str(next_run), str(tmp_path / f"of_{name}"), "--adapters"]) == 0  # of the same model
        assert json.loads((tmp_path / f"of_{name}" / "adapter_config.json").read_text())[
            "base_model_name_or_path"
        ] == str(folder / "llama")
        with pytest.raises(UserError, match=r"has adapters of rank 2, and new ones of rank 4 are asked for"):
            fit(config_of(tmp_path, model=source, lora_rank=4))


def test_adapters_are_not_written_beside_another_model(tmp_path, capsys):
    model = save_model(tmp_path / "llama")
    fit(config_of(tmp_path, lora_rank=2))
    args = ["export", str(tmp_path / "run"), str(tmp_path / "adapters"), "--adapters"]
    other = jax.tree.map(lambda leaf: -leaf, from_hugging_face(model)[1])
    shutil.rmtree(model)
    assert main(args) == 2
    assert f"there is no directory {model}" in capsys.readouterr().err
    to_hugging_face(model, other, DECODER)
    capsys.readouterr()
    assert main(args) == 2
    said = capsys.readouterr().err
    assert (
        f"{model} is not the model that {tmp_path / 'run'} has adapters of, these parameters differ: embed.emb" in said
    )
    assert "Without --adapters" in said
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0  # the run has its weights
    assert not (tmp_path / "adapters").exists()


def test_a_run_and_exported_adapters_name_their_model_by_its_whole_path(tmp_path, monkeypatch):
    model = save_model(tmp_path / "llama")
    tokenizer_file(model / "tokenizer.json", num_words=300)
    monkeypatch.chdir(tmp_path)
    to_hugging_face("adapters", add_lora(from_hugging_face(model)[1], ADAPTED, 0), ADAPTED, base_model="llama")
    assert RunModel.of(FitConfig(model=Path("adapters"))).tokenizer == model / "tokenizer.json"  # absolute
    assert main(["export", "adapters", "again", "--adapters"]) == 0
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)


def test_steps_of_adapters_with_dropout_are_compiled_without_training(tmp_path, capsys):
    model, out = save_model(tmp_path / "llama"), tmp_path / "figures.json"
    tokenizer_file(model / "tokenizer.json", num_words=300)
    (tmp_path / "text.txt").write_text("".join(f"w{i} a plan\n" for i in range(7, 40)))
    args = ["--max-tokens", "64", "--max-shapes", "1", "--lora-rank", "2", "--lora-dropout", "0.1", "--no-progress"]
    data = ["--data", str(tmp_path / "text.txt"), "--dry-run", "--target", "here", "--out", str(out)]
    assert main(["train", "--model", str(model), *args, *data]) == 0, capsys.readouterr().err
    assert out.exists()


def test_settings_of_adapters(tmp_path):
    model = save_model(tmp_path / "llama")
    config = FitConfig(model=model, **SETTINGS)
    decoder = RunModel.of(config).decoder
    assert decoder.lora == LORA
    assert peak_rate(config, decoder) == 1e-4
    assert RunModel.of(FitConfig(model=model, lora_rank=4)).decoder.lora == LoraConfig(rank=4)
    assert RunModel.of(FitConfig(model=model, decoder=DecoderConfig(lora=LORA))).decoder == decoder
    params = named(initial_params(config, decoder))
    frozen = named(from_hugging_face(model)[1])
    assert all(np.array_equal(params[name], leaf) for name, leaf in frozen.items())
    random = FitConfig(model=model / "config.json", lora_rank=2, target="here", dry_run=True)
    shapes = named(initial_params(random, RunModel.of(random).decoder))
    assert {leaf.dtype.name for name, leaf in shapes.items() if "lora" in name} == {"float32"}
    assert {leaf.dtype.name for name, leaf in shapes.items() if "lora" not in name} == {"bfloat16"}
    for given, said in (
        ({"lora_rank": 2}, r"lora_rank \(2\) adds adapters to the weights of a model: give model="),
        ({"model": model, "lora_alpha": 2, "lora_on": "x"}, "lora_alpha, lora_on are for adapters: give lora_rank="),
        ({"model": model, "lora_rank": 0}, r"rank \(0\)"),
        ({"model": model, "lora_rank": 1, "lora_alpha": 0}, r"above 0: alpha \(0\)"),
    ):
        with pytest.raises(UserError, match=said):
            FitConfig(**given)
    with pytest.raises(UserError, match=r"targets of lora match no kernel: 'layers\.\*\.q'"):
        RunModel.of(FitConfig(model=model, lora_rank=2, lora_on="layers.*.q"))
