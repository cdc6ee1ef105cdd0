"""Training data: every file is split by itself, weights give exact counts, and evaluation sets stand alone."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import CompileOptions, fit
from jvarlen.cli import main
from jvarlen.data.measure import find_lengths
from jvarlen.data.split import Split, split_held_out
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.runs.config import FitConfig, PlanConfig
from jvarlen.runs.data import open_training_data
from jvarlen.runs.shapes import epoch_plan, note_on_overlong, shapes_for
from tests.support.hand_made import batch_of
from tests.support.settings import changed


def samples_of(dataset):
    return [bytes(np.asarray(dataset[i], np.uint8)) for i in range(len(dataset))]


def text_file(path, letter, num_lines):
    path.write_text("\n".join(f"{letter}{i} {letter * (i % 7)}" for i in range(num_lines)))
    return path


@pytest.fixture
def files(tmp_path):
    return text_file(tmp_path / "a.txt", "a", 300), text_file(tmp_path / "b.txt", "b", 80)


def config_of(*paths, **settings):
    return changed(FitConfig(), files=paths, held_out_fraction=0.1, progress=False, **settings)


@pytest.mark.slow
def test_evaluation_counts_loss_weights_packed_or_not(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "t.jsonl"
    # Few lengths: the expected sums are compiled for each.
    records = [{"q": "x" * rng.choice([1, 8]), "a": "y" * rng.choice([2, 5, 16])} for _ in range(60)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    model = DecoderConfig(num_layers=1, width=8, num_heads=1)
    means = []
    for packing in ("padded", "best_fit", "wrapped"):
        config = config_of(
            path,
            field=("q", "a"),
            loss_on=("a",),
            max_steps=1,
            decoder=model,
            plan=PlanConfig(max_tokens=64, max_shapes=2, packing=packing),
            compile=CompileOptions(cache_dir=None),
            runs_dir=tmp_path / "runs",
        )
        means.append(fit(config).summary.held_out_before)
    loss_fn, params, sums = make_loss_fn(model), init_params(model, config.seed), np.zeros(2)
    held_out = open_training_data(config).evaluation["held_out"]
    samples = [held_out[i] for i in range(len(held_out))]
    for sample in samples:
        arrays = sample.tokens[None].astype(np.int32), np.array([len(sample)], np.int32), sample.weights[None]
        sums += jax.device_get(jax.jit(loss_fn)(params, jax.tree.map(jnp.asarray, batch_of(*arrays, np.float32(1)))))
    np.testing.assert_allclose(means, sums[0] / sums[1], rtol=1e-5)
    assert sums[1] == sum(sample.tokens.tobytes().count(b"y") for sample in samples)


def test_without_weights_every_sample_comes_once_on_one_side(files):
    data = open_training_data(config_of(*files))
    lines = [line.encode() for path in files for line in path.read_text().splitlines()]
    both = samples_of(data.train) + samples_of(data.evaluation["held_out"])
    assert sorted(both) == sorted(lines)
    assert find_lengths(data.train).tolist() == list(map(len, samples_of(data.train)))


def test_weights_give_exact_counts_and_move_no_sample_to_the_other_side(files):
    plain = open_training_data(config_of(*files))
    mixed = open_training_data(config_of(*files, weights=(1.0, 3.0), mixture_samples=400, seed=5))
    train = samples_of(mixed.train)
    assert (len(train), sum(sample.startswith(b"b") for sample in train)) == (400, 300)
    assert samples_of(mixed.evaluation["held_out"]) == samples_of(plain.evaluation["held_out"])
    assert not set(train) & set(samples_of(mixed.evaluation["held_out"]))
    # All that are trained on of the small file come equally often.
    num_small = sum(sample.startswith(b"b") for sample in samples_of(plain.train))
    times = np.unique([sample for sample in train if sample.startswith(b"b")], return_counts=True)[1]
    assert len(times) == num_small
    assert set(times) <= {300 // num_small, -(-300 // num_small)}


def test_evaluation_sets_are_whole_files_under_their_own_names(files, tmp_path):
    other = text_file(tmp_path / "other.txt", "c", 12)
    data = open_training_data(config_of(files[0], eval_data=(files[1], other)))
    assert list(data.evaluation) == ["held_out", "b", "other"]
    assert samples_of(data.evaluation["other"]) == [line.encode() for line in other.read_text().splitlines()]
    assert len(data.evaluation["b"]) == 80
    assert data.content_keys.keys() == {str(path) for path in (files[0], files[1], other)}


def test_a_role_of_the_loss_may_be_in_any_of_the_files_but_not_in_none(tmp_path, capsys):
    paths = []
    for role in ("assistant", "gpt"):
        paths.append(tmp_path / f"{role}.jsonl")
        chats = [{"messages": [{"role": role, "content": "x" * i}]} for i in range(1, 40)]
        paths[-1].write_text("\n".join(map(json.dumps, chats)))
    data = open_training_data(config_of(paths[0], loss_on=("assistant", "gpt"), eval_data=(paths[1],)))
    assert len(data.evaluation["gpt"]) == 39
    said = "gpt.jsonl: no message has a role of loss_on, 'asistant': 'messages' holds messages of the roles"
    with pytest.raises(ValueError, match=f"{said} 'assistant', 'gpt'$"):
        open_training_data(config_of(*paths, loss_on=("assistant", "gpt", "asistant")))
    assert main(["train", "--data", str(paths[0]), "--loss-on", "assistant", "asistant", "--dry-run"]) == 2
    assert "no message has a role of --loss-on, 'asistant'" in capsys.readouterr().err


def test_a_tokenizer_with_more_ids_than_a_byte_raises_the_vocabulary(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"word{i}": i for i in range(400)} | {"?": 400}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = [" ".join(f"word{(i * k) % 450}" for k in range(1 + i % 5)) for i in range(200)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"body": line}) for line in lines))
    config = config_of(path, field="body", tokenizer=tmp_path / "tokenizer.json")
    data = open_training_data(config)
    assert data.num_values == 401
    wanted = [[words.get(word, 400) for word in line.split()] for line in lines]
    found = [data.train[i].tolist() for i in range(len(data.train))]
    assert sorted(
        found + [data.evaluation["held_out"][i].tolist() for i in range(len(data.evaluation["held_out"]))]
    ) == (sorted(wanted))
    larger = open_training_data(config_of(path, field="body", decoder=DecoderConfig(vocab_size=1000)))
    assert larger.num_values == 999


def test_data_are_given_once(tmp_path, files):
    given = Split(*(split_held_out([np.frombuffer(b"%d" % i, np.uint8) for i in range(99)], 0.5)))
    assert open_training_data(FitConfig(progress=False), given).train is given.train
    with pytest.raises(ValueError, match=r"given twice.*a\.txt"):
        open_training_data(config_of(*files), given)


def test_a_side_without_samples_is_refused_by_the_name_of_its_file(tmp_path, files):
    few = text_file(tmp_path / "few.txt", "c", 1)
    with pytest.raises(ValueError, match=r"few\.txt: there must be two different samples at least .*, not 1$"):
        open_training_data(config_of(*files, few))


def test_a_run_in_which_nothing_has_weight_is_refused(tmp_path, files):
    with pytest.raises(ValueError, match="loss_weights of datasets that are drawn must not all be 0"):
        open_training_data(config_of(files[0], loss_weights=(0.0,)))


def test_a_run_in_which_nothing_has_weight_ends_with_exit_code_2(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"q": f"{i:02} {'q' * 30}", "a": "yes"}) + "\n" for i in range(40)))
    options = f"--field q a --loss-on a --max-length 16 --held-out-fraction 0.1 --runs-dir {tmp_path / 'runs'}"
    model = "--decoder.width 8 --decoder.num-heads 1 --decoder.num-layers 1 --max-tokens 64"
    assert main(["train", "--data", str(path), *options.split(), *model.split(), "--overlong", "truncate"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("jvarlen: no token has weight in the loss in any of the last")
    assert "(--loss-on, --loss-weights), or cut less (--max-length)" in error
    ends = ["--overlong", "truncate_start", "--num-epochs", "1"]
    assert main(["train", "--data", str(path), *options.split(), *model.split(), *ends]) == 0
    assert "learn from" not in capsys.readouterr().out


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_samples_whose_whole_answer_is_cut_are_counted_before_the_first_step(tmp_path, capsys, packing):
    path, run = tmp_path / "t.jsonl", tmp_path / "run"
    questions = [f"{i:02}" + "q" * (30 if i < 7 else 9 if i < 10 else 1) for i in range(40)]
    path.write_text("".join(json.dumps({"q": question, "a": "yes" * 3}) + "\n" for question in questions))
    data = f"--field q a --loss-on a --max-length 16 --held-out-fraction 0.1 --eval-data {path} --run-dir {run}"
    model = f"--decoder.width 8 --decoder.num-heads 1 --decoder.num-layers 1 --max-tokens 64 --packing {packing}"
    model += " --overlong truncate"
    assert main(["train", "--data", str(path), *data.split(), *model.split(), "--num-epochs", "1"]) == 0
    num_without = json.loads((run / "summary.json").read_text())["num_without_target"]
    assert 0 < num_without <= 7
    printed = capsys.readouterr().out
    said = (
        f"\n{num_without} of them are cut before the first token to learn from: --overlong truncate_start keeps ends\n"
    )
    assert said in printed[: printed.index("step 0") if "step 0" in printed else None]


@pytest.mark.parametrize(
    ("settings", "done", "left_out"),
    [
        ({}, "cut to that", sum(range(1, 11))),
        ({"overlong": "drop"}, "dropped", sum(range(65, 75))),
        ({"max_length": 80}, None, 0),
    ],
)
def test_what_is_too_long_is_counted(settings, done, left_out):
    lengths = np.arange(1, 75)
    config = PlanConfig(max_tokens=64, **{"overlong": "truncate"} | settings)
    if done is None:
        config = dataclasses.replace(config, max_tokens=80)
    settings = config.resolve()
    plan = epoch_plan(settings, shapes_for(settings, lengths), lengths, seed=0, epoch=0)
    expected = (
        f"10 of 74 samples are longer than 64 tokens and are {done}, which leaves out {left_out / lengths.sum():.1%}"
    )
    assert (note_on_overlong(plan, lengths) or "").startswith(expected if done else "")
    assert (note_on_overlong(plan, lengths) is None) == (done is None)


@pytest.mark.parametrize("data", [[[1, 2]], "data.jsonl"])
def test_fit_takes_settings_and_samples_as_a_split(data):
    with pytest.raises(ValueError, match=rf"FitConfig, and then data, .*; here {type(data).__name__} is first"):
        fit(data)
    said = rf"Split\(train, held_out\), .*jvarlen\.data\.split; .* of type {type(data).__name__}$"
    with pytest.raises(ValueError, match=said):
        fit(FitConfig(progress=False), data)
