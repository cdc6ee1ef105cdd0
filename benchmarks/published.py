"""Are the seconds that `step_seconds` predicts those of published runs?

Runs of others, set up in the library's terms: the model as a decoder of the same products and parameters, the cluster,
the layout and the microbatches. Run `python benchmarks/published.py [FILE] [--quick]`; FILE has more runs, in the form
of `benchmarks/support/published_runs.json`. Prints predicted over published seconds of a step, and writes them to
`benchmarks/results/`. A run of unknown devices, with experts, or that its layout does not divide is refused alone.
nanotron's runs are counted apart: two of its layouts of one model differ five times in tokens a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
from support.timing import report, table

from jvarlen import Bucket, UserError
from jvarlen.estimates.cluster import PRESETS, Cluster
from jvarlen.estimates.layout_table import layout_table
from jvarlen.estimates.model_costs import AxisTraffic, ModelCosts, PerPass, Work, count_costs
from jvarlen.estimates.step_seconds import StepSeconds, step_seconds
from jvarlen.models import DecoderConfig, init_params, layered
from jvarlen.parallel import Layout

CLUSTERS = {"A100": "dgx-a100", "H100": "dgx-h100", "H200": "dgx-h200"}
CLUSTERS |= {"v5e": "tpu-v5e-256", "v5p": "tpu-v5p", "v6e": "tpu-v6e-256"}
RUNS = Path(__file__).parent / "support" / "published_runs.json"
WITHIN = 0.15
Run = dict[str, Any]  # of the file


def cluster_of(run: Run) -> Cluster:
    """The devices of a run, with the kernels that it had."""
    hardware = run["hardware"]
    preset = next((PRESETS[preset] for name, preset in CLUSTERS.items() if name in hardware), None)
    if preset is None or "PCIe" in hardware or "NVL" in hardware.split():
        raise UserError(f"the devices of {hardware!r} are unknown: they are of {', '.join(CLUSTERS)}")
    cluster = dataclasses.replace(preset, num_hosts=-(-run["devices"] // preset.devices_per_host))
    if "A100 40GB" in hardware:  # NVIDIA A100 datasheet
        cluster = dataclasses.replace(cluster, memory_bytes_per_second=1.555e12)
    if "96GB" in hardware:  # HBM2e and 500 W: between the SXM and the NVL of 835 TFLOP/s, by TorchTitan's docs
        cluster = dataclasses.replace(cluster, flops_per_second=912e12, memory_bytes_per_second=2.4e12)
    if is_old_megatron(run):  # all pairs, whose scores are kept
        cluster = dataclasses.replace(cluster, attention_efficiency=unfused_attention(cluster, run))
    if "float8" in run["precision"]:  # twice the peak, of which casting leaves three quarters
        cluster = dataclasses.replace(cluster, efficiency=1.5 * cluster.efficiency)
    return cluster


def is_old_megatron(run: Run) -> bool:
    """Whether a run is of Megatron-LM before FlashAttention."""
    return run["name"].startswith("Megatron") and "A100" in run["hardware"]


def unfused_attention(cluster: Cluster, run: Run) -> float:
    """The share of the peak of attention before FlashAttention, in operations of half of the pairs.

    Six products of all pairs, forward and backward. Scores, their softmax and dropout read and write
    11 bytes a pair forward and 12 backward (Korthikanti et al. 2022, section 4.1, and their gradients).
    """
    of_pair = 2 * run.get("head_size", run["width"] // run["heads"])
    seconds = 6 * of_pair / cluster.products_per_second + 23 / cluster.elementwise_bytes_per_second
    return 7 * of_pair / 2 / seconds / cluster.flops_per_second


def config_of(run: Run) -> DecoderConfig:
    """A decoder of as many parameters and operations. Two matrices of 4 h are as many as three of 8/3 h."""
    width, tensor, mlp = run["width"], run.get("tensor", 1), run["mlp"]
    found = re.search(r"d_ff (\d+)$|\b4 ?h$", mlp)
    if found is None or "expert" in f"{mlp} {run['name']}".lower() or "moe" in f"{mlp} {run['name']}".lower():
        raise UserError(f"MLPs are 'SwiGLU, d_ff N', or of 'two matrices', and dense, not {mlp!r}")
    mlp_width = int(found[1] or 4 * width)
    if "two matrices" in mlp:
        mlp_width = 2 * mlp_width // 3 // tensor * tensor
    return DecoderConfig(
        num_layers=2,  # as traced; they are counted with all
        width=width,
        mlp_width=mlp_width,
        num_heads=run["heads"],
        num_kv_heads=run.get("kv_heads"),
        head_size=run.get("head_size"),
        vocab_size=-(-run["vocabulary"] // tensor) * tensor,
        begins_samples=False,
        compute_dtype="bfloat16",
    )


def keeps_half(run: Run) -> bool:
    """Whether a run keeps attention and every second product, and computes the others again, as TorchTitan does."""
    return "TorchTitan" in run["name"] and run["remat"].startswith("selective")


def layout_of(run: Run) -> Layout:
    """The layout, with as many virtual stages as are published, or the fewest that divide the layers of a stage.

    A schedule of a whole table, whose virtual stages do not divide the layers of a run, is plain 1F1B there.
    """
    layout, layers = Layout.parse(run["layout"]), -(-run["layers"] // run.get("stage", 1))
    if is_old_megatron(run):
        layout = dataclasses.replace(layout, reduce_dtype="bfloat16")  # gradients of 16 bits
    if keeps_half(run):
        layout = dataclasses.replace(layout, remat="full")
    if layout.stage == 1 or "interleaved" not in run["schedule"]:
        return layout
    if found := re.search(r"interleaved (\d+)\b", run["schedule"]):
        virtual = int(found[1]) if layers % int(found[1]) == 0 else 1
    elif run["name"].startswith("Llama 3 "):
        virtual = layers  # a layer each, of which the ends take two (Llama Team 2024, section 3.3.2)
    else:
        virtual = next((size for size in range(2, layers + 1) if layers % size == 0), 1)
    return dataclasses.replace(layout, schedule="interleaved", virtual=virtual) if virtual > 1 else layout


def in_bfloat16(traffic: tuple[AxisTraffic, ...]) -> tuple[AxisTraffic, ...]:
    """Collectives of one pass; the library's are in float32."""
    return tuple(each._replace(num_bytes=each.num_bytes / 2) for each in traffic)


