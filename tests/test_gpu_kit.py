"""The GPU tests and benchmark also run on a CPU, without packages that such a machine may lack; the figures add up."""

import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import jvarlen
from tests.gpu import __main__ as main
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
gpu = imported("gpu")


@pytest.mark.slow
def test_every_section_of_the_benchmark_is_in_its_report(sizes, tables, gpu, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    answers = {}
    for section in gpu.SECTIONS:
        saved, answer = [], answers.setdefault(section.name, {})
        run = importlib.import_module(f"support.{section.module}").SECTIONS[section.name]
        run(sizes.QUICK, answer, lambda saved=saved, answer=answer: saved.append(json.dumps(answer)))
        # What was there at any time makes a report too.
        for earlier in (*saved, json.dumps(answer)):
            text = "\n".join(tables.make_lines(sizes.QUICK, {section.name: json.loads(earlier)}, quick=True))
    text = "\n".join(tables.make_lines(sizes.QUICK, answers, quick=True))
    assert text.count("\n## ") == 13
    wrong = [name for name, answer in answers.items() if "'error'" in str(answer)]
    assert wrong == ["torch"], [answers[name] for name in wrong]
    assert all("error" in of for of in answers["torch"]["packed"].values())  # its kernels are for GPUs
    assert "seconds" in answers["torch"]["padded"]


def test_attention_by_cudnn_is_tested_first_and_all_has_its_time():
    steps = main.steps("gpu", 720)
    assert [step.name for step in steps] == ["tests of cuDNN", "benchmark", "other tests"]
    assert steps[1].command[-1] == "600"
    collected = subprocess.run(
        [sys.executable, *steps[0].command, "--collect-only"], cwd=ROOT, env=os.environ | main.environment_of("gpu"),
        capture_output=True, text=True,
    )  # fmt: skip
    found = [line.partition("::")[2] for line in collected.stdout.splitlines() if "::" in line]
    assert len(found) == 6, collected.stdout
    assert all("cudnn" in name for name in found)
    assert sum("nothing_of_another_flows_in" in name and "bfloat16" in name for name in found) == 2


def test_a_section_takes_what_others_left_and_nothing_that_is_theirs(gpu, monkeypatch):
    assert sum(section.seconds for section in gpu.SECTIONS) == 600
    monkeypatch.setattr(gpu, "SECTIONS", [gpu.Section(name, "", 10) for name in "abc"])
    assert [gpu.time_limit(0, 30), gpu.time_limit(1, 25), gpu.time_limit(2, 8)] == [10, 15, 8]
    assert gpu.time_limit(0, 12) == 10


def test_a_section_that_is_cut_keeps_what_it_saved(gpu, tables, sizes, monkeypatch):
    def run(command, *, timeout, **options):
        Path(command[-2]).write_text('{"groups_per_step": 2}')
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(gpu.subprocess, "run", run)
    answer = gpu.ask(gpu.SECTIONS[-2], 5, quick=False)
    assert answer == {"groups_per_step": 2, "failed": "cut after 5 s"}
    text = "\n".join(tables.make_lines(sizes.QUICK, {"many shapes": answer}, quick=False))
    assert "“many shapes” is not whole**: cut after 5 s" in text


def test_operations_are_those_of_all_products_one_by_one(sizes):
    small = sizes.Model(num_layers=3, width=4, num_heads=2, num_kv_heads=1, mlp_width=16)
    forward = 0
    for row_length in (5, 5):
        for position in range(row_length):
            for _ in range(small.num_layers):
                for num_in, num_out in ((4, 4), (4, 2), (4, 2), (4, 4), (4, 16), (4, 16), (16, 4)):
                    forward += 2 * num_in * num_out
                forward += (position + 1) * (2 * 4 + 2 * 4)  # a query with each key, a weight with each value
            forward += 2 * 4 * 257
    assert sizes.step_flops(small, 2, 5) == 3 * forward


attention = imported("support.gpu_attention")


def test_what_attends_to_other_samples_is_seen_in_the_comparison(sizes, tables, attention):
    def fail(*arguments):
        raise RuntimeError("not | here")

    ways = {
        "xla": lambda q, k, v, ids, most: jvarlen.attend(q, k, v, segment_ids=ids, implementation="xla"),
        "no mask": lambda q, k, v, ids, most: jvarlen.attend(q, k, v),
        "none": fail,
    }
    answer = {}
    attention.compare_attention(sizes.QUICK, answer, lambda: None, lambda call, **_: 0.5, ways)
    assert list(answer) == ["64", "16"]
    for of in answer.values():
        assert of["xla"]["difference"] < 0.02
        assert of["none"] == {"error": "RuntimeError: not | here"}
    assert answer["16"]["no mask"]["difference"] > 0.1
    text = "\n".join(tables.kernel_table(sizes.QUICK, answer))
    assert "| 16 | xla | 500.00 |" in text
    assert "RuntimeError: not / here" in text


of_torch = imported("support.gpu_torch")


def alone(q, k, v, begins, _, longest, __, window_size):
    """PyTorch's varlen attention, sample by sample."""
    assert window_size == (-1, 0)
    attend, parts = torch.nn.functional.scaled_dot_product_attention, []
    for begin, end in itertools.pairwise(begins.tolist()):
        of_sample = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        parts += [attend(*of_sample, is_causal=True).transpose(0, 1)] if begin < end else []
    return torch.cat(parts)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["FlexAttention", "varlen attention"])
