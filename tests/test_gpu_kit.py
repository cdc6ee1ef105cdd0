"""The GPU tests and benchmark also run on a CPU, without packages that such a machine may lack; the figures add up."""

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
    "transformers", "xdist",
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


shares = imported("support.gpu_shares")


def test_shares_of_the_peak_stand_beside_those_of_the_cluster(shares, sizes, tables, monkeypatch):
    known = shares.cluster_of("NVIDIA H200")
    assert (known.name, shares.cluster_of("cpu")) == ("dgx-h200", None)
    monkeypatch.setattr(shares, "cluster_of", lambda kind: known)
    monkeypatch.setattr(shares, "LIMIT_S", -1.0)
    answer = {}
    shares.measure_shares(sizes.QUICK, answer, lambda call, **how: (call(), 1e-3)[1])
    assert list(answer) == [
        "products, 64³", "attention, 32", "attention, 64", "bytes of x + y", "seconds of a kernel"
    ]  # fmt: skip
    rate = 2 * 64**3 / 1e-3
    assert answer["products, 64³"] == {"figure": rate, "peak": known.flops_per_second, "assumed": known.efficiency}
    lines = tables.share_table(answer)
    assert lines[2].split(" | ")[2:] == [f"{rate / known.flops_per_second:.3f}", f"{known.efficiency:.3g} |"]
    assert all("left out: -1 s were over" in line for line in lines[3:])