def with_bytes_of_others(costs: ModelCosts, run: Run, bucket: Bucket) -> ModelCosts:
    """The costs with what elementwise kernels of others read and write beside those of the library, in bytes.

    Logits are written and read four times in float32, where the library computes the loss in chunks. But for
    Megatron-LM, whose products of one input are joined, the gradients of q, k and v's input and of gate and up's are
    added in kernels of their own, in bfloat16. FSDP2 of PyTorch, as in TorchTitan, copies gathered parameters, forward
    and backward, and gradients, to float32.
    """
    tokens, is_torchtitan = bucket.rows * bucket.length, "TorchTitan" in run["name"]
    sums = 0 if run["name"].startswith("Megatron") else 18 * run["width"]
    of_params = sum(costs.layer_params) / run.get("tensor", 1) if is_torchtitan else 0.0

    def more(passes: PerPass[Work[Any]], forward: float, backward: float) -> PerPass[Work[Any]]:
        counts = zip(passes, (forward, backward, 0.0, 0.0), strict=True)
        return PerPass(*(each._replace(num_bytes=each.num_bytes + more) for each, more in counts))

    layer = more(costs.layer, 4 * of_params, 10 * of_params + tokens * sums)
    return dataclasses.replace(costs, layer=layer, ends=more(costs.ends, 0, 20 * tokens * run["vocabulary"]))


def predict(run: Run) -> StepSeconds:
    """The parts of a step of a run."""
    layout, config = layout_of(run), config_of(run)
    params = jax.eval_shape(lambda: init_params(config, seed=0))
    bucket = Bucket(run["microbatch_rows"], run["seq_length"])
    num_microbatches = run.get("global_batch", layout.data * bucket.rows) // bucket.rows
    if num_microbatches % (layout.data * (layout.stage if layout.virtual > 1 else 1)):
        raise UserError(f"{layout} does not divide {num_microbatches} microbatches of {bucket.rows} rows")
    if layout.num_devices != run["devices"]:
        raise UserError(f"{layout} takes {layout.num_devices} devices, and the run has {run['devices']}")
    costs = count_costs(layered(config), [bucket], params=params, tensor_sizes=(layout.tensor,))
    if layout.tensor not in (1, *costs.tensor_sizes):
        raise UserError(f"tensor{layout.tensor} does not divide the model")
    traffic = {axis: PerPass(*map(in_bfloat16, passes)) for axis, passes in costs.layer_traffic.items()}
    costs = dataclasses.replace(costs, layer_traffic=traffic)
    if keeps_half(run):
        again = costs.layer.full
        again = again._replace(flops=again.flops / 2, attention=0 * again.attention)
        costs = dataclasses.replace(costs, layer=costs.layer._replace(full=again))
    costs = with_bytes_of_others(costs, run, bucket)
    costs = dataclasses.replace(costs, num_layers=run["layers"], param_bytes=2.0)
    held = sum(run["layers"] / layout.stage * a + b for a, b in zip(costs.layer_params, costs.ends_params, strict=True))
    shards = layout.data * layout.context
    # Parameters have 16 bits, masters and moments 32.
    state_bytes = 2.0 / (shards if layout.zero == 3 else 1) + 12 / (shards if layout.zero else 1)
    seconds = step_seconds(
        layout_table([layout]),
        costs,
        cluster_of(run),
        num_microbatches=num_microbatches,
        state_bytes=np.array([state_bytes * held / layout.tensor]),
        of_own_programs=True,
    )
    return StepSeconds(*(part.item() for part in seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=RUNS, help="JSON, a list of runs")
    parser.add_argument("--quick", action="store_true", help="three runs, and no report")
    args = parser.parse_args()
    runs = json.loads(args.file.read_text())[: 3 if args.quick else None]
    rows, good, counted = [], 0, 0
    for run in runs:
        counts = not run["name"].startswith("nanotron")
        counted += counts
        try:
            parts = predict(run)
        except (KeyError, ValueError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            rows.append([run["name"], f"{run['published_s']:.4g}", "–", "–", f"refused: {why}"])
            continue
        ratio = parts.total / run["published_s"]
        good += counts and abs(ratio - 1) <= WITHIN
        shares = ", ".join(
            f"{name} {part / parts.total:.0%}" for name, part in parts._asdict().items() if part > 0.01 * parts.total
        )
        rows.append([run["name"], f"{run['published_s']:.4g}", f"{parts.total:.4g}", f"{ratio:.2f}", shares])
    lines = table("name|published|predicted|ratio|predicted parts", rows)
    lines += ["", f"Within 15 %: {good} of {counted}, nanotron's apart."]
    report("published", ["# Published runs", "", *lines], write=not args.quick and args.file == RUNS)


if __name__ == "__main__":
    main()
