"""Keys and row indices as unsigned integers that sort like the rows, and back.

Unsigned integers sort several times faster than pairs, and a row with a 32-bit key fits into one of them. Only bits are
handled, so no backend can flush a subnormal number to zero. Call these functions where 64-bit types are enabled.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

__all__ = ["Words", "from_words", "index_dtype", "to_words", "word_dtypes"]

Words: TypeAlias = tuple[jax.Array, ...]  # unsigned integers, the most significant first; rows compare as they do

_LARGEST_SHORT_INDEX = 2**31 - 2  # shifted by one, it is still below the largest uint32, which marks a gap


def index_dtype(num_rows: int) -> np.dtype:
    """int32 if it can number all rows, otherwise int64."""
    return np.dtype(np.int32 if num_rows <= _LARGEST_SHORT_INDEX else np.int64)


def word_dtypes(key_dtype: np.dtype, num_rows: int) -> tuple[np.dtype, ...]:
    """The types of the words of a row: one uint64 if it holds a key and an index, otherwise two words."""
    key_bits = np.dtype(_unsigned(_widened(key_dtype))).itemsize * 8
    index_bits = index_dtype(num_rows).itemsize * 8
    if key_bits == index_bits == 32:
        return (np.dtype(np.uint64),)
    return np.dtype(f"uint{key_bits}"), np.dtype(f"uint{index_bits}")


def to_words(keys: Shaped[Array, " n"], index: Int[Array, " n"], num_rows: int) -> Words:
    """Words of rows that sort by key, then by index; the lowest bit of all says whether the key is −0.0."""
    dtypes = word_dtypes(keys.dtype, num_rows)
    bits, is_negative_zero = _sortable_bits(keys)
    last = (index.astype(dtypes[-1]) << 1) | is_negative_zero.astype(dtypes[-1])
    if len(dtypes) == 1:
        return (bits.astype(dtypes[0]) << 32 | last,)
    return bits, last


def from_words(words: Words, key_dtype: np.dtype) -> tuple[Shaped[Array, " n"], Int[Array, " n"]]:
    """Keys and indices of words; those of the largest words, which stand for no row, are meaningless."""
    if len(words) == 1:
        bits, last = (words[0] >> 32).astype(jnp.uint32), words[0].astype(jnp.uint32)
    else:
        bits, last = words
    index = (last >> 1).astype(jnp.int32 if last.dtype == jnp.uint32 else jnp.int64)
    wide = _widened(key_dtype)
    sign = _sign_bit(_unsigned(wide))
    if jnp.issubdtype(wide, jnp.signedinteger):
        bits ^= sign
    elif jnp.issubdtype(wide, jnp.floating):
        bits = jnp.where(bits >= sign, bits ^ sign, ~bits)
        bits = jnp.where((last & 1).astype(bool), sign, bits)
    return lax.bitcast_convert_type(bits, wide).astype(key_dtype), index


def _widened(dtype: np.dtype) -> np.dtype:
    """The type of 32 or 64 bits that holds all values of a type."""
    if np.dtype(dtype).itemsize >= 4:
        return np.dtype(dtype)
    kinds = ((jnp.floating, np.float32), (jnp.signedinteger, np.int32), (jnp.unsignedinteger, np.uint32))
    return np.dtype(next(wide for kind, wide in kinds if jnp.issubdtype(dtype, kind)))


def _unsigned(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"uint{np.dtype(dtype).itemsize * 8}")


def _sign_bit(unsigned: np.dtype) -> np.ndarray:
    return np.array(1 << (unsigned.itemsize * 8 - 1), unsigned)


def _sortable_bits(keys: Shaped[Array, " n"]) -> tuple[Shaped[Array, " n"], Bool[Array, " n"]]:
    """Unsigned integers in the order of the keys, and which keys are −0.0, which those do not tell from 0.0."""
    wide = keys.astype(_widened(keys.dtype))
    unsigned = _unsigned(wide.dtype)
    sign = _sign_bit(unsigned)
    bits = lax.bitcast_convert_type(wide, unsigned)
    is_negative_zero = jnp.zeros(bits.shape, bool)
    if jnp.issubdtype(wide.dtype, jnp.signedinteger):
        bits ^= sign
    elif jnp.issubdtype(wide.dtype, jnp.floating):
        infinity = np.array(np.inf, wide.dtype).view(unsigned)
        magnitude = bits & ~sign
        is_negative_zero = bits == sign
        # One NaN for all, positive, so that it comes after infinity and only the index orders them.
        bits = jnp.where(magnitude > infinity, np.array(np.nan, wide.dtype).view(unsigned) & ~sign, bits)
        bits = jnp.where(is_negative_zero, 0, bits)
        bits = jnp.where(bits >= sign, ~bits, bits | sign)
    return bits, is_negative_zero
