"""`model=` of `fit` and the commands: the weights of a Hugging Face directory, or the sizes of a config.json."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import CompileOptions, FitConfig, UserError, fit
from jvarlen.cli import main
from jvarlen.models import DecoderConfig, from_hugging_face, init_params, to_hugging_face
from jvarlen.models.hugging_face_config import hugging_face_fields
from jvarlen.planning.plan import Plan
from jvarlen.runs.config import DataConfig, DirectoryConfig, OptimizerConfig
from jvarlen.runs.data import open_training_data
from jvarlen.runs.model import RunModel, copy_files, initial_params, model_key, peak_rate
from jvarlen.runs.plan_config import PlanConfig
from jvarlen.runs.saved_config import load_config
from jvarlen.training.optimizers import Float32MasterState
from jvarlen.training.trainable import names_of
from tests.runs.test_model_commands import assert_same_leaves, tokenizer_file
from tests.support.settings import changed

DECODER = DecoderConfig(num_layers=2, width=16, num_heads=2, num_kv_heads=1, vocab_size=300, begins_samples=False)
RATE = OptimizerConfig(learning_rate=1e-12, weight_decay=0)  # with which bfloat16 stays as it is


def save_model(directory, dtype=jnp.bfloat16, **files):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), init_params(DECODER, seed=7))
    to_hugging_face(directory, params, DECODER)
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


def save_tokens(path, most=299):
    tokens = np.random.default_rng(0).integers(0, most + 1, 800).astype(np.int32)
    tokens[40] = most
    np.savez(path, tokens=tokens, offsets=np.arange(0, 801, 16))
    return path


def config_of(tmp_path, **settings):
    config = FitConfig(
        model=tmp_path / "llama",
        data=DataConfig(files=(save_tokens(tmp_path / "tokens.npz"),), held_out_fraction=0.1),
        directory=DirectoryConfig(run_dir=tmp_path / "run"),
        plan=PlanConfig(max_tokens=128, max_shapes=1, packing="padded"),
        compile=CompileOptions(cache_dir=None),
        optimizer=RATE,
        max_steps=1,
        progress=False,
    )
    return changed(config, **settings)


@pytest.mark.slow
def test_a_directory_is_trained_further_in_its_types_and_the_run_resumes_without_it(tmp_path, capsys):
    model = save_model(tmp_path / "llama")
    as_mistral = hugging_face_fields(DECODER, "bfloat16", "mistral")
    (model / "config.json").write_text(json.dumps(as_mistral))
    given = [np.array(leaf) for leaf in jax.tree.leaves(from_hugging_face(model)[1])]
    config = config_of(tmp_path, parallel="data2.zero3")
    first = fit(config)
    assert_same_leaves(first.state.params, given)
    assert isinstance(first.state.opt_state, Float32MasterState)
    saved = load_config(tmp_path / "run" / "config.json")
    assert saved.plan.num_microbatches == 2
    assert dataclasses.replace(saved.decoder, mlp_width=None, head_size=None) == DECODER
    assert "parameters in bfloat16, its weights\nlearning rate 1e-12 at 8 sequences a step" in capsys.readouterr().out
    shutil.rmtree(model)
    resumed = fit(dataclasses.replace(config, max_steps=2))
    assert resumed.summary.num_steps == 2
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "tuned")]) == 0
    assert_same_leaves(from_hugging_face(tmp_path / "tuned")[1], given)
    assert json.loads((tmp_path / "tuned" / "config.json").read_text()) == as_mistral
    with pytest.raises(UserError, match=r"these differ: decoder\.width: 16, 32"):
        fit(dataclasses.replace(config, decoder=DecoderConfig(width=32, vocab_size=301)))
    with pytest.raises(UserError, match=r"these differ: model: .*llama, .*other"):
        fit(dataclasses.replace(config, model=tmp_path / "other"))


def test_weights_that_changed_are_refused_until_there_is_a_checkpoint(tmp_path):
    model = save_model(tmp_path / "llama")
    config = config_of(tmp_path)
    fit(config)
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    key = model_key(model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2] + b"ab")
    assert model_key(model) != key
    with pytest.raises(UserError, match=rf"run began with another content of {model}: put it back"):
        fit(config)


def test_a_config_json_gives_sizes_and_random_weights_in_its_type(tmp_path):
    model = save_model(tmp_path / "llama")
    config = FitConfig(model=model / "config.json")
    decoder = RunModel.of(config).decoder
    assert (decoder.num_kv_heads, peak_rate(config, decoder)) == (1, 3e-3)
    drawn = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), init_params(DECODER, seed=0))
    assert_same_leaves(initial_params(config, decoder), drawn)
    config = FitConfig(model=model, decoder=DecoderConfig(compute_dtype="bfloat16"))
    decoder = RunModel.of(config).decoder
    assert (decoder.compute_dtype, decoder.width, peak_rate(config, decoder)) == ("bfloat16", 16, 5e-6)
    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds no weights .* its config\.json alone gives the model with random ones"):
        initial_params(config, decoder)


def test_a_tokenizer_beside_a_config_json_is_used_only_if_it_is_named(tmp_path, capsys):
    model = save_model(tmp_path / "llama")
    (tmp_path / "text.txt").write_text("a\nb\nc\nd\n")
    tokenizer = tokenizer_file(model / "tokenizer.json", num_words=300)
    data = DataConfig(files=(tmp_path / "text.txt",))
    open_training_data(FitConfig(model=model / "config.json", data=data))
    printed = capsys.readouterr().out
    assert f"text.txt is read as bytes: {tokenizer} is used if --tokenizer names it" in printed
    open_training_data(FitConfig(model=model / "config.json", data=dataclasses.replace(data, tokenizer=tokenizer)))
    assert "bytes" not in capsys.readouterr().out


def test_what_does_not_go_with_a_model_is_refused_by_name(tmp_path, capsys):
    model = save_model(tmp_path / "llama", dtype=jnp.float32)
    (tmp_path / "text.txt").write_text("a\nb\nc\nd\n")
    tokenizer = tokenizer_file(tmp_path / "tokenizer.json")  # of 400 ids
    save_tokens(tmp_path / "large.npz", most=300)
    tokens = save_tokens(tmp_path / "tokens.npz")
    float16 = tmp_path / "float16.json"
    float16.write_text((model / "config.json").read_text().replace('"float32"', '"float16"'))
    for given, said in (
        (["--decoder.width", "64"], f"--model ({model}) and --decoder.width (64) both say the shape of the decoder"),
        ([], f"--model ({model}) has other tokens than the bytes of the built-in corpus: give --data"),
        (["--data", tmp_path / "text.txt"], f"holds text, and there is no tokenizer.json in {model}: give --tokenizer"),
        (["--data", tmp_path / "text.txt", "--tokenizer", tokenizer], "tokenizer.json has 400 ids; at most 300 are"),
        (["--data", tmp_path / "large.npz"], "large.npz: tokens must be at least 0 and below 300, by"),
        (["--data", tokens, "--model", float16], f"{float16}: parameters in 'float16' are not trained"),
        (["--data", tokens, "--run-dir", model], "is the config.json of a model, which is trained as --model"),
    ):
        args = ["train", "--model", model, "--runs-dir", tmp_path / "runs", "--held-out-fraction", 0.1, "--no-progress"]
        assert main(list(map(str, [*args, *given]))) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError, match=r"model \(.*\) is for the built-in decoder, and there is a loss_fn"):
        fit(FitConfig(model=model), loss_fn=lambda params, batch: (0.0, 1.0), params=1.0)


def test_a_plan_of_a_model_is_that_of_its_training(tmp_path, capsys):
    model = save_model(tmp_path / "llama")
    special = {"chat_template": "{% for each in messages %}<s> {{ each.content }} {% endfor %}"}
    tokenizer_file(model / "tokenizer.json", num_words=300)
    (model / "tokenizer_config.json").write_text(json.dumps(special))
    chats = [{"messages": [{"role": "assistant", "content": "a " * i}]} for i in range(1, 60)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    data = [str(tmp_path / "chat.jsonl"), "--model", str(model), "--loss-on", "assistant", "--max-tokens", "256"]
    data += ["--packing", "padded"]
    assert main(["plan", *data]) == 0
    (planned,) = re.findall("^digest (.*)$", capsys.readouterr().out, re.MULTILINE)
    run = ["--run-dir", str(tmp_path / "run"), "--max-steps", "1", "--max-shapes", "1"]
    assert main(["plan", *data, "--max-shapes", "1", "--out", str(tmp_path / "plan.npz")]) == 0
    assert main(["train", "--data", *data, *run, "--compile.cache-dir", "None", "--no-progress"]) == 0
    plan = Plan.load(tmp_path / "plan.npz")
    assert Plan.load(tmp_path / "run" / "plan.npz").digest == plan.digest != planned
    assert int(plan.num_tokens.max()) > 0
    assert {path.name for path in (tmp_path / "run" / "model").iterdir()} == {
        *("config.json", "tokenizer.json", "tokenizer_config.json")
    }


def test_steps_of_a_model_are_measured_in_its_type(tmp_path, monkeypatch):
    model, measured = save_model(tmp_path / "llama"), []

    def note(decoder, **options):
        measured.append((decoder.num_kv_heads, options["dtype"]))
        raise UserError("noted")

    monkeypatch.setattr("jvarlen.runs.commands.measure.measure_costs", note)
    for path in (model, model / "config.json"):
        assert main(["measure", "--model", str(path), "--out", str(tmp_path / "cost.json")]) == 2
    assert measured == [(1, "bfloat16")] * 2


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """The directory of a run that trained a model from a Hugging Face directory, which is gone."""
    folder = tmp_path_factory.mktemp("earlier")
    save_model(folder / "llama")
    run = fit(config_of(folder, optimizer=OptimizerConfig(learning_rate=1e-2)))
    shutil.rmtree(folder / "llama")
    return run.run_dir, run.state.params


def test_a_run_begins_with_the_parameters_of_another_run(earlier, tmp_path, capsys):
    """Its optimizer is not taken; tokenizer and config.json go on from run to run."""
    folder, params = earlier
    run = fit(config_of(tmp_path, model=folder))
    assert f"{folder}: " in capsys.readouterr().out
    assert int(run.state.opt_state.inner_state[1][0].count) == 1
    assert_same_leaves(run.state.params, params)
    assert {path.name for path in (run.run_dir / "model").iterdir()} == {"config.json"}
    tokenizer = tokenizer_file(run.run_dir / "model" / "tokenizer.json", num_words=300)
    assert RunModel.of(FitConfig(model=run.run_dir)).tokenizer == tokenizer
    (tmp_path / "next").mkdir()
    copy_files(run.run_dir, tokenizer, tmp_path / "next")
    assert {path.name for path in (tmp_path / "next" / "model").iterdir()} == {"config.json", "tokenizer.json"}
    assert main(["export", str(run.run_dir), str(tmp_path / "tuned")]) == 0
    assert_same_leaves(from_hugging_face(tmp_path / "tuned")[1], params)


@pytest.mark.slow
def test_another_vocabulary_is_refused_by_name_unless_it_is_said(earlier, tmp_path, capsys):
    folder, params = earlier
    decoder = DecoderConfig(vocab_size=310)
    config = config_of(tmp_path, model=folder, parallel="data2.zero3", decoder=decoder)
    with pytest.raises(UserError, match=r"model \(.*\) and vocab_size \(310\) both say the shape of the decoder"):
        fit(config)
    with pytest.raises(UserError, match=r"embed\.embedding bfloat16\[300,16\], here bfloat16\[310,16\]"):
        fit(dataclasses.replace(config, fresh="head.*"))
    part = {"fresh": ("head.*", "layers.1.mlp.*"), "resized": ("embed.*",)}
    run = fit(dataclasses.replace(config, **part))
    size = dataclasses.replace(DECODER, vocab_size=310)
    drawn = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), init_params(size, seed=0))
    names = names_of(drawn)
    for name, found, own, given in zip(names, *map(jax.tree.leaves, (run.state.params, drawn, params)), strict=True):
        if name.startswith(("head.", "layers.1.mlp.")):
            expected = own
        elif name.startswith("embed"):
            expected = np.concatenate([given, own[300:]])
        else:
            expected = given
        np.testing.assert_array_equal(found, expected, strict=True, err_msg=name)
    resumed = fit(dataclasses.replace(config, **part, max_steps=2))
    assert resumed.summary.num_steps == 2
    with pytest.raises(UserError, match=r"these differ: resized: embed\.\*, none"):
        fit(dataclasses.replace(config, fresh=part["fresh"]))
    with pytest.raises(UserError, match=r"fresh= and resized= name parameters not taken from a model: give model="):
        FitConfig(fresh="head.*")
    args = ["train", "--model", str(folder), "--data", str(tmp_path / "tokens.npz"), "--fresh", "heads.*"]
    args += ["--held-out-fraction", "0.1", "--no-progress"]
    capsys.readouterr()
    assert main([*args, "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "'heads.*' of fresh matches no parameter" in capsys.readouterr().err
