"""Report lines of the GPU benchmark, from the answers of both processes."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from typing import Any

from support.gpu_sizes import Sizes, num_multiplied, step_flops
from support.timing import digits, table, versions_and_hardware

TERA = 1e12
Answers = dict[str, Any]


def make_lines(sizes: Sizes, of_jax: Answers, of_torch: Answers, of_targets: Answers, *, quick: bool) -> list[str]:
    """The report; `of_torch` holds "missing" where PyTorch could not be asked."""
    device = of_jax.get("machine", {}).get("device", "unknown device")
    lines = [f"# Training on {device}, {datetime.date.today()}", ""]
    if quick:
        lines += ["**no GPU: CPU figures, quick form**", ""]
    lines += [describe_model(sizes, of_jax), ""]
    lines += [*failures({"JAX": of_jax, "PyTorch": of_torch, "targets": of_targets})]
    peak = best_rate(of_jax)
    sections = {
        "Matrix products": rate_table(of_jax, of_torch),
        "Shares of the peak": share_table(of_jax.get("shares", {})),
        "Attention alone": kernel_table(of_jax),
        "Attention": attention_table(of_jax),
        "Shapes": shape_table(sizes, of_jax, peak),
        "What `compile_for` predicts for the device": target_table(of_targets.get("targets", {})),
        "The most rows that fit": target_table(of_targets.get("rows by memory", {})),
        "Epochs": epoch_table(of_jax, peak),
        "A training loop": describe_loop(sizes, of_jax, peak),
        "Command buffers": buffer_table(of_jax),
        "PyTorch": torch_table(sizes, of_jax, of_torch),
        f"Sorting {sizes.num_keys:,} keys of 32 bits with their index": sort_table(of_jax, of_torch),
    }
    for title, body in sections.items():
        if body:
            lines += [f"## {title}", "", *body, ""]
    versions = of_jax.get("machine", {}).get("versions", {}) | of_torch.get("machine", {}).get("versions", {})
    run = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [*lines, f"Run: {run}.", "", versions_and_hardware("jax", "jaxlib", "flax", "optax", "torch")]


def describe_model(sizes: Sizes, of_jax: Answers) -> str:
    parameters = of_jax.get("epochs", {}).get("num_parameters", num_multiplied(sizes))
    return (
        f"A decoder of {digits(parameters / 1e6)} million parameters (layers: {sizes.num_layers}, width: "
        f"{sizes.width:,}, heads: {sizes.num_heads}, tokens: bytes), multiplied in bfloat16 with parameters and sums "
        "in float32; AdamW. "
        f"{sizes.num_samples:,} samples of up to {sizes.longest:,} tokens, {sizes.max_tokens:,} tokens a microbatch, "
        f"one microbatch a step, lengths of shapes rounded to {sizes.length_multiple}. Operations are counted by "
        f"formula: 6 for each of the {num_multiplied(sizes):,} parameters that are multiplied and each token, and "
        "12 × layers × width for each pair of a position with itself or one before it."
    )


def failures(answers: dict[str, Answers]) -> Iterator[str]:
    for package, answer in answers.items():
        if answer.get("missing"):
            yield from (f"{package}: left out, {answer['missing']}.", "")
        for part, error in answer.get("failed", {}).items():
            yield from (f"**{package}: the part “{part}” failed**: {error.replace('|', '/')}", "")


def best_rate(of_jax: Answers) -> float:
    """Operations a second that the device can reach with matrices; NaN where they were not measured."""
    return max(of_jax.get("matrices", {}).values(), default=math.nan)


def rate_table(of_jax: Answers, of_torch: Answers) -> list[str]:
    rates = {"JAX": of_jax.get("matrices", {}), "PyTorch": of_torch.get("matrices", {})}
    columns = list(rates["JAX"] or rates["PyTorch"])
    if not columns:
        return []
    header = "TFLOP/s in bfloat16|" + "|".join(f"{int(size):,}³" for size in columns)
    rows = ([name, *(tera(of.get(size, math.nan)) for size in columns)] for name, of in rates.items() if of)
    return [*table(header, rows), "", "The best of JAX's is the matrix rate below."]


def share_table(found: Answers) -> list[str]:
    """What `Cluster` assumes of the device, beside what was measured."""
    rows = []
    for name, of in found.items():
        if "left_out" in of:
            rows.append((name, f"left out: {of['left_out']}", "–", "–"))
        elif of["peak"] is None:
            told = f"{of['figure'] * 1e6:.3g} µs" if "kernel" in name else f"{of['figure'] / 1e12:.4g} T/s"
            rows.append((name, told, "–", "–" if of["assumed"] is None else f"{of['assumed'] * 1e6:.3g} µs"))
        else:
            shares = f"{of['figure'] / of['peak']:.3f}", f"{of['assumed']:.3g}"
            rows.append((name, f"{of['figure'] / 1e12:.4g} T/s", *shares))
    return table("what|measured|share of the peak|`Cluster` assumes", rows) if rows else []


def kernel_table(of_jax: Answers) -> list[str]:
    rows = [
        (
            case,
            way,
            f"{of['seconds'] * 1e3:.2f}" if "seconds" in of else of["error"].replace("|", "/"),
            f"{of['temporaries_bytes'] / 1e6:.1f}" if "seconds" in of else "–",
            f"{of['difference']:.1e}" if "seconds" in of else "–",
        )
        for case, ways in of_jax.get("attention alone", {}).items()
        for way, of in ways.items()
    ]
    if not rows:
        return []
    return [
        *table("rows|by|ms, forward and backward|temporaries, MB|largest difference from float32", rows),
        "",
        "Causal, bfloat16, 8 heads of queries and 2 of keys, of 128. More than some hundredths of difference are pairs "
        "of samples that are not the same.",
    ]


def attention_table(of_jax: Answers) -> list[str]:
    found = of_jax.get("attention", {})
    if not found:
        return []
    rows = [
        (name, f"{of['step_s'] * 1e3:.1f}" if "step_s" in of else of["error"].replace("|", "/"))
        for name, of in found.items()
    ]
    return [*table("attention|ms of a step in the longest shape", rows), "", "The fastest is used below."]


def step_seconds(of_jax: Answers) -> dict[tuple[int, ...], float]:
    """Seconds of a step in the shapes that ran."""
    shapes = of_jax.get("epochs", {}).get("shapes", [])
    return {tuple(of["shape"]): of["step_s"] for of in shapes if "step_s" in of}


def shape_table(sizes: Sizes, of_jax: Answers, peak: float) -> list[str]:
    epochs = of_jax.get("epochs", {})
    rows, failed = [], []
    for of in sorted(epochs.get("shapes", []), key=lambda of: (of["shape"][1], of["shape"][0])):
        if "step_s" not in of:
            failed.append(f"**{'×'.join(map(str, of['shape']))}**: {of.get('error', 'out of time').replace('|', '/')}")
            continue
        rate = float(step_flops(sizes, *of["shape"])) / of["step_s"]
        rows.append(
            (
                "×".join(f"{number:,}" for number in of["shape"]),
                f"{of['lower_s']:.1f}",
                f"{of['compile_s']:.1f}",
                f"{of['bytes'] / 1e9:.2f}",
                f"{of['step_s'] * 1e3:.2f}",
                f"{digits(math.prod(of['shape']) / of['step_s'])}",
                tera(rate),
                f"{rate / peak:.1%}",
                tera(of["xla_flops"] / of["step_s"]),
            )
        )
    if not rows:
        return failed
    header = "rows × length|lower, s|compile, s|GB|ms a step|positions/s|TFLOP/s|of the matrix rate|by XLA's count"
    return [
        *table(header, rows),
        "",
        f"Several shapes are compiled at a time: {digits(sum(epochs['compile_wall_s']))} s passed in all. XLA does not "
        "count what it hands to libraries, and the body of a loop once.",
        *(line for text in failed for line in ("", text)),
    ]


def target_table(found: Answers) -> list[str]:
    """The prediction for each shape next to what the device does."""
    if not found:
        return []
    if found["target"] is None:
        return [f"No target is known for {found['device']}."]
    rows, failed, ratios = [], [], {"bytes": [], "seconds": []}
    for of in found["shapes"]:
        shape = "×".join(f"{number:,}" for number in of["shape"])
        if "error" in of:
            failed.append(f"**{shape}**: {of['error'].replace('|', '/')}")
            continue
        cells = [shape]
        at_most = "≤ " if of["is_bound"] else ""
        for name, told, measured, scale, bound in (
            ("bytes", of["told_bytes"], of["peak_bytes"], 1e-9, at_most),
            ("seconds", of["told_s"], of["step_s"], 1e3, ""),
        ):
            is_known = told is not None and measured is not None
            ratios[name] += [measured / told] if is_known and not bound else []
            cells.append("–" if told is None else digits(told * scale))
            cells.append("–" if measured is None else f"{bound}{digits(measured * scale)}")
            cells.append(f"{bound}{measured / told:.3f}" if is_known else "–")
        rows.append(cells)
    off = [f"{name} are {min(of):.3f} to {max(of):.3f} times those predicted" for name, of in ratios.items() if of]
    header = "rows × length|GB, predicted|GB, in use|in use / predicted|ms a step, estimate|ms a step|taken / estimate"
    return [
        *table(header, rows),
        "",
        f"Told by `compile_for` for {found['target']}, measured on {found['device']}"
        f"{': ' if off else '; there is nothing to compare'}{', '.join(off)}. Bytes in use are the most since the "
        "process began, which bound those of a shape that does not raise them.",
        *(line for text in failed for line in ("", text)),
    ]


def epoch_table(of_jax: Answers, peak: float) -> list[str]:
    epochs = of_jax.get("epochs", {})
    seconds = step_seconds(of_jax)
    best: dict[str, float] = {}
    rows = []
    left_out = list(epochs.get("left_out", []))
    for plan in epochs.get("plans", []):
        if not {tuple(shape) for shape in plan["shapes"]} <= seconds.keys():
            left_out.append(f"{plan['strategy']}, {plan['lengths']} lengths, of which a shape failed")
            continue
        epoch_s = sum(steps * seconds[tuple(shape)] for shape, steps in zip(plan["shapes"], plan["steps"], strict=True))
        best.setdefault(plan["lengths"], epoch_s)
        useful = plan["useful_flops"] / epoch_s
        rows.append(
            (
                f"{plan['lengths']}, {plan['strategy']}",
                f"{plan['plan_s']:.2f}",
                f"{len(plan['shapes'])}",
                f"{sum(plan['steps']):,}",
                f"{plan['padding']:.2%}",
                f"{epoch_s:.1f}",
                digits(plan["num_tokens"] / epoch_s),
                f"{epoch_s / best[plan['lengths']]:.2f}",
                tera(useful),
                f"{useful / peak:.1%}",
            )
        )
    if not rows:
        return []
    header = "lengths, shapes|planning, s|shapes|steps|padding|epoch, s|real tokens/s|× optimal|useful TFLOP/s"
    lines = [
        *table(f"{header}|of the matrix rate", rows),
        "",
        "An epoch is the sum of its steps, each at the seconds of its shape. Useful are the operations of real tokens, "
        "as if each sample had a shape of its own.",
    ]
    if left_out:
        lines += ["", f"Left out, for lack of time where nothing else is said: {'; '.join(left_out)}."]
    return lines


def describe_loop(sizes: Sizes, of_jax: Answers, peak: float) -> list[str]:
    loop = of_jax.get("loop", {})
    if not loop:
        return []
    seconds = step_seconds(of_jax)
    flops = sum(float(step_flops(sizes, *shape)) for shape in loop["shapes"])
    alone = sum(seconds.get(tuple(shape), math.nan) for shape in loop["shapes"])
    return [
        f"{loop['num_steps']} steps of the optimal plan of long-tailed lengths, batches collated on the host "
        f"meanwhile, nothing compiled: {digits(loop['num_tokens'] / loop['seconds'])} real tokens/s, "
        f"{tera(flops / loop['seconds'])} TFLOP/s with padding, {flops / loop['seconds'] / peak:.1%} of the matrix "
        f"rate, {loop['seconds'] / alone:.3f} times the seconds of the same steps by themselves. Loss of the first "
        f"step {loop['losses'][0]:.3f}, of the last {loop['losses'][1]:.3f} nats (the bytes are random: ln 256 is "
        "5.545)."
    ]


def buffer_table(of_jax: Answers) -> list[str]:
    found = of_jax.get("command buffers", {})
    if len(found) < 2:
        return []
    rows = [
        (f"{rows}×{length:,}", f"{on * 1e3:.2f}", f"{off * 1e3:.2f}", f"{off / on:.3f}")
        for (rows, length, on), (_, _, off) in zip(found["on"], found["off"], strict=True)
    ]
    return table("rows × length|on, ms a step|off, ms a step|off / on", rows)


def torch_table(sizes: Sizes, of_jax: Answers, of_torch: Answers) -> list[str]:
    steps = of_torch.get("steps", {})
    peak = max(of_torch.get("matrices", {}).values(), default=math.nan)
    in_jax = step_seconds(of_jax)
    rows = []
    for of in steps.get("shapes", []):
        rate = float(step_flops(sizes, *of["shape"])) / of["step_s"]
        rows.append(
            (
                "×".join(f"{number:,}" for number in of["shape"]),
                of["mode"],
                f"{of['compile_s']:.1f}",
                f"{of['step_s'] * 1e3:.2f}",
                tera(rate),
                f"{rate / peak:.1%}",
                f"{of['step_s'] / in_jax.get(tuple(of['shape']), math.nan):.2f}",
            )
        )
    if not rows:
        return []
    header = "rows × length|mode|compile, s|ms a step|TFLOP/s|of its matrix rate|PyTorch / JAX"
    lines = [
        *table(header, rows),
        "",
        "The same model and plan, `torch_ref.compile_buckets`. PyTorch's autocast leaves results of matrix products in "
        "bfloat16, where the model in JAX keeps norms, residuals and sums of kernels' gradients in float32. Forward "
        "and backward are compiled, and a fused AdamW follows; JAX's step is one program.",
    ]
    if steps["left_out"]:
        left_out = ", ".join(f"{rows}×{length}" for rows, length in steps["left_out"])
        lines += ["", f"Left out for lack of time: {left_out}."]
    return lines


def sort_table(of_jax: Answers, of_torch: Answers) -> list[str]:
    seconds = of_jax.get("sort", {}) | of_torch.get("sort", {})
    peer = of_jax.get("sort", {}).get("`lax.sort` of (key, index)", math.nan)
    rows = ((name, f"{s * 1e3:.2f}", f"{s / peer:.2f}") for name, s in seconds.items())
    return table("|ms|× `lax.sort`", rows) if seconds else []


def tera(rate: float) -> str:
    return "–" if math.isnan(rate) else digits(rate / TERA)
