"""Report lines of the GPU benchmark, from the answers of its sections."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from typing import Any

from support.gpu_sizes import Sizes
from support.timing import digits, table, versions_and_hardware

TERA = 1e12
Answers = dict[str, Any]


def make_lines(sizes: Sizes, answers: dict[str, Answers], *, quick: bool) -> list[str]:
    """The report, of the sections that have answered."""
    of = {name: answers.get(name, {}) for name in (
        "device", "kernels", "packed", "padded", "llama", "torch", "profile", "targets", "many shapes", "rollouts"
    )}  # fmt: skip
    peak = max(of["device"].get("matrices", {}).values(), default=math.nan)
    lines = [f"# Training on {of['device'].get('device', 'unknown device')}, {datetime.date.today()}", ""]
    if quick:
        lines += ["**no GPU: CPU figures, quick form**", ""]
    lines += [describe_model(sizes), "", *failures(answers)]
    sections = {
        "Published figures": anchor_table(of),
        "Matrix products": rate_table(of["device"]),
        "Shares of the peak": share_table(of["device"].get("shares", {})),
        "Attention of packed rows by samples": kernel_table(sizes, of["kernels"]),
        "Packed rows": packed_table(of["packed"], peak),
        "Padded shapes": shape_table(of["padded"], peak),
        "Epochs in padded shapes": epoch_table(of["padded"], peak),
        "A Llama of 1 B": llama_table(of["llama"], peak),
        "PyTorch": torch_table(of["torch"], of["packed"], of["padded"], peak),
        "Kernels of a step": profile_tables(of["profile"]),
        "What `compile_for` predicts for the device": target_table(of["targets"]),
        "Steps of many shapes": describe_many(of["many shapes"], peak),
        "Learning from answers": describe_rollouts(of["rollouts"]),
    }
    for title, body in sections.items():
        if body:
            lines += [f"## {title}", "", *body, ""]
    return [*lines, versions_and_hardware("jax", "jaxlib", "flax", "optax", "torch")]


def describe_model(sizes: Sizes) -> str:
    model = sizes.model
    return (
        f"Unless another is named, a decoder of {digits(model.num_multiplied / 1e6)} million multiplied parameters "
        f"(layers: {model.num_layers}, width: {model.width:,}, heads: {model.num_heads}, tokens: bytes), multiplied in "
        "bfloat16 with parameters and sums in float32; AdamW; one microbatch a step. Lengths of up to "
        f"{sizes.longest:,} tokens, long-tailed (median {sizes.longest // 10:,}) or uniform; padded microbatches of "
        f"{sizes.max_tokens:,} tokens. Operations are counted by formula, of real tokens alone: 6 for each parameter "
        "that is multiplied and each token, 4 where it is not trained, and 12 × layers × width for each pair of a "
        "position with itself or one before it in its sample. Shares are of the best matrix rate."
    )


def failures(answers: dict[str, Answers]) -> Iterator[str]:
    for name, answer in answers.items():
        if "left_out" in answer:
            yield from (f"The section “{name}” is left out: {answer['left_out']}.", "")
        if "failed" in answer:
            yield from (f"**The section “{name}” is not whole**: {plain(answer['failed'])}", "")


def plain(text: str) -> str:
    return text.replace("|", "/")


def anchor_table(of: dict[str, Answers]) -> list[str]:
    """What others published, and how much of it the nearest of these measurements reaches."""
    kernels = of["kernels"].get("8192", {})
    rates = {way: each["forward_flops"] / each["forward_s"] for way, each in kernels.items() if "error" not in each}
    whole, lora = (of["llama"].get(name, {}) for name in ("all parameters", "LoRA"))
    forward = "forward, causal, heads of 128, samples of 8,192 tokens, TFLOP/s"
    measured = (
        (f"FlashAttention-3, {forward}", 602e12, max(rates.values(), default=math.nan)),
        (f"cuDNN, {forward}", 529e12, rates.get("cudnn", math.nan)),
        ("Llama-3-8B by LoRA on one GPU (12,473 tokens/s), TFLOP/s", 402e12, rate_of(lora, "flops")),
        ("1 B on 8 GPUs, tokens/s a GPU", 42_000.0, rate_of(whole, "num_tokens")),
    )
    rows = []
    for what, published, here in measured:
        unit = TERA if "FLOP" in what else 1
        if not math.isnan(here):
            rows.append((what, digits(published / unit), digits(here / unit), f"{here / published:.2f}"))
    if not rows:
        return []
    lines = table("published, on H100|published|measured here|measured / published", rows)
    return [*lines, "", "Measured are the fastest kernel, cuDNN with packed rows, and a Llama of 1 B on one GPU."]


def rate_of(of: Answers, name: str) -> float:
    return of[name] / of["seconds"] if "seconds" in of else math.nan


def rate_table(device: Answers) -> list[str]:
    rates = device.get("matrices", {})
    if not rates:
        return []
    header = "TFLOP/s in bfloat16|" + "|".join(f"{int(size):,}³" for size in rates)
    return table(header, [["products", *map(tera, rates.values())]])


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


def kernel_table(sizes: Sizes, found: Answers) -> list[str]:
    rows = []
    for of_sample, ways in found.items():
        for way, of in ways.items() if isinstance(ways, dict) else ():
            if "error" in of:
                rows.append((f"{int(of_sample):,}", way, plain(of["error"]), *"–––––"))
                continue
            backward_s = of["both_s"] - of["forward_s"]
            rates = of["forward_flops"] / of["forward_s"], 2.5 * of["forward_flops"] / max(backward_s, 1e-9)
            milliseconds = (f"{of[name] * 1e3:.2f}" for name in ("forward_s", "both_s"))
            room = f"{of['temporaries_bytes'] / 1e6:.1f}"
            rows.append((f"{int(of_sample):,}", way, *milliseconds, *map(tera, rates), room, f"{of['difference']:.1e}"))
    if not rows:
        return []
    header = "tokens a sample|by|ms forward|ms with gradients|TFLOP/s forward|backward|temporaries, MB|difference"
    num_rows, length = sizes.kernel_rows
    return [
        *table(header, rows),
        "",
        f"{num_rows} rows of {length:,}, causal, bfloat16, 8 heads of queries and 2 of keys, of 128; operations of the "
        "pairs of samples, 2 products forward and 5 backward. The largest difference of outputs and gradients from "
        "dense attention in float32 is over the largest number: more than some hundredths are pairs of samples that "
        "are not the same.",
    ]


def rates_of(of: Answers, peak: float) -> tuple[str, str, str, str]:
    """Milliseconds a step, real tokens a second, operations a second and their share."""
    rate = of["flops"] / of["seconds"]
    milliseconds = f"{of['seconds'] / of['num_steps'] * 1e3:.2f}"
    return milliseconds, digits(of["num_tokens"] / of["seconds"]), tera(rate), share_of(rate, peak)


RATES = "ms a step|real tokens/s|TFLOP/s|share"


def packed_table(found: Answers, peak: float) -> list[str]:
    rows = []
    for of in found.get("plans", []):
        named = of["lengths"], by_times(of["rows"]), of["attention"], f"{of['samples_per_row']}"
        if "error" in of:
            rows.append((*named, plain(of["error"]), *"––––––"))
            continue
        told = f"{of['padding']:.2%}", f"{of['compile_s']:.1f}", f"{of['bytes'] / 1e9:.2f}"
        rows.append((*named, *told, *rates_of(of, peak)))
    header = f"lengths|rows|attention|samples a row|padding|compile, s|GB|{RATES}"
    return table(header, rows) if rows else []


def shape_table(found: Answers, peak: float) -> list[str]:
    rows = []
    for of in sorted(found.get("shapes", []), key=lambda of: (of["shape"][1], of["shape"][0])):
        named = by_times(of["shape"]), f"{of['compile_s']:.1f}", f"{of['bytes'] / 1e9:.2f}"
        if "step_s" not in of:
            rows.append((*named, plain(of["error"]), *"–––"))
            continue
        rate = of["flops"] / of["step_s"]
        positions = digits(math.prod(of["shape"]) / of["step_s"])
        rows.append((*named, f"{of['step_s'] * 1e3:.2f}", positions, tera(rate), share_of(rate, peak)))
    header = "rows × length|compile, s|GB|ms a step|positions/s|TFLOP/s|share"
    return table(header, rows) if rows else []


def epoch_table(found: Answers, peak: float) -> list[str]:
    seconds = {tuple(of["shape"]): of.get("step_s", math.nan) for of in found.get("shapes", [])}
    rows = []
    for plan in found.get("plans", []):
        of_shapes = (seconds[tuple(shape)] for shape in plan["shapes"])
        epoch_s = sum(steps * each for steps, each in zip(plan["steps"], of_shapes, strict=True))
        of = plan | {"seconds": epoch_s, "num_steps": sum(plan["steps"])}
        rows.append((plan["lengths"], f"{len(plan['shapes'])}", f"{plan['padding']:.2%}", *rates_of(of, peak)))
    if not rows:
        return []
    lines = table(f"lengths|shapes|padding|{RATES}", rows)
    return [*lines, "", "An epoch is the sum of its steps, each at the seconds of its shape."]


def llama_table(found: Answers, peak: float) -> list[str]:
    rows = []
    for name, of in found.items():
        if not isinstance(of, dict):
            continue
        if "seconds" not in of:
            rows.append((name, plain(of.get("error", "not measured in time")), *"–––––"))
        else:
            rows.append((name, f"{of['compile_s']:.1f}", f"{of['bytes'] / 1e9:.2f}", *rates_of(of, peak)))
    if not rows:
        return []
    return [
        *table(f"trained|compile, s|GB|{RATES}", rows),
        "",
        "The shape of Llama 3.2 1B, random weights, one packed row of long-tailed lengths a step. By LoRA, adapters of "
        "rank 8 on all products of layers, the base in bfloat16.",
    ]


def torch_table(found: Answers, packed: Answers, padded: Answers, peak: float) -> list[str]:
    """Steps of PyTorch over those of JAX, on the same samples or shape."""
    plans = packed.get("plans", [])
    first = next((of["seconds"] / of["num_steps"] for of in plans if "seconds" in of), math.nan)
    in_jax = {tuple(of["shape"]): of["step_s"] for of in padded.get("shapes", []) if "step_s" in of}
    last = found.get("padded", {})
    shape = tuple(last.get("shape", ()))
    turns = [(f"packed, {name}", of, first) for name, of in found.get("packed", {}).items()]
    turns += [(f"padded, {by_times(shape)}", last, in_jax.get(shape, math.nan))] if last else []
    rows = []
    for name, of, step_s in turns:
        if "error" in of:
            rows.append((name, plain(of["error"]), *"–––––––"))
            continue
        told = of["mode"], f"{of['compile_s']:.1f}", f"{of['first_loss']:.4f}"
        ratio = of["seconds"] / of["num_steps"] / step_s
        rows.append((name, *told, *rates_of(of, peak), "–" if math.isnan(ratio) else f"{ratio:.2f}"))
    if not rows:
        return []
    return [
        *table(f"rows|mode|compile, s|first loss|{RATES}|PyTorch / JAX", rows),
        "",
        "The same model, parameters in float32, multiplied in bfloat16 under autocast, with a fused AdamW; packed rows "
        "are those of the first line of the packed ones above, from the same weights in each way. Forward and backward "
        "are compiled; JAX's step is one program.",
    ]


def profile_tables(found: Answers) -> list[str]:
    variants = {name: of for name, of in found.items() if isinstance(of, dict)}
    kinds = dict.fromkeys(kind for of in variants.values() for kind in of.get("kinds", {}))
    if not variants:
        return []

    def cell(of: Answers, table_name: str, name: str) -> str:
        seconds, number = of.get(table_name, {}).get(name, (0, 0))
        return f"{seconds / of['num_steps'] * 1e3:.2f} ({number / of['num_steps']:.0f})"

    whole = {name: of for name, of in variants.items() if "num_steps" in of}
    rows = [["a step", *(f"{of['step_s'] * 1e3:.2f}" for of in whole.values())]]
    rows += [[kind, *(cell(of, "kinds", kind) for of in whole.values())] for kind in kinds]
    lines = table(f"ms (kernels) a step|{'|'.join(whole)}", rows) if whole else []
    lines += [f"**{name}**: {plain(of['error'])}" for name, of in variants.items() if "error" in of]
    for name, of in list(whole.items())[:1]:
        longest = [[plain(each)[:80], cell(of, "longest", each)] for each in of.get("longest", {})]
        lines += ["", f"The longest of {name}:", "", *table("kernel|ms (kernels) a step", longest)] if longest else []
    return [*lines, "", "Kernels are started one by one here, without command buffers."]


def describe_many(of: Answers, peak: float) -> list[str]:
    if "seconds" not in of:
        return []
    milliseconds, tokens, rate, share = rates_of(of, peak)
    return [
        f"Steps of {of['groups_per_step']:.1f} groups in {of['shapes']} shapes, long-tailed lengths, one update each: "
        f"{milliseconds} ms a step, {tokens} real tokens/s, {rate} TFLOP/s, {share} of the matrix rate, padding "
        f"{of['padding']:.2%}; {of['compile_s']:.1f} s to compile."
    ]


def describe_rollouts(of: Answers) -> list[str]:
    if "draw_s" not in of:
        return []
    line = (
        f"Drawing {of['num_new_tokens']:,} new tokens takes {of['draw_s']:.2f} s, "
        f"{digits(of['num_new_tokens'] / of['draw_s'])} tokens/s, after {of['first_s']:.1f} s with compiling."
    )
    if "update_s" in of:
        line += (
            f" Planning them takes {of['plan_s'] * 1e3:.1f} ms, and the update on {of['num_tokens']:,} tokens in "
            f"{of['groups']} groups of packed rows {of['update_s'] * 1e3:.1f} ms (padding {of['padding']:.2%})."
        )
    return [line]


def target_table(found: Answers) -> list[str]:
    """The prediction for each shape next to what the device does."""
    if "target" not in found:
        return []
    if found["target"] is None:
        return [f"No target is known for {found['device']}."]
    rows, failed, ratios = [], [], {"bytes": [], "seconds": []}
    for of in found["shapes"]:
        shape = by_times(of["shape"])
        if "error" in of:
            failed.append(f"**{shape}**: {plain(of['error'])}")
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


def by_times(shape: Any) -> str:
    return "×".join(f"{number:,}" for number in shape)


def share_of(rate: float, peak: float) -> str:
    return "–" if math.isnan(rate / peak) else f"{rate / peak:.1%}"


def tera(rate: float) -> str:
    return "–" if math.isnan(rate) else digits(rate / TERA)
