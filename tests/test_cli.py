"""The command line: a plan for any lengths file, every setting documented, mistakes reported in one line."""

import dataclasses
import importlib
import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jvarlen
from jvarlen import Budget, Order, Plan, UserError, make_buckets, make_plan
from jvarlen._common.options import in_options, options_of
from jvarlen.batches.batches import Batch, PackedBatch
from jvarlen.cli import _NEEDED_FIRST, COMMANDS, main, run_command
from jvarlen.estimates.cluster import Cluster
from jvarlen.models import DecoderConfig
from jvarlen.models.hugging_face_config import hugging_face_fields
from jvarlen.planning.buckets import cost_of_candidates
from jvarlen.planning.compare import compare_strategies, comparison_table
from jvarlen.planning.cost_model import CostModel
from jvarlen.runs.config import (
    CheckpointConfig,
    DataConfig,
    DirectoryConfig,
    FitConfig,
    HardwareConfig,
    OptimizerConfig,
    PlanConfig,
)
from jvarlen.runs.saved_config import save_config
from jvarlen.targets.report import TargetReport
from tests.support import processes

no_long_doubles = pytest.mark.skipif(np.dtype(np.longdouble).itemsize < 16, reason="long doubles are shorter here")

SHOWN = ("num_layers", "width", "num_heads", "vocab_size", "attention", "compute_dtype")
TINY = hugging_face_fields(DecoderConfig(num_layers=1, width=8, num_heads=1), "bfloat16")
LENGTHS = np.random.default_rng(0).integers(1, 500, 1000)


@pytest.fixture
def lengths_file(tmp_path):
    np.save(tmp_path / "lengths.npy", LENGTHS)
    return str(tmp_path / "lengths.npy")


def sort(*args):
    return run_command("experimental.ordered_file.command", "SortCommand", args, prog="sort")


USUAL = {"max_tokens": 4096, "max_length": 1024, "length_multiple": 8, "overlong": "truncate"}  # of `plan` and `train`


def test_plan_prints_saves_and_compares_the_plan(lengths_file, tmp_path, capsys):
    out, page = tmp_path / "plan.npz", tmp_path / "plan.html"
    assert main(["plan", lengths_file, "--packing", "padded", "--out", str(out), "--html", str(page)]) == 0
    expected = make_plan(LENGTHS, **USUAL)
    assert Plan.load(out).digest == expected.digest
    figures = compare_strategies(expected, LENGTHS, 4096, length_multiple=8)
    printed = capsys.readouterr().out
    for part in (expected.report(), f"digest {expected.digest}", comparison_table(figures)):
        assert part in printed
    assert printed.endswith(f"{out}\n{page}\n")
    assert "packed rows" in page.read_text()


