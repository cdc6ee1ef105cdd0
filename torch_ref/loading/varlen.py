"""Where the samples of packed rows begin, as kernels for sequences of varying lengths take it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torch_ref.checks import known_keywords
from torch_ref.loading.batch import AnyBatch, values_of

__all__ = ["Varlen", "varlen", "varlen_of"]


class Varlen(NamedTuple):
    """Packed rows as one sequence of B * T tokens, in which each sample and each row's padding is a segment.

    Attributes:
        cu_seqlens: int32[n + 1], the tokens before each segment, then B * T; n = B * (P + 1), and where rows hold fewer
            samples than P, or no padding, the last segments are empty. So the shape is that of the bucket.
        max_seqlen: T, an upper bound that is the same for all batches of a bucket.
        position_ids: int64[B, T], the place of each token in its segment, from 0 in padding too.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    position_ids: Tensor


@known_keywords
def varlen(batch: AnyBatch | Mapping[str, Any], *, side: str = "") -> Varlen:
    """Return where the samples of packed rows begin, as FlashAttention's varlen functions take it.

    Nothing waits for the device, and shapes are static, as `torch.compile` and CUDA graphs need them. The functions of
    transformers take the same as `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`.

    Args:
        batch: a batch of packed rows, or a microbatch of it: `segment_ids` int64[..., T] and `ids` int64[..., P]. All
            its rows, B of them, form one sequence.
        side: "source" or "target" in batches of pairs.

    Returns:
        `cu_seqlens` int32[B * (P + 1) + 1], `max_seqlen` and `position_ids` int64[..., T].

    Raises:
        ValueError: if the batch has no segments: a row is a sample.

    Example:
        >>> segments, ids = torch.tensor([[1, 1, 2, 0], [1, 1, 1, 1]]), torch.zeros(2, 3)
        >>> made = varlen({"segment_ids": segments, "ids": ids})
        >>> made.cu_seqlens.tolist(), made.max_seqlen, made.position_ids.tolist()
        ([0, 2, 3, 4, 8, 8, 8, 8, 8], 4, [[0, 1, 0, 0], [0, 1, 2, 3]])
    """
    held = values_of(batch) if isinstance(batch, tuple) else batch
    segment_ids = held.get(f"{side}_segment_ids" if side else "segment_ids")
    if segment_ids is None:
        raise ValueError(f"varlen takes batches of packed rows, which have segment_ids; this one has {', '.join(held)}")
    is_start = functional.pad(segment_ids[..., 1:] != segment_ids[..., :-1], (1, 0), value=True)
    return varlen_of(is_start, held["ids"].shape[-1])


def varlen_of(is_start: Tensor, samples_per_row: int) -> Varlen:
    """Return the same from where segments start, bool[..., T]."""
    length, size = is_start.shape[-1], is_start.numel()
    place = torch.arange(length, device=is_start.device).expand(is_start.shape)
    position_ids = place - torch.where(is_start, place, 0).cummax(dim=-1).values
    starts = torch.where(is_start.flatten(), torch.arange(size, device=is_start.device), size)
    most = size // length * (min(samples_per_row, length - 1) + 1)
    cu_seqlens = functional.pad(starts.sort().values[:most], (0, 1), value=size)
    return Varlen(cu_seqlens.to(torch.int32), length, position_ids)
