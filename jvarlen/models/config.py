"""Settings of the demo transformer, read without JAX."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jvarlen._common.checks import UserError, check_counts, is_number
from jvarlen.attention import AttentionImplementation, SegmentAttentionImplementation

__all__ = ["DecoderConfig", "check_temperature"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of the decoder."""

    num_layers: int = 2
    """Number of blocks."""
    width: int = 128
    """Size of the residual stream."""
    vocab_size: int = 256
    """Vocabulary size: 256 for bytes, or that of the tokenizer if it is larger."""
    num_heads: int = 2
    """Attention heads; must divide the width into even head sizes (rotary positions need pairs)."""
    attention: AttentionImplementation | None = None
    """Attention in rows of one sample: by row lengths (xla, cudnn), a B×T×T mask (mask) or chunks of queries (chunked).
    None chooses by the length of the rows. Rows that are spread have an attention of their own.
    """
    packed_attention: SegmentAttentionImplementation | None = None
    """Attention in packed rows. None chooses by the length of the rows."""
    compute_dtype: Literal["bfloat16"] | None = None
    """Type of activations and of the factors of products; parameters, sums, softmax and loss stay float32.
    None uses the type of the parameters."""

    def __post_init__(self):
        check_counts(self, 1, "num_layers", "width", "vocab_size", "num_heads")
        if self.width % (2 * self.num_heads):
            raise UserError(f"width ({self.width}) must be a multiple of 2 * num_heads ({2 * self.num_heads})")
        wrong = [name for name in ("attention", "packed_attention") if getattr(self, name) == "cudnn"]
        if wrong and self.compute_dtype is None:
            raise UserError(f"{' and '.join(wrong)}: cudnn takes no float32; set compute_dtype to bfloat16")


def check_temperature(temperature: float) -> None:
    """Raises ValueError where logits cannot be divided by it in float32; 0 means the likeliest token."""
    if not is_number(temperature) or not (temperature == 0 or 1e-30 <= temperature <= 1e30):
        raise UserError(f"temperature ({temperature!r}) must be 0, or from 1e-30 to 1e30")
