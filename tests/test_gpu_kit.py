"""The GPU tests and benchmark also run on a CPU, without packages that such a machine may lack; the figures add up."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

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
