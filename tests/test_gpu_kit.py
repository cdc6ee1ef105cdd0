"""The GPU tests and benchmark also run on a CPU, without packages that such a machine may lack; the figures add up."""

import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import jvarlen
from tests.support.benchmark_modules import imported

ROOT = Path(__file__).parents[1]
STOOD_IN_FOR = {"dacite", "jaxtyping", "platformdirs", "tqdm"}
ABSENT = STOOD_IN_FOR | {
    "beartype", "datasets", "grain", "hypothesis", "matplotlib", "numba", "pyarrow", "tensorboardX", "tokenizers",
    "transformers", "tyro", "xdist",
}  # fmt: skip
# One of the kit's cases of packed attention; tests/attention has them all.
FEWER = "-k 'not flows_in or auto-False-bfloat16'"
# Python imports a module of this name when it starts. What is absent is looked for among the stand-ins alone.
SITECUSTOMIZE = f"""
import pathlib, sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in {sorted(ABSENT)}:
            return super().find_spec(name, path, target)
        spec = PathFinder.find_spec(name, [entry for entry in sys.path if entry.endswith("stand_ins")])
        if spec is not None:
            pathlib.Path(__file__).with_name(name).touch()
        return spec

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def run_kit(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_tests_for_a_gpu_pass_on_a_cpu_with_few_packages(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    run = run_kit("--platform", "cpu", "--part", "tests", PYTHONPATH=str(tmp_path), PYTEST_ADDOPTS=FEWER)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "no GPU" not in run.stdout  # nothing was left out for that
    assert "not installed\n" not in run.stdout.partition("short test summary")[2]
    assert {path.name for path in tmp_path.iterdir() if not path.suffix} - {"__pycache__"} == STOOD_IN_FOR


def test_without_a_gpu_nothing_is_done():
    run = run_kit(JAX_PLATFORMS="cpu")
    assert run.returncode == 3
    assert run.stderr.startswith("no GPU: nothing to do")


sizes = imported("support.gpu_sizes")


@pytest.fixture
def environment_for_bfloat16(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    function = importlib.import_module("support.bfloat16_on_cpu").environment_for_bfloat16
    function.cache_clear()
    return function


tables = imported("support.gpu_tables")


def test_operations_are_those_of_all_products_one_by_one(sizes):
    small = sizes.QUICK._replace(num_layers=3, width=4)
    forward = 0
    for row_length in (5, 5):
        for position in range(row_length):
            for _ in range(small.num_layers):
                for num_in, num_out in (*((4, 4),) * 4, (4, 16), (4, 16), (16, 4)):
                    forward += 2 * num_in * num_out
                forward += (position + 1) * (2 * 4 + 2 * 4)  # a query with each key, a weight with each value
            forward += 2 * 4 * 257
    assert sizes.step_flops(small, 2, 5) == 3 * forward


def test_the_large_model_has_about_a_hundred_million_parameters(sizes):
    assert 0.95e8 < sizes.num_multiplied(sizes.FULL) < 1.1e8
    for lengths in sizes.lengths_by_kind(sizes.FULL).values():
        assert 1 <= lengths.min() < lengths.max() <= 4096
        assert np.median(lengths) < 2200


def test_an_epoch_is_the_sum_of_its_steps(tables):
    plans = [
        {
            "lengths": "some", "strategy": name, "shapes": shapes, "steps": steps, "plan_s": 0.5, "padding": 0.25,
            "num_tokens": 300, "useful_flops": 4e12,
        }
        for name, shapes, steps in (("a", [[2, 8], [1, 16]], [3, 1]), ("b", [[1, 16]], [4]))
    ]  # fmt: skip
    shapes = [{"shape": [2, 8], "step_s": 0.5}, {"shape": [1, 16], "step_s": 2.5}]
    lines = tables.epoch_table({"epochs": {"plans": plans, "shapes": shapes, "left_out": ["c, some lengths"]}}, 2e12)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:4]]
    assert [row[5] for row in cells] == ["4.0", "10.0"]
    assert [row[6] for row in cells] == ["75", "30"]
    assert [row[7] for row in cells] == ["1.00", "2.50"]
    assert [row[8:] for row in cells] == [["1", "50.0%"], ["0.4", "20.0%"]]
    assert "c, some lengths" in lines[-1]


# Dies unless the variable is one of its arguments; notes each run in a file.
PRODUCT = """
import os, signal, sys
path, *working = sys.argv[1:]
isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "any")
open(path, "a").write(isa + " ")
if isa not in working:
    os.kill(os.getpid(), signal.SIGILL)
