"""Attention that excludes padding and the other samples of a row.

- `attention`: attention by lengths or by segments, in several implementations, and masks.
- `zigzag`: attention to the positions of other devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.attention.attention import attend, attend_within_segments, attention_mask, padding_mask, segment_mask

__all__ = [
    "attend",
    "attend_within_segments",
    "attention_mask",
    "padding_mask",
    "segment_mask",
]

AttentionImplementation = Literal["xla", "mask", "chunked", "cudnn"]
SegmentAttentionImplementation = Literal["xla", "cudnn", "chunked"]

__getattr__, __dir__ = lazy_imports(__name__)
