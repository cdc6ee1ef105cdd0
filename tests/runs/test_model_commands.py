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
from jvarlen.inference import generate
from jvarlen.models import DecoderConfig, from_hugging_face, init_params
from jvarlen.runs.config import DataConfig, DirectoryConfig, PlanConfig
from jvarlen.runs.saved_config import save_config
from jvarlen.training.checkpoint import Place, open_checkpoints
from jvarlen.training.train_state import new_state
from tests.support.settings import changed

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
    """What a command that fails says."""
    assert main(list(map(str, args))) == 2
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize(("flags", "step"), [([], LATEST), (["--from", "best"], BEST)])
def test_sample_continues_prompts_with_the_model_of_the_checkpoint(run, tmp_path, capsys, flags, step):
    (tmp_path / "prompts.txt").write_bytes("def f\r\n\nö\u2028\x85\x0b\x0c.\n".encode())
    args = ["sample", run, "--prompt", "ab", "--prompt", "", "--prompts", tmp_path / "prompts.txt"]
    assert main(list(map(str, [*args, *SAMPLED, *flags, "--out", tmp_path / "out.jsonl"]))) == 0
    prompts = ["ab", "", "def f", "", "ö\u2028\x85\x0b\x0c."]
    options = {"max_new_tokens": 6, "max_shapes": 1, "progress": False}
    new = generate(scaled(step), MODEL, [list(prompt.encode()) for prompt in prompts], **options)
    texts = [
        (prompt.encode() + bytes(tokens.tolist())).decode(errors="replace")
        for prompt, tokens in zip(prompts, new, strict=True)
    ]
    lines = list(map(json.loads, (tmp_path / "out.jsonl").read_bytes().splitlines()))
    assert lines == [
        {"prompt": prompt, "text": text, "tokens": tokens.tolist()}
        for prompt, text, tokens in zip(prompts, texts, new, strict=True)
    ]
    printed = "".join(f"── prompt {i}\n{escape_controls(text)}\n" for i, text in enumerate(texts, 1))
    assert capsys.readouterr().out == f"{printed}{tmp_path / 'out.jsonl'}\n"


def test_a_single_sample_is_printed_alone_and_its_seed_decides_it(run, capsys):
    args = ["sample", str(run), "--prompt", "ab", *SAMPLED, "--temperature", "10"]
    printed = []
    for seed in ("3", "3", "4"):
        assert main([*args, "--seed", seed]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0].startswith("ab")
    assert printed[0] == printed[1] != printed[2]


def test_several_samples_of_a_prompt_are_written_one_after_the_other(run, tmp_path, capsys):
    out, drawing = tmp_path / "out.jsonl", ["--temperature", "2", "--top-k", "20", "--top-p", "0.9"]
    args = ["sample", run, "--prompt", "ab", "--prompt", "c", "--samples-per-prompt", "2", *drawing, *SAMPLED]
    assert main([*map(str, args), "--out", str(out)]) == 0
    options = {"max_new_tokens": 6, "max_shapes": 1, "temperature": 2.0, "top_k": 20, "top_p": 0.9, "progress": False}
    new = generate(scaled(LATEST), MODEL, [[*b"ab"], [*b"c"]], samples_per_prompt=2, **options)
    lines = list(map(json.loads, out.read_bytes().splitlines()))
    assert [(line["prompt"], line["tokens"]) for line in lines] == [
        (prompt, tokens.tolist()) for prompt, tokens in zip(("ab", "ab", "c", "c"), new, strict=True)
    ]
    assert "── prompt 2, sample 1\nc" in capsys.readouterr().out
    assert "all the same at temperature 0" in said(capsys, "sample", run, "--prompt", "a", "--samples-per-prompt", "2")


def test_a_sample_ends_before_the_stop(run, capsys):
    args = ["sample", str(run), "--prompt", "ab", *SAMPLED]
    assert main(args) == 0
    whole = capsys.readouterr().out
    assert main([*args, "--stop", whole[4]]) == 0
    assert capsys.readouterr().out == whole[: whole.index(whole[4], 2)] + "\n"


def tokenizer_file(path, num_words=400):
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<s>": 0, "</s>": 1, "a": 2, "plan": 3, "of": 4, "steps": 5, "?": 6} | {
        f"w{i}": i for i in range(7, num_words)
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    special = [("<s>", 0), ("</s>", 1)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    tokenizer.save(str(path))
    return path


def assert_same_leaves(one, other):
    for leaf, expected in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(leaf, expected, strict=True)


@pytest.mark.slow
def test_a_run_with_a_tokenizer_samples_its_words_to_their_end_and_so_does_what_is_exported(tmp_path, capsys):
    tokenizer = tokenizer_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "train.txt").write_text("a plan of steps\n" * 40 + "".join(f"w{i} a plan\n" for i in range(7, 27)))
    config = FitConfig(
        data=DataConfig(files=(tmp_path / "train.txt",), tokenizer=tokenizer, held_out_fraction=0.3),
        max_steps=200,
        directory=DirectoryConfig(run_dir=tmp_path / "run"),
        progress=False,
        compile=CompileOptions(cache_dir=None),
        plan=PlanConfig(max_tokens=64, max_shapes=1, packing="padded"),
        decoder=MODEL,
    )
    trained = fit(config)
    content = tokenizer.read_text()
    tokenizer.unlink()  # the run has a copy
    exported = tmp_path / "exported"
    assert main(["export", str(tmp_path / "run"), str(exported)]) == 0
    for source in (tmp_path / "run", exported):
        out = tmp_path / f"{source.name}.jsonl"
        assert main(["sample", str(source), "--prompt", "a plan", *SAMPLED, "--out", str(out)]) == 0
        assert json.loads(out.read_text()) == {"prompt": "a plan", "text": "a plan of steps", "tokens": [4, 5, 1]}
    assert_same_leaves(from_hugging_face(exported)[1], trained.state.params)
    fields = json.loads((exported / "config.json").read_text())
    assert (fields["vocab_size"], fields["eos_token_id"], fields["bos_token_id"]) == (401, 1, 400)
    assert (exported / "tokenizer.json").read_text() == content
    assert (exported / "tokenizer_config.json").exists()