def test_plan_tells_the_steps_tokens_and_rates_of_a_whole_run_that_grows(lengths_file, tmp_path, capsys):
    page, tokens = tmp_path / "plan.html", 2 * int(LENGTHS.clip(max=1024).sum())
    settings = "--sequences-per-step 32 --num-epochs 2 --optimizer.schedule seesaw --optimizer.max-batch-size 64"
    assert main(["plan", lengths_file, *settings.split(), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert f"{tokens:,} tokens; learning rate 0.00015 in the first step" in printed
    assert [line.split()[2] for line in printed.splitlines()[-3:-1]] == ["32", "64"]
    assert f"{tokens:,} tokens in all." in page.read_text()


def test_plan_says_what_choosing_from_some_lengths_can_cost(tmp_path, capsys):
    lengths = np.arange(1, 6_000)
    np.save(tmp_path / "lengths.npy", lengths)
    settings = "--max-tokens 200000 --max-shapes 5 --length-multiple 1 --packing padded"
    assert main(["plan", str(tmp_path / "lengths.npy"), *settings.split()]) == 0
    share = cost_of_candidates(lengths, Budget(max_tokens=200_000, max_shapes=5))
    assert 0 < share < 0.001
    assert f"of very many: at most {share:.2%} from the best" in capsys.readouterr().out


def test_plan_predicts_and_limits_by_the_cost_model_in_the_comparison_as_well(lengths_file, tmp_path, capsys):
    seconds = CostModel(constant=1e-3, linear=1e-6, quadratic=1e-8)
    seconds.save(tmp_path / "cost.json")
    limits = ["--max-cost", "0.01", "--compile-seconds", "0.05", "--packing", "padded"]
    page = tmp_path / "plan.html"
    assert main(["plan", lengths_file, "--cost-model", str(tmp_path / "cost.json"), *limits, "--html", str(page)]) == 0
    budget = {"cost": seconds, "compile_seconds": 0.05, "max_cost": 0.01}
    figures = compare_strategies(make_plan(LENGTHS, **USUAL, **budget), LENGTHS, 4096, length_multiple=8, **budget)
    assert comparison_table(figures) in capsys.readouterr().out
    assert "Predicted seconds of each bucket" in page.read_text()


def test_plan_chooses_packed_rows_by_a_cost_model_and_says_why(lengths_file, tmp_path, capsys):
    seconds = CostModel(constant=0.0, linear=1e-3, quadratic=0.0)
    seconds.save(tmp_path / "cost.json")
    given = ["--cost-model", str(tmp_path / "cost.json"), "--compile-seconds", "3"]
    assert main(["plan", lengths_file, *given]) == 0
    printed = capsys.readouterr().out
    budget = {"cost": seconds, "compile_seconds": 3.0, "length_multiple": 8, "max_length": 1024, "overlong": "truncate"}
    plan = make_plan(LENGTHS, max_tokens=4096, packing="auto", **budget)
    assert plan.is_packed
    assert plan.reason in printed
    assert f"digest {plan.digest}" in printed


def test_plan_has_packed_rows_of_one_shape_without_a_cost_model(lengths_file, capsys):
    assert main(["plan", lengths_file]) == 0
    plan = make_plan(LENGTHS, max_tokens=4096, packing="best_fit", max_shapes=1, length_multiple=8)
    printed = capsys.readouterr().out
    assert f"digest {plan.digest}" in printed
    assert plan.buckets.shapes[0].length >= 2 * LENGTHS.max()
    assert "packed rows of one shape; a cost_model would compare them with padded ones" in printed


@pytest.mark.parametrize("devices", [[], ["--devices", "2"]])
def test_sort_writes_the_order_and_shows_the_balance(devices, lengths_file, tmp_path, capsys):
    out = tmp_path / "order.npy"
    assert sort(lengths_file, "--out", str(out), "--no-progress", *devices) == 0
    order = np.load(out, mmap_mode="r")
    assert order.dtype == np.int64
    assert (order == np.argsort(LENGTHS, kind="stable")).all()
    printed = capsys.readouterr().out
    assert f"1,000 keys on {2 if devices else 8} devices" in printed
    assert ("500 to 500" if devices else "125 to 125") in printed


@pytest.mark.parametrize(
    "keys",
    [
        np.array([2**40, 3, 2**40 + 1, -5]),
        np.array([0.1, -np.inf, 0.1 + 1e-12, 0.1]),
        np.array([3, 1, 2], np.int16),
        np.array([3, 1, -2], ">i4"),
        np.array([2**40, 1, 2], ">i8"),
        np.zeros(0, np.float32),
    ],
)
def test_sort_takes_any_keys(keys, tmp_path, capsys):
    np.save(tmp_path / "keys.npy", keys)
    assert sort(str(tmp_path / "keys.npy"), "--out", str(tmp_path / "order.npy"), "--no-progress") == 0
    assert np.load(tmp_path / "order.npy").tolist() == np.argsort(keys, kind="stable").tolist()
    is_work = (np.isfinite(keys) & (keys >= 0)).all()
    assert ("–" in capsys.readouterr().out) != is_work  # what is no work has no balance


def test_a_packed_plan_has_a_page(lengths_file, tmp_path):
    page = tmp_path / "plan.html"
    settings = "--max-tokens 4096 --packing best_fit --num-microbatches 4 --html"
    assert main(["plan", lengths_file, *settings.split(), str(page)]) == 0
    assert "Samples per row" in page.read_text()


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jvarlen {jvarlen.__version__}\n"


def test_plan_takes_every_setting(lengths_file, capsys):
    settings = "--max-tokens 2048 --strategy quantile --max-shapes 3 --max-length 256 --overlong drop --order shuffle"
    settings += " --num-microbatches 2 --row-multiple 2 --length-multiple 8 --seed 3 --epoch 1 --longest-first"
    assert main(["plan", lengths_file, *settings.split()]) == 0
    short = LENGTHS[LENGTHS <= 256]
    buckets = make_buckets(
        short, 2048, strategy="quantile", max_shapes=3, max_length=256, num_microbatches=2, row_multiple=2,
        length_multiple=8,
    )  # fmt: skip
    plan = make_plan(
        LENGTHS,
        buckets,
        order=Order("shuffle", longest_first=True),
        overlong="drop",
        num_microbatches=2,
        seed=3,
        epoch=1,
    )
    assert plan.digest in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            "plan LENGTHS --max-tokens 4096 --packing padded --overlong split",
            "overlong (split) is for packed rows: it needs",
        ),
        ("plan LENGTHS --max-tokens 100 --max-length 504", "--max-tokens 100 leaves no row for a bucket"),
        ("plan LENGTHS --max-tokens 4096 --packing wrapped --overlong drop", "excludes --overlong drop"),
        ("plan LENGTHS --max-tokens many", "max-tokens"),
        ("plan --data LENGTHS", "give DATA without --data: see jvarlen plan --help"),
        ("plan LENGTHS --max-tokens 4096 --html nowhere/plan.html", "there is no directory nowhere"),
        ("plan LENGTHS --max-tokens 4096 --cluster dgx-h100", "--cluster needs --model"),
        (
            "plan LENGTHS --max-tokens 4096 --cluster dgx --model TEXT",
            "there is no cluster dgx, and no preset; there are dgx-a100",
        ),
        (
            "plan LENGTHS --max-tokens 4096 --cluster dgx-h100 --model cost.json",
            "cost.json: model_type (None) must be one of llama, qwen2, qwen3, mistral",
        ),
        ("plan LENGTHS --max-shapes auto", "--max-shapes 'auto' is chosen by seconds"),
        ("plan LENGTHS TEXT", "a .npy or .json file holds lengths: it is planned alone"),
        ("plan COST", "cost.json holds no list of integers, tokens a sample; samples are lines of a .jsonl file"),
        ("plan LENGTHS --field body", "planned alone, field must not be given"),
        ("plan nowhere.jsonl", "nowhere.jsonl"),
        ("plan LENGTHS --max-tokens 4096 --html LENGTHS", "which is read"),
        (
            "plan LENGTHS --max-tokens 4096 --out same --html ./same",
            "html (same) would overwrite same, which is also out",
        ),
        ("plan LENGTHS --max-tokens 4096 --out /dev/null", "/dev/null is a pipe or a device"),
        ("export RUN RUN/config.json", "jvarlen: run/config.json is there already"),
        ("sample RUN --prompts TEXT --out TEXT", "out (text.npy) would overwrite text.npy, which is read"),
        ("report RUN --html RUN", "run is a directory"),
        ("train --dry-run --target 8xh100 --data TEXT --out TEXT", "text.npy, which is read"),
        (
            "train --dry-run --target 8xh100 --data RUN --html RUN/metrics.jsonl",
            "html (run/metrics.jsonl) would overwrite a file of",
        ),
        ("train --dry-run --target 8xh100 --cost-model COST --html COST", "cost.json, which is read"),
        ("report RUN --html RUN/config.json", "(run/config.json) would overwrite a file of run, which is read"),
        ("plan LENGTHS --max-tokens 4096 --colour red", "--colour"),
        ("plan nowhere.npy --max-tokens 4096", "there is no lengths file "),
        ("plan TEXT --max-tokens 4096", "not a readable .npy file"),
        ("plan FLOATS --max-tokens 4096", "lengths must be integers, not float64"),
        ("sort nowhere.npy", "there is no lengths file nowhere.npy"),
        ("sort NAN", "keys are NaN"),
        ("sort TABLE", "integers or floats of one axis and at most 64 bits, not float64[2, 2]"),
        pytest.param("sort LONG", "at most 64 bits, not float128[3]", marks=no_long_doubles),
        ("sort LENGTHS --devices 0", "devices (0)"),
        (
            "sort LENGTHS --coordinator localhost --process-id 0",
            "coordinator ('localhost') must be a host and a port",
        ),
        ("sort LENGTHS --num-processes 2 --process-id 2", "--process-id (2) must be below --num-processes (2)"),
        (
            "train --devices 2 --parallel auto",
            "--parallel auto needs --cluster: a file of one, or a known one of dgx-a100",
        ),
        ("train --devices 9", "devices must be between 1 and 8, not 9"),
        ("train --decoder.width 7", "width (7) must be a multiple"),
        ("train --held-out-fraction 3", "must be above 0 and below 1: --held-out-fraction (3)"),
        ("train --resume nowhere", "there is no run to resume"),
        ("report", "give RUN-DIRS: see jvarlen report --help"),
        ("report .", ". is not the directory of a run: there is no config.json"),
        ("train --max-stepz 3", "--max-steps"),
        ("fly", "there is no command 'fly': the commands are plan, compile, train"),
    ],
)
def test_a_mistake_is_told_and_ends_with_exit_code_2(args, said, lengths_file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("floats.npy", LENGTHS / 2)
    (tmp_path / "text.npy").write_text("lengths")
    np.save("nan.npy", np.array([1.0, np.nan]))
    np.save("table.npy", np.zeros((2, 2)))
    np.save("long.npy", np.zeros(3, np.longdouble))
    (tmp_path / "cost.json").write_text("{}")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name in ("config.json", "data.json", "metrics.jsonl"):
        (tmp_path / "run" / name).write_text("{}" * (name != "metrics.jsonl"))
    names = {each.upper(): f"{each}.npy" for each in ("floats", "text", "nan", "table", "long")}
    names |= {"COST": "cost.json", "LENGTHS": lengths_file}
    given = [names.get(arg, arg).replace("RUN", "run") for arg in args.split()]
    assert (sort(*given[1:]) if given[:1] == ["sort"] else main(given)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "args",
    [
        "--html nowhere/page.html",
        "--out nowhere/plan.npz",
        "--cluster nowhere.json --model model.json",
        "--cluster dgx-h100 --model nowhere.json",
    ],
)
def test_plan_names_files_that_are_not_there_before_it_plans(args, lengths_file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jvarlen.runs.shapes.make_plan", lambda *args, **kwargs: pytest.fail("a plan was made"))
    (tmp_path / "model.json").write_text(json.dumps(TINY))
    assert main(["plan", lengths_file, "--max-tokens", "4096", "--out", "plan.npz", *args.split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "nowhere" in said.err
    assert not (tmp_path / "plan.npz").exists()


@pytest.mark.parametrize(("flags", "kind"), [([], PackedBatch), (["--packing", "padded"], Batch)])
def test_layouts_are_chosen_for_the_batches_of_the_plan(flags, kind, lengths_file, tmp_path, monkeypatch):
    (tmp_path / "model.json").write_text(json.dumps(TINY))
    kinds = []

    def choose_layout(model, optimizer, plan, *, batch_spec, fixed, **kwargs):
        kinds.append(type(batch_spec(plan.buckets.shapes[0], 1)))
        assert not fixed
        raise UserError("chosen")

    monkeypatch.setattr("jvarlen.estimates.choice.choose_layout", choose_layout)
    args = ["plan", lengths_file, "--max-tokens", "4096", "--cluster", "dgx-h100"]
    assert main([*args, "--model", str(tmp_path / "model.json"), *flags]) == 2
    assert kinds == [kind]


def test_a_step_has_a_microbatch_for_each_device_of_a_cluster(lengths_file, tmp_path, capsys):
    (tmp_path / "model.json").write_text(json.dumps(TINY))
    args = ["plan", lengths_file, "--max-tokens", "4096", "--model", str(tmp_path / "model.json")]
    for cluster, flags, num in [("dgx-h100", [], 8), ("dgx-h100:2", [], 16), ("dgx-h100", ["data4.context2"], 4)]:
        parallel = ["--parallel", *flags] if flags else []
        assert main([*args, "--cluster", cluster, *parallel]) == 0
        assert f"microbatches a step: {num}\n" in capsys.readouterr().out


def test_compile_tells_the_seconds_of_an_epoch(lengths_file, tmp_path, capsys, monkeypatch):
    (tmp_path / "model.json").write_text(json.dumps(TINY))
    report = TargetReport([], "here", "data1", 1.0, 1.0, 2.0)
    monkeypatch.setattr("jvarlen.runs.fit.compile_run_for", lambda target, prepared: report)
    assert main(["compile", lengths_file, "--target", "here", "--model", str(tmp_path / "model.json")]) == 0
    printed = capsys.readouterr().out
    num_steps = int(re.search(r"an epoch has ([\d,]+)", printed)[1].replace(",", ""))
    assert f"an epoch of {num_steps:,} steps: {2 * num_steps:,.1f} s, an estimate" in printed


def test_the_seconds_of_a_named_layout_are_told(lengths_file, tmp_path, capsys, monkeypatch):
    (tmp_path / "model.json").write_text(json.dumps(TINY))
    args = ["plan", lengths_file, "--max-tokens", "4096", "--num-microbatches", "8", "--cluster", "dgx-h100"]
    args += ["--model", str(tmp_path / "model.json")]
    assert main([*args, "--parallel", "data8.zero3"]) == 0
    layouts = capsys.readouterr().out.split("seconds an epoch")[1]
    assert "data8.zero3 " in layouts
    assert "0 more fit; 0 do not" in layouts
    assert main([*args, "--parallel", "data4"]) == 2
    assert "takes 4 devices, not the 8" in capsys.readouterr().err
    small = dataclasses.replace(Cluster.named("dgx-h100"), memory_bytes=1000)
    small.save(tmp_path / "small.json")
    args[args.index("dgx-h100")] = str(tmp_path / "small.json")
    assert main([*args, "--parallel", "data8.zero3"]) == 1
    assert re.search(r"no layout .*: the nearest, data8.zero3, needs .* more than there are", capsys.readouterr().err)


def test_a_ragged_sort_says_that_what_is_sent_depends_on_the_keys(lengths_file, tmp_path, capsys, monkeypatch):
    args = [lengths_file, "--out", str(tmp_path / "order.npy"), "--no-progress"]
    assert sort(*args) == 0
    assert "; each sent " in capsys.readouterr().out
    monkeypatch.setattr("jvarlen.experimental.ordered_file.command.has_ragged", lambda mesh: True)
    assert sort(*args) == 0
    printed = capsys.readouterr().out
    assert "what each sent depends on the keys" in printed
    assert "messages" not in printed


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--distributed"], (None, None, None)),
        (["--coordinator", "localhost:1"], ("localhost:1", None, None)),
        (["--num-processes", "2"], (None, 2, None)),
        (["--process-id", "0"], (None, None, 0)),
        (["--distributed", "--process-id", "1"], (None, None, 1)),
        ([], None),
    ],
)
def test_any_setting_of_processes_makes_it_one_of_several(flags, expected, lengths_file, tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr("jvarlen.distributed.processes.initialize_processes", lambda *given: called.append(given))
    assert sort(lengths_file, "--out", str(tmp_path / "order.npy"), "--no-progress", *flags) == 0
    assert called == ([] if expected is None else [expected])


def started_sort(*args):
    command = [sys.executable, "-m", "jvarlen.experimental.ordered_file", *args, "--no-progress"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(processes.ROOT)}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said_by(process):
    """Exit code and the lines that are ours of what it wrote to stderr."""
    try:
        _, error = process.communicate(timeout=90)
    finally:
        process.kill()
    assert "Traceback" not in error
    return process.returncode, [line for line in error.splitlines() if line.startswith("jvarlen: ")]


@pytest.mark.multiprocess
def test_what_jax_cannot_find_of_the_processes_is_one_line(lengths_file, tmp_path):
    out = str(tmp_path / "order.npy")
    alone = [started_sort(lengths_file, "--out", out, *flags) for flags in (["--process-id", "0"], ["--distributed"])]
    for process in alone:
        code, (line,) = said_by(process)
        assert code == 2
        assert line.startswith("jvarlen: JAX finds no environment of Slurm, Open MPI, Kubernetes or cloud TPUs: pass")
    assert not (tmp_path / "order.npy").exists()


@pytest.mark.multiprocess
def test_where_one_process_has_no_file_both_end_in_one_line(lengths_file, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    missing, out = str(tmp_path / "missing.npy"), str(tmp_path / "order.npy")
    common = ["--out", out, "--coordinator", f"127.0.0.1:{port}", "--num-processes", "2"]
    pair = [started_sort(path, *common, "--process-id", str(rank)) for rank, path in enumerate([lengths_file, missing])]
    reason = f"there is no lengths file {missing}"
    assert [said_by(process) for process in pair] == [
        (2, [f"jvarlen: could not read the keys: process 1: FileNotFoundError: {reason}"]),
        (2, [f"jvarlen: {reason}"]),
    ]


def test_a_traceback_is_shown_on_request_and_for_errors_that_are_not_of_the_user(lengths_file, monkeypatch):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        main(["plan", "nowhere.npy", "--traceback"])

    def fail(error):
        def failing(*args, **kwargs):
            raise error

        return failing

    monkeypatch.setattr("jvarlen.experimental.ordered_file.command.sort_file", fail(ValueError("a mistake of ours")))
    with pytest.raises(ValueError, match="a mistake of ours"):
        sort(lengths_file)
    monkeypatch.setattr(importlib.import_module("jvarlen.runs.fit"), "fit", fail(RuntimeError("ours")))
    with pytest.raises(RuntimeError, match="ours"):
        main(["train"])


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('on_bad_sample="skip" leaves them out', "--on-bad-sample skip leaves them out"),
        ("excludes overlong='drop'", "excludes --overlong drop"),
        ("max_steps (0), seed (-1)", "--max-steps (0), --seed (-1)"),
        ("target (8xh100) needs dry_run=True", "--target (8xh100) needs --dry-run"),
        ("give files=, or progress=False", "give --data, or --no-progress"),
        ("learning_rate must be above 0, as resume_from", "--optimizer.learning-rate must be above 0, as --from"),
        ("data of /tmp/max_tokens/a, model and head_size", "data of /tmp/max_tokens/a, model and head_size"),
        (
            "no such field 'text', but 'max_tokens', \"block's_size\", 'block_size'; give seed",
            "no such field 'text', but 'max_tokens', \"block's_size\", 'block_size'; give seed",
        ),
        ("the plan's seed=1 and 'a' excludes max_steps", "the plan's --seed 1 and 'a' excludes --max-steps"),
    ],
)
def test_messages_name_options(said, told):
    assert in_options(said, options_of(FitConfig)) == told


def test_help_lists_every_command_as_its_class_describes_it(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (module, class_name, about) in COMMANDS.items():
        described = getattr(importlib.import_module(f"jvarlen.{module}"), class_name).__doc__
        assert described.startswith(about.removesuffix("."))
        assert re.search(rf"^  {name} +{re.escape(about)}$", shown, re.MULTILINE)


def test_help_shows_in_a_screen_what_one_needs_first_and_what_is_required(capsys):
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 80
    needed = re.findall(r"^  --([\w.-]+)", text, re.MULTILINE)
    assert needed[:3] == ["data", "field", "model"]
    assert set(_NEEDED_FIRST) == set(needed)
    assert main(["compile", "--help"]) == 0
    assert "usage: jvarlen compile DATA --target TEXT [OPTIONS]" in (shown := capsys.readouterr().out)
    assert "\n  --target TEXT\n" in shown


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lr", "--optimizer.learning-rate"),
        ("learning-rate", "--optimizer.learning-rate"),
        ("batch-size", "--sequences-per-step or --max-tokens"),
        ("epochs", "--num-epochs"),
        ("seq-length", "--max-length"),
        ("max_steps", "--max-steps"),
    ],
)
def test_an_unknown_option_names_the_one_that_is_meant(given, meant, capsys):
    assert main(["train", f"--{given}", "3"]) == 2
    assert capsys.readouterr().err == (
        f"jvarlen: there is no option --{given}: do you mean {meant}? jvarlen train --help-all lists all\n"
    )


def test_options_take_values_of_their_types_and_say_how_they_are_written(configs):
    data = "--data a.txt b.txt --weights 1 2.5 --optimizer.betas-by-batch-size --no-progress --compile.cache-dir None"
    assert main(["train", *data.split(), "--buckets", "4", "16", "2", "32", "--packing=padded"]) == 2
    config = configs[-1]
    assert [Path(file).name for file in config.data.files] == ["a.txt", "b.txt"]
    assert (config.data.weights, config.plan.buckets) == ((1.0, 2.5), ((4, 16), (2, 32)))
    assert (config.optimizer.betas_by_batch_size, config.progress, config.compile.cache_dir) == (True, False, None)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("train --max-tokens 1.5", "--max-tokens takes N, not 1.5"),
        ("train --max-tokens", "--max-tokens takes N"),
        ("train --packing best", "--packing takes padded|best_fit|wrapped|auto, not best"),
        ("train --buckets 4 16 2", "--buckets takes N N ..., not 4 16 2"),
        ("train --dry-run=maybe", "--dry-run, takes"),
        ("train lines.txt", "lines.txt is of no option: see jvarlen train --help"),
        ("compile lines.txt", "give --target TEXT: see jvarlen compile --help"),
    ],
)
def test_a_value_of_another_type_is_refused_with_how_it_is_written(args, said, capsys):
    assert main(args.split()) == 2
    assert said in capsys.readouterr().err