def test_packed_rows_in_pytorch_have_the_logits_of_dense_attention(of_torch, name, monkeypatch):
    import torch_ref

    torch.manual_seed(0)
    model = torch_ref.Decoder(torch_ref.DecoderConfig(width=16, num_heads=2, num_layers=2))
    inputs, ids = torch.randint(257, (2, 12)), torch.tensor([[1] * 5 + [2] * 7, [1] * 3 + [2] + [3] * 6 + [0] * 2])
    positions = torch.arange(12) - (ids[:, :, None] == ids[:, None, :]).int().argmax(2)
    way, is_token = of_torch.WAYS[name], ids != 0
    with torch.no_grad():
        expected = model(inputs, segment_ids=ids, positions=positions)
        with way.in_decoder(3), monkeypatch.context() as patch:
            patch.setattr("torch.nn.attention.varlen.varlen_attn", alone)
            found = model(inputs, segment_ids=ids, positions=positions)
    torch.testing.assert_close(found[is_token], expected[is_token])


def test_the_call_of_varlen_attention_has_the_arguments_of_this_pytorch(of_torch):
    """Shapes alone: it computes on GPUs."""
    arrays = [torch.zeros(2, 4, 8, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    mask = of_torch.varlen_mask(torch.ones(2, 8, device="meta", dtype=torch.int64), None, 3)
    out = of_torch.varlen(*arrays, mask)
    assert out.shape == (2, 4, 8, 16)
    out.sum().backward()
    assert all(array.grad.shape == array.shape for array in arrays)


def test_published_figures_stand_beside_the_nearest_that_were_measured(tables, sizes):
    kernels = {"triton": {"forward_flops": 3e12, "forward_s": 0.01}, "cudnn": {"error": "none"}}
    llama = {"LoRA": {"flops": 201e12, "num_tokens": 8192, "seconds": 1.0}, "all parameters": {"error": "none"}}
    lines = tables.anchor_table({"kernels": {"8192": kernels}, "llama": llama})
    assert [line.split(" | ")[1:] for line in lines[2:4]] == [["602", "300", "0.50 |"], ["402", "201", "0.50 |"]]
    assert not tables.anchor_table({"kernels": {}, "llama": {}})


def test_kernels_are_told_by_their_names_and_added_up(profile):
    events = [
        ("nvjet_hsh_128x256_TNT", 2.0),
        ("_dkv_kernel", 1.0),
        ("gemm_fusion_dot_3", 4.0),
        ("loop_add_fusion", 8.0),
    ]
    events += [("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 16.0), ("MemcpyD2D", 32.0), ("_dkv_kernel", 64.0)]
    found = profile.sum_up(iter(events))
    assert found["kinds"] == {
        "products by libraries": [2.0, 1], "attention": [81.0, 3], "products by Triton": [4.0, 1],
        profile.OTHERS: [8.0, 1], "copies": [32.0, 1],
    }  # fmt: skip
    assert next(iter(found["longest"].items())) == ("_dkv_kernel", [65.0, 2])


profile = imported("support.gpu_profile")
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