"""


@pytest.mark.parametrize(
    ("working", "tried", "found"),
    [
        (["any", "AVX2"], ["any"], None),
        (["AVX512_CORE_BF16", "AVX2"], ["any", "AVX512_CORE_FP16", "AVX512_CORE_BF16"], "AVX512_CORE_BF16"),
        ([], ["any", "AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2"], None),
    ],
)
def test_products_of_bfloat16_get_the_highest_setting_that_they_survive(
    environment_for_bfloat16, working, tried, found, tmp_path, monkeypatch
):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    command = (sys.executable, "-S", "-c", PRODUCT, str(tmp_path / "tried"), *working)
    for _ in range(2):  # and no child is started for the second
        assert environment_for_bfloat16(command) == ({"ONEDNN_MAX_CPU_ISA": found} if found else {})
        assert (tmp_path / "tried").read_text().split() == tried


def test_a_setting_that_the_user_made_stays(environment_for_bfloat16, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert environment_for_bfloat16(("/nowhere",)) == {}


def test_products_of_bfloat16_survive_here(environment_for_bfloat16):
    bfloat16_on_cpu = sys.modules["support.bfloat16_on_cpu"]
    environment = os.environ | environment_for_bfloat16()
    subprocess.run([sys.executable, "-c", bfloat16_on_cpu.PRODUCTS], env=environment, check=True)


attention = imported("support.gpu_attention")


def test_what_attends_to_other_samples_is_seen_in_the_comparison(sizes, tables, attention):
    def fail(*arguments):
        raise RuntimeError("not | here")

    ways = {"xla": attention.WAYS["xla"], "no mask": lambda q, k, v, samples: jvarlen.attend(q, k, v), "none": fail}
    answer = {}
    attention.compare_attention(sizes.QUICK, answer, lambda: None, lambda call, **_: 0.5, ways)
    assert list(answer) == ["packed 2×64", "padded 2×32", "padded 4×16"]
    for of in answer.values():
        assert of["xla"]["difference"] < 0.02
        assert of["none"] == {"error": "RuntimeError: not | here"}
    assert answer["packed 2×64"]["no mask"]["difference"] > 0.1
    text = "\n".join(tables.kernel_table({"attention alone": answer}))
    assert "| packed 2×64 | xla | 500.00 |" in text
    assert "RuntimeError: not / here" in text


targets = imported("support.gpu_targets")


def test_bytes_and_seconds_that_are_told_stand_beside_those_of_the_device(sizes, tables, targets):
    in_use = iter([100, 200, 200, 200])  # the second shape does not raise what was in use

    answer, saved = {}, []
    targets.compare(
        sizes.QUICK._replace(longest=64),
        answer,
        lambda: saved.append(len(answer["shapes"])),
        lambda device: next(in_use),
    )
    first, second = answer["shapes"]
    assert 0 < first["told_bytes"] <= second["told_bytes"]
    assert first["step_s"] > 0
    assert [(of["peak_bytes"], of["is_bound"]) for of in answer["shapes"]] == [(200, False), (200, True)]
    assert saved == [1, 2]


@pytest.mark.parametrize(
    ("kind", "name"), [("NVIDIA H100 80GB HBM3", "1xh100"), ("NVIDIA A100-SXM4-40GB", "1xa100"), ("NVIDIA L4", None)]
)
def test_the_target_of_a_device_is_one_of_its_kind(targets, monkeypatch, kind, name):
    monkeypatch.setattr(targets.Target, "parse", lambda text: text)
    assert targets.target_of(types.SimpleNamespace(platform="gpu", device_kind=kind)) == name


def test_the_report_says_how_far_off_the_compiler_was(tables):
    shapes = [
        {"shape": [16, 4096], "told_bytes": 4e9, "peak_bytes": 5e9, "is_bound": False, "told_s": 0.2, "step_s": 0.25},
        {"shape": [8, 128], "told_bytes": 6e9, "peak_bytes": None, "is_bound": True, "told_s": None, "step_s": 0.1},
        {"shape": [1, 32], "told_bytes": 8e9, "peak_bytes": 8e9, "is_bound": False, "told_s": 0.1, "step_s": 0.2},
        {"shape": [1, 48], "told_bytes": 10e9, "peak_bytes": 8e9, "is_bound": True, "told_s": 0.1, "step_s": 0.125},
        {"shape": [1, 64], "told_bytes": 9e9, "told_s": 0.1, "error": "XlaRuntimeError: a | b"},
    ]
    text = "\n".join(tables.target_table({"device": "a GPU", "target": "1xgpu", "shapes": shapes}))
    assert "| 16×4,096 | 4 | 5 | 1.250 | 200 | 250 | 1.250 |" in text
    assert "| 8×128 | 6 | – | – | – | 100 | – |" in text
    assert "| 1×48 | 10 | ≤ 8 | ≤ 0.800 | 100 | 125 | 1.250 |" in text
    assert "bytes are 1.000 to 1.250 times those told, seconds are 1.250 to 2.000 times those told" in text
    assert "**1×64**: XlaRuntimeError: a / b" in text
    assert tables.target_table({}) == []
    assert tables.target_table({"device": "a GPU", "target": None}) == ["No target is known for a GPU."]


def test_what_failed_or_is_missing_is_in_the_report(sizes, tables):
    of_jax = {"machine": {"device": "a device", "versions": {}}, "failed": {"matrices": "ValueError: a | b"}}
    text = "\n".join(tables.make_lines(sizes.FULL, of_jax, {"missing": "it is not installed"}, {}, quick=False))
    assert "“matrices” failed**: ValueError: a / b" in text
    assert "PyTorch: left out, it is not installed." in text


def test_parts_that_fail_keep_what_others_answered(sizes, tmp_path, monkeypatch, capsys):
    worker = importlib.import_module("support.gpu_worker")
    path = tmp_path / "answers.json"
    monkeypatch.setattr(sys, "argv", ["worker", "quick", str(path)])

    def fail(answer):
        answer["before"] = 1
        raise ValueError("why\nand more")

    def parts(given, answers, save):
        assert given == sizes.QUICK
        return {"first": fail, "second": lambda answer: answer.update(x=answers["first"]["before"])}

    assert worker.run_parts("a package", parts) == 1
    answers = json.loads(path.read_text())
    assert answers == {
        "first": {"before": 1},
        "second": {"x": 1},
        "failed": {"first": "ValueError: why"},
        "parts": ["first", "second"],
    }
    assert "ValueError: why" in capsys.readouterr().err