def test_all_help_documents_every_setting(capsys):
    assert main(["train", "--help-all"]) == 0
    text = capsys.readouterr().out
    for prefix, settings in (
        ("", FitConfig),
        *(("", group) for group in (DataConfig, HardwareConfig, CheckpointConfig, DirectoryConfig)),
        ("", PlanConfig),
        ("decoder.", DecoderConfig),
        ("optimizer.", OptimizerConfig),
    ):
        for field in dataclasses.fields(settings):
            if not dataclasses.is_dataclass(field.default_factory):
                if settings is DecoderConfig and field.name not in SHOWN:
                    assert f"--decoder.{field.name.replace('_', '-')}" not in text  # a config.json says it
                    continue
                flag = {"resume_from": "from", "files": "data"}.get(field.name, field.name)
                assert f"--{prefix}{flag.replace('_', '-')}" in text
    assert "--packing padded|best_fit|wrapped|auto" in text


@pytest.fixture
def configs(monkeypatch):
    """The settings with which the command calls `fit`, which does nothing."""
    called = []

    def note(config):
        called.append(config)
        raise UserError("noted")

    monkeypatch.setattr(importlib.import_module("jvarlen.runs.fit"), "fit", note)
    return called


@pytest.mark.parametrize("name", ["--resume", "--run-dir"])
def test_a_run_that_is_continued_has_its_own_settings_as_defaults(tmp_path, configs, name):
    save_config(FitConfig(max_steps=7, seed=3), tmp_path / "config.json")
    for given in ([name, str(tmp_path)], [f"{name}={tmp_path}"]):
        assert main(["train", *given, "--max-steps", "9"]) == 2
        assert (configs[-1].max_steps, configs[-1].seed) == (9, 3)
        assert getattr(configs[-1].directory, name[2:].replace("-", "_")) == tmp_path


