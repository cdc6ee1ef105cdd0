"""`jvarlen sample` and `jvarlen export`: runs of the built-in model, of bytes or of a tokenizer, and on no others."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import CompileOptions, FitConfig, fit
from jvarlen._common.terminal import escape_controls
from jvarlen.cli import main
from jvarlen.models import DecoderConfig, flat_params, generate, init_params
from jvarlen.runs.config import DataConfig, DirectoryConfig, PlanConfig, save_config
from jvarlen.runs.task import open_training_data
from jvarlen.training.checkpoint import Place, open_checkpoints
from jvarlen.training.train_state import new_state
from tests.settings import changed

MODEL = DecoderConfig(num_layers=1, width=16, num_heads=1)
BEST, LATEST = 1, 2
SAMPLED = ["--max-new-tokens", "6", "--no-progress", "--max-shapes", "1"]


@functools.cache
def initial_params():
    return jax.tree.map(lambda leaf: leaf * 5, init_params(MODEL, seed=0))


def scaled(step):
    return jax.tree.map(lambda leaf: leaf * step, initial_params())


def make_run(folder, params_of_step=scaled, **settings):
    """A run directory as `fit` leaves it, without the training: checkpoint 1 is the best, checkpoint 2 the latest."""
    folder.mkdir()
    save_config(changed(FitConfig(), **{"decoder": MODEL} | settings), folder / "config.json")
    with open_checkpoints(folder / "checkpoints") as checkpoints:
        for step, metric in ((BEST, 1.0), (LATEST, 2.0)):
            place = Place(num_steps_done=step, epoch=0, step=step, plan_digest="")
            checkpoints.save(new_state(params_of_step(step), optax.adamw(1e-3)), place, metric=metric)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run")


def said(capsys, *args):
    """What a command that fails says, in one line."""
    assert main(list(map(str, args))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(("flags", "step"), [([], LATEST), (["--from", "best"], BEST)])
def test_sample_continues_prompts_with_the_model_of_the_checkpoint(run, tmp_path, capsys, flags, step):
    (tmp_path / "prompts.txt").write_bytes("def f\r\n\nö\n".encode())
    args = ["sample", run, "--prompt", "ab", "--prompt", "", "--prompts", tmp_path / "prompts.txt"]
    assert main(list(map(str, [*args, *SAMPLED, *flags, "--out", tmp_path / "out.jsonl"]))) == 0
    prompts = ["ab", "", "def f", "", "ö"]
    options = {"max_new_tokens": 6, "max_shapes": 1, "progress": False}
    new = generate(scaled(step), MODEL, [list(prompt.encode()) for prompt in prompts], **options)
    texts = [
        (prompt.encode() + bytes(tokens.tolist())).decode(errors="replace")
        for prompt, tokens in zip(prompts, new, strict=True)
    ]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines == [
        {"prompt": prompt, "text": text, "tokens": tokens.tolist()}
        for prompt, text, tokens in zip(prompts, texts, new, strict=True)
    ]
    names = ["prompt 1", "prompt 2", *(f"{tmp_path / 'prompts.txt'} line {i}" for i in (1, 2, 3))]
    printed = "".join(f"── {name}\n{escape_controls(text)}\n" for name, text in zip(names, texts, strict=True))
    assert capsys.readouterr().out == f"{printed}{tmp_path / 'out.jsonl'}\n"


def test_a_single_sample_is_printed_alone_and_its_seed_decides_it(run, capsys):
    args = ["sample", str(run), "--prompt", "ab", *SAMPLED, "--temperature", "1"]
    printed = []
    for seed in ("3", "3", "4"):
        assert main([*args, "--seed", seed]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0].startswith("ab")
    assert printed[0] == printed[1] != printed[2]


def test_a_sample_ends_before_the_stop(run, capsys):
    args = ["sample", str(run), "--prompt", "ab", *SAMPLED]
    assert main(args) == 0
    whole = capsys.readouterr().out
    assert main([*args, "--stop", whole[4]]) == 0
    assert capsys.readouterr().out == whole[: whole.index(whole[4], 2)] + "\n"


def tokenizer_file(path):
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<s>": 0, "</s>": 1, "a": 2, "plan": 3, "of": 4, "steps": 5, "?": 6} | {f"w{i}": i for i in range(7, 400)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    special = [("<s>", 0), ("</s>", 1)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    tokenizer.save(str(path))
    return path


@pytest.mark.slow
def test_a_run_with_a_tokenizer_samples_its_words_to_their_end_and_is_exported_whole(tmp_path, capsys):
    tokenizer = tokenizer_file(tmp_path / "tokenizer.json")
    (tmp_path / "train.txt").write_text("a plan of steps\n" * 40 + "".join(f"w{i} a plan\n" for i in range(7, 27)))
    config = FitConfig(
        data=DataConfig(files=(tmp_path / "train.txt",), tokenizer=tokenizer, held_out_fraction=0.3),
        max_steps=200,
        directory=DirectoryConfig(run_dir=tmp_path / "run"),
        progress=False,
        compile=CompileOptions(cache_dir=None),
        plan=PlanConfig(max_tokens=64, max_shapes=1),
        decoder=MODEL,
    )
    trained = fit(config)
    capsys.readouterr()
    assert main(["sample", str(tmp_path / "run"), "--prompt", "a plan", *SAMPLED, "--out", str(tmp_path / "out")]) == 0
    line = json.loads((tmp_path / "out").read_text())
    assert line == {"prompt": "a plan", "text": "a plan of steps", "tokens": [4, 5, 1]}

    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "model.safetensors"
    assert main(["export", str(tmp_path / "run"), str(path)]) == 0
    with safetensors.safe_open(path, "numpy") as file:
        metadata = file.metadata()
        for name, array in flat_params(trained.state.params).items():
            np.testing.assert_array_equal(file.get_tensor(name), array, strict=True)
    assert json.loads(metadata["config"])["vocab_size"] == 400
    assert metadata["tokenizer"] == tokenizer.read_text()
    assert (metadata["end_token"], metadata["num_steps"]) == ("1", "200")


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_tokenizer_that_changed_since_the_training_is_refused_by_name(tmp_path, capsys, is_moved):
    pytest.importorskip("safetensors")
    tokenizer, data = tokenizer_file(tmp_path / "tokenizer.json"), tmp_path / "train.txt"
    data.write_text("".join(f"w{i} a plan\n" for i in range(7, 60)))
    settings = {"data": DataConfig(files=(data,), tokenizer=tokenizer, held_out_fraction=0.3), "progress": False}
    model = dataclasses.replace(MODEL, vocab_size=400)
    run = make_run(tmp_path / "run", lambda step: init_params(model, seed=step), decoder=model, **settings)
    keys = open_training_data(FitConfig(**settings)).content_keys
    (run / "data.json").write_text(json.dumps(keys))
    given = []
    if is_moved:
        given = ["--tokenizer", tokenizer.rename(tmp_path / "moved.json")]
        tokenizer = given[1]
    commands = [
        ["sample", run, "--prompt", "a plan", *SAMPLED, *given],
        ["export", run, tmp_path / "model.safetensors", *given],
    ]
    for args in commands:
        assert main(list(map(str, args))) == 0
    capsys.readouterr()
    tokenizer.write_text(tokenizer.read_text().replace('"plan"', '"nalp"'))  # as many ids
    for args in commands:
        line = said(capsys, *args)
        assert f"{tokenizer} is not the tokenizer that {run} was trained with" in line
        assert f"{tmp_path / 'tokenizer.json'} was then, or name it with --tokenizer" in line
    if not is_moved:
        line = said(capsys, "train", "--resume", run, "--no-progress")
        assert line == f"jvarlen: {run} began with another content of {tokenizer}: put it back, or begin a new run"


@pytest.mark.parametrize(("flags", "step"), [([], LATEST), (["--from", "best"], BEST)])
def test_export_writes_the_model_of_the_checkpoint(run, tmp_path, capsys, flags, step):
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "model.safetensors"
    assert main(["export", str(run), str(path), *flags]) == 0
    size = sum(array.size for array in flat_params(initial_params()).values())
    assert capsys.readouterr().out == f"{path}: {size:,} parameters after {step} steps\n"
    with safetensors.safe_open(path, "numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("head.kernel"), flat_params(scaled(step))["head.kernel"])
        assert "tokenizer" not in file.metadata()


@pytest.mark.parametrize("named", ["data/a.jsonl", "data", "data/*.jsonl", "saved", "eval"])
def test_no_output_replaces_what_the_run_was_trained_on(tmp_path, capsys, named):
    for name in ("data/a.jsonl", "saved/train/data.arrow", "saved/dataset_dict.json", "tokenizer.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("kept")
    files = {"eval_data": (tmp_path / "data",)} if named == "eval" else {"files": (tmp_path / named,)}
    run = make_run(tmp_path / "run", data=DataConfig(**files, tokenizer=tmp_path / "tokenizer.json"))
    (run / "metrics.jsonl").write_text("")
    commands = (
        ["export", run],
        ["sample", run, "--prompt", "a", "--no-progress", "--out"],
        ["report", run, "--html"],
    )
    for taken in (
        tmp_path / ("saved/train/data.arrow" if named == "saved" else "data/a.jsonl"),
        tmp_path / "tokenizer.json",
    ):
        for command in commands:
            assert f"({taken}) would overwrite {taken}, which is read" in said(capsys, *command, taken)
        assert taken.read_text() == "kept"


def test_runs_that_hold_no_trained_model_of_ours_are_refused_by_name(tmp_path, capsys):
    own = make_run(tmp_path / "own", lambda step: {"w": jnp.full(3, step), "b": jnp.zeros(())})
    empty = tmp_path / "empty"
    empty.mkdir()
    save_config(FitConfig(), empty / "config.json")
    target = tmp_path / "model.safetensors"
    for command in (["export", None, target], ["sample", None, "--prompt", "a", "--out", target, "--no-progress"]):
        for run_dir, message in (
            (own, f"{own} is a run of a model of your own, not of the built-in one: "),
            (empty, f"{empty / 'checkpoints'} holds no checkpoint"),
            (tmp_path / "none", f"{tmp_path / 'none'} is not the directory of a run"),
        ):
            line = said(capsys, *(run_dir if arg is None else arg for arg in command))
            assert message in line
            if run_dir == own:
                assert "unexpected: b, w" in line
    assert not target.exists()


def test_a_damaged_checkpoint_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    (run / "checkpoints" / "2" / "about.json").write_text("{}")
    line = said(capsys, "export", run, tmp_path / "model.safetensors")
    assert "checkpoint 2 in" in line
    assert "about.json" in line
    assert not (tmp_path / "model.safetensors").exists()


def test_prompts_and_targets_that_are_none_are_listed_and_nothing_is_written(run, tmp_path, capsys):
    prompts, binary = tmp_path / "prompts.txt", tmp_path / "binary.txt"
    prompts.write_text("short\n" + "long " * 20 + "\n")
    binary.write_bytes(b"a\nb\xff\n")
    (tmp_path / "empty.txt").write_text("")
    tokenizer = tokenizer_file(tmp_path / "tokenizer.json")
    nowhere = tmp_path / "nowhere" / "model.safetensors"
    out = ["--out", tmp_path / "out.jsonl", *SAMPLED]
    for args, message in (
        (["sample", run], "there is nothing to continue"),
        (["sample", run, "--prompts", tmp_path / "empty.txt"], "there is nothing to continue"),
        (["sample", run, "--prompts", tmp_path / "none.txt"], "none.txt"),
        (["sample", run, "--prompts", binary], f"{binary}: line 2 is not UTF-8"),
        (
            ["sample", run, "--prompts", prompts, "--prompt", "\ud800", "--max-tokens", "50"],
            f"prompt 1: half a surrogate pair, which has no UTF-8; {prompts} line 2: 100 tokens, but --max-tokens "
            "leaves room for 44",
        ),
        (
            ["sample", run, "--tokenizer", tokenizer, "--prompt", "a w399 w7 w300"],
            "prompt 1: tokens 399, 300, but the model's are below 256",
        ),
        (["sample", run, "--prompt", "a", "--temperature", "-1"], "temperature (-1.0)"),
        (["sample", run, "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens (0)"),
        (["sample", run, "--prompt", "a", "--out", nowhere], "there is no directory"),
    ):
        assert message in said(capsys, *args[:2], *out, *args[2:])
    assert "there is no directory" in said(capsys, "export", run, nowhere)
    assert not (tmp_path / "out.jsonl").exists()


def test_tokens_that_are_no_bytes_need_a_tokenizer(tmp_path, capsys):
    model = DecoderConfig(num_layers=1, width=16, num_heads=1, vocab_size=400)
    params = init_params(model, seed=0)
    run = make_run(tmp_path / "run", lambda step: params)
    assert "the run's 400 tokens are no bytes, and its settings name no tokenizer" in said(
        capsys, "sample", run, "--prompt", "a"
    )
    tokenizer = tokenizer_file(tmp_path / "tokenizer.json")
    assert main(["sample", str(run), "--prompt", "a", "--tokenizer", str(tokenizer), *SAMPLED]) == 0
    assert capsys.readouterr().out.startswith("a ")


def test_the_end_token_of_the_data_ends_a_sample(tmp_path, capsys):
    prompts = [chr(byte) for byte in range(97, 123)]
    options = {"max_new_tokens": 6, "max_shapes": 1, "progress": False}
    continued = generate(scaled(LATEST), MODEL, [[ord(prompt)] for prompt in prompts], **options)
    prompt, (first, second, *_) = next(
        (prompt, new.tolist()) for prompt, new in zip(prompts, continued, strict=True) if new[0] != new[1]
    )
    run = make_run(tmp_path / "run", end_token=second)
    assert main(["sample", str(run), "--prompt", prompt, *SAMPLED, "--out", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out").read_text())["tokens"] == [first, second]