def test_a_run_has_one_tokenizer(tmp_path, capsys):
    model = dataclasses.replace(MODEL, vocab_size=401)
    run = make_run(tmp_path / "run", lambda step: init_params(model, seed=step), decoder=model)
    tokenizer = tokenizer_file(tmp_path / "tokenizer.json")
    no_tokenizer = f"jvarlen: the 400 tokens of {run} are not bytes, and it has no tokenizer: give one with --tokenizer"
    assert said(capsys, "sample", run, "--prompt", "a") == no_tokenizer
    assert main(["sample", str(run), "--prompt", "a", "--tokenizer", str(tokenizer), *SAMPLED]) == 0
    assert capsys.readouterr().out.startswith("a ")
    assert main(["export", str(run), str(tmp_path / "exported"), "--tokenizer", str(tokenizer)]) == 0
    assert (tmp_path / "exported" / "tokenizer.json").read_text() == tokenizer.read_text()
    (run / "model").mkdir()
    tokenizer_file(run / "model" / "tokenizer.json")
    for command in (["sample", run, "--prompt", "a"], ["export", run, tmp_path / "other"]):
        line = said(capsys, *command, "--tokenizer", tokenizer)
        assert line == f"jvarlen: --tokenizer ({tokenizer}) is for models without one, and {run} has its own"


@pytest.mark.parametrize(("flags", "step"), [([], LATEST), (["--from", "best"], BEST)])
def test_export_writes_the_model_of_the_checkpoint_which_samples_as_the_run(run, tmp_path, capsys, flags, step):
    exported = tmp_path / "exported"
    assert main(["export", str(run), str(exported), *flags]) == 0
    size = sum(leaf.size for leaf in jax.tree.leaves(initial_params()))
    assert capsys.readouterr().out == f"{exported}: {size:,} parameters after {step} steps\n"
    assert {path.name for path in exported.iterdir()} == {"config.json", "model.safetensors"}
    assert_same_leaves(from_hugging_face(exported)[1], scaled(step))
    told = []
    for source in ([str(run), *flags], [str(exported)]):  # also from an empty prompt: the token that begins samples
        assert main(["sample", *source, "--prompt", "ab", "--prompt", "", *SAMPLED]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert said(capsys, "export", run, exported) == f"jvarlen: {exported} is there already"


def test_runs_that_hold_no_trained_model_of_ours_are_refused_by_name(tmp_path, capsys):
    own = make_run(tmp_path / "own", lambda step: {"w": jnp.full(3, step), "b": jnp.zeros(())})
    empty = tmp_path / "empty"
    empty.mkdir()
    save_config(FitConfig(), empty / "config.json")
    target = tmp_path / "model"
    for command in (["export", None, target], ["sample", None, "--prompt", "a", "--out", target, "--no-progress"]):
        for run_dir, message in (
            (own, f"{own} is a run of a model of your own, not of the built-in one: "),
            (empty, f"{empty / 'checkpoints'} holds no checkpoint"),
            (tmp_path / "none", f"{tmp_path / 'none'} is not the directory of a run"),
        ):
            line = said(capsys, *(run_dir if arg is None else arg for arg in command))
            assert message in line
            if run_dir == own:
                assert "b float32[], here absent" in line
    assert not target.exists()


def test_a_damaged_checkpoint_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    (run / "checkpoints" / "2" / "about.json").write_text("{}")
    line = said(capsys, "export", run, tmp_path / "model")
    assert "checkpoint 2 in" in line
    assert "about.json" in line
    assert not (tmp_path / "model").exists()


def test_prompts_and_targets_that_are_none_are_listed_and_nothing_is_written(run, tmp_path, capsys):
    prompts, binary = tmp_path / "prompts.txt", tmp_path / "binary.txt"
    prompts.write_text("short\n" + "long " * 20 + "\n")
    binary.write_bytes(b"a\nb\xff\n")
    (tmp_path / "empty.txt").write_text("")
    tokenizer = tokenizer_file(tmp_path / "tokenizer.json")
    nowhere = tmp_path / "nowhere" / "model"
    out = ["--out", tmp_path / "out.jsonl", *SAMPLED]
    for args, message in (
        (["sample", run], "there is nothing to continue"),
        (["sample", run, "--prompts", tmp_path / "empty.txt"], "there is nothing to continue"),
        (["sample", run, "--prompts", tmp_path / "none.txt"], "none.txt"),
        (["sample", run, "--prompts", binary], "half a surrogate pair, which has no UTF-8"),
        (["sample", run, "--prompts", prompts, "--max-tokens", "50"], "id 1: 106"),
        (
            ["sample", run, "--tokenizer", tokenizer, "--prompt", "a w399 w7 w300"],
            "prompts must be 1-D integers from 0 to 255: prompt 0: 399, 300",
        ),
        (["sample", run, "--prompt", "a", "--temperature", "-1"], "temperature (-1)"),
        (["sample", run, "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens (0)"),
        (["sample", run, "--prompt", "a", "--out", nowhere], "there is no directory"),
    ):
        assert message in said(capsys, *args[:2], *out, *args[2:])
    assert "there is no directory" in said(capsys, "export", run, nowhere)
    assert not (tmp_path / "out.jsonl").exists()


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