def test_a_directory_that_holds_no_run_yet_gets_the_usual_settings(tmp_path, configs):
    assert main(["train", "--run-dir", str(tmp_path / "new")]) == 2
    assert configs == [FitConfig(directory=DirectoryConfig(run_dir=tmp_path / "new"))]


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_plan_is_saved_where_its_table_cannot_be_printed(encoding, lengths_file, tmp_path, monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding=encoding) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        args = ["--max-tokens", "4096", "--out", str(tmp_path / "plan.npz")]
        assert main(["plan", lengths_file, *args]) == 0
        assert main(["train", "--help"]) == 0
        monkeypatch.undo()
    assert Plan.load(tmp_path / "plan.npz").num_samples == len(LENGTHS)
    assert capsys.readouterr().err == ""


def test_a_terminal_of_ascii_gets_tables_and_help_in_ascii(lengths_file, tmp_path, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["plan", lengths_file, "--max-tokens", "4096", "--out", str(tmp_path / "plan\x1b[2J.npz")]) == 0
    assert main(["train", "--help"]) == 0
    assert rb"rows \xd7 length" in written.getvalue()
    assert rb"plan\x1b[2J.npz" in written.getvalue()
    assert b"--max-steps" in written.getvalue()


def test_a_platform_that_jax_does_not_know_is_one_line(lengths_file, monkeypatch, capsys):
    def devices():
        raise RuntimeError("Unable to initialize backend 'bogus': not in the list of known backends")

    monkeypatch.setattr("jax.devices", devices)
    assert sort(lengths_file) == 2
    assert "jvarlen: Unable to initialize backend 'bogus'" in capsys.readouterr().err
