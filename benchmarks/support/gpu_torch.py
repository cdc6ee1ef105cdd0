"""Section of the GPU benchmark in PyTorch: the same model on packed rows by its best kernels, and on padded ones.

The model has float32 parameters and multiplies in bfloat16 under autocast, as the JAX model does; AdamW is fused.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from support.gpu_sizes import SEED, Sizes, lengths_by_kind, pack_options, step_flops
from support.gpu_worker import Answer, Save, run_section, said, say

# Last on the path, so that they stand in only for what is missing.
sys.path.append(str(Path(__file__).parents[2] / "tests" / "gpu" / "stand_ins"))

import torch_ref
from torch_ref.loading.varlen import varlen_of
from torch_ref.training import decoder

WARM_UPS = 3
NUM_STARTS = 64  # of samples in one array of tokens
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Way:
    """How packed rows attend: what stands for the mask, and the function that takes it."""

    def __init__(self, mask_of: Callable[[Any, Any, int], Any], attend: Callable[..., Any]):
        self._mask_of, self._attend = mask_of, attend

    @contextlib.contextmanager
    def in_decoder(self, samples_per_row: int) -> Iterator[None]:
        """The decoder of `torch_ref` attends so."""
        plain = decoder.rows_of

        def rows_of(config: Any, inputs: Any, segment_ids: Any, positions: Any) -> Any:
            rows = plain(config, inputs, segment_ids, positions)
            return rows._replace(masks={0: self._mask_of(segment_ids, positions, samples_per_row)})

        functional = types.SimpleNamespace(**vars(torch.nn.functional))
        functional.scaled_dot_product_attention = lambda q, k, v, mask, is_causal: self._attend(q, k, v, mask)
        with mock.patch.object(decoder, "rows_of", rows_of), mock.patch.object(decoder, "functional", functional):
            yield


def flex_mask(segment_ids: Any, positions: Any, samples_per_row: int) -> Any:
    """The blocks of pairs of a sample."""
    from torch.nn.attention.flex_attention import create_block_mask

    def is_seen(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (segment_ids[row, query] == segment_ids[row, key])

    rows, length = segment_ids.shape
    return create_block_mask(is_seen, rows, None, length, length, device=segment_ids.device)


def flex(q: Any, k: Any, v: Any, mask: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q.to(v.dtype), k.to(v.dtype), v, block_mask=mask)


def varlen_mask(segment_ids: Any, positions: Any, samples_per_row: int) -> Any:
    """Where samples begin, and the longest there may be."""
    made = varlen_of(torch.nn.functional.pad(segment_ids.diff(dim=1) != 0, (1, 0), value=True), samples_per_row)
    return made.cu_seqlens, made.max_seqlen


def varlen(q: Any, k: Any, v: Any, mask: Any) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    begins, longest = mask
    is_old = "is_causal" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"is_causal": True} if is_old else {"window_size": (-1, 0)}
    flat = (x.to(v.dtype).transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = varlen_attn(*flat, begins, begins, longest, longest, **causal)
    return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2)


WAYS = {"FlexAttention": Way(flex_mask, flex), "varlen attention": Way(varlen_mask, varlen)}


def measure_torch(sizes: Sizes, answer: Answer, save: Save) -> None:
    """Steps of packed rows by each way, of the samples that JAX trains on; then of a padded shape."""
    answer |= {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu", "version": torch.__version__}
    rows, lengths = sizes.packed_rows[0], lengths_by_kind(sizes)["long-tailed"]
    plan = torch_ref.make_plan(lengths, **pack_options(rows))
    source = np.random.default_rng(SEED).integers(sizes.model.num_values, size=sizes.longest + NUM_STARTS)
    samples = Samples(source, lengths)
    batches = []
    for batch in torch_ref.load(plan, samples):
        batches.append(torch_ref.to_device(batch, DEVICE))
        if len(batches) == min(sizes.num_steps, plan.num_steps):
            break
    used = [lengths[batch.ids[batch.is_real].cpu().numpy()] for batch in batches]
    answer["packed"] = {}
    for name, way in WAYS.items():
        with way.in_decoder(plan.samples_per_row[0]):
            answer["packed"][name] = attempt(sizes, plan, batches, used)
        say(f"PyTorch, {name}: {answer['packed'][name]}")
        save()
    shape = sizes.padded_shapes[0]
    full = np.full(shape[0], shape[1])
    dense = next(iter(torch_ref.load(torch_ref.make_plan(full, [shape]), Samples(source, full))))
    answer["padded"] = attempt(sizes, [shape], [torch_ref.to_device(dense, DEVICE)] * 4, [full] * 4)
    answer["padded"]["shape"] = shape


class Samples:
    """Parts of one array of tokens, of the given lengths."""

    def __init__(self, tokens: np.ndarray, lengths: np.ndarray):
        self._tokens, self._lengths = tokens, lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._tokens[index % NUM_STARTS :][: self._lengths[index]]


def attempt(sizes: Sizes, plan: Any, batches: list[Any], used: list[np.ndarray]) -> Answer:
    """Seconds of steps, after a step whose loss tells whether ways compute the same; or why there are none."""
    torch.manual_seed(SEED)
    config = torch_ref.DecoderConfig(**sizes.model._asdict())
    model = torch_ref.Decoder(config).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    try:
        compiled = torch_ref.compile_buckets(
            model, plan, loss_fn=loss_in_bfloat16, backend=sizes.torch_backend, progress=False
        )
        first_loss = float(compiled(optimizer, batches[0])["loss"])
        for batch in batches[:WARM_UPS]:
            compiled(optimizer, batch)
        wait()
        begun = time.perf_counter()
        for batch in batches:
            compiled(optimizer, batch)
        wait()
        seconds = time.perf_counter() - begun
        lengths = np.concatenate(used)
        return {
            "compile_s": compiled.rows[0].compile_s,
            "mode": compiled.mode,
            "first_loss": first_loss,
            "seconds": seconds,
            "num_steps": len(batches),
            "num_tokens": int(lengths.sum()),
            "flops": float(step_flops(sizes.model, 1, lengths).sum()),
            "peak_bytes": torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None,
        }
    except Exception as error:
        traceback.print_exc()  # torch says below the first line why
        return {"error": said(error)}
    finally:
        del model, optimizer
        torch.compiler.reset()
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def loss_in_bfloat16(model: torch.nn.Module, microbatch: torch_ref.Batch) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast(DEVICE, torch.bfloat16):
        return torch_ref.loss_sums(model, microbatch)


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


SECTIONS = {"torch": measure_torch}

if __name__ == "__main__":
    sys.exit(run_section(SECTIONS))
