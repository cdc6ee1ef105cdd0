"""Held-out samples, chosen by the hash of their content."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen.data.samples import Sample, describe_fields, num_samples_of, to_tokens
from jvarlen.data.tokens import Subset
from jvarlen.planning.lengths import DataSource

__all__ = ["HELD_OUT", "Split", "sample_hash", "split_held_out"]

HELD_OUT = "held_out"  # the evaluation set that is taken from the data
_HASH_BITS = 62


class Split(NamedTuple):
    """Two datasets that share no sample.

    Attributes:
      train: the samples to train on.
      held_out: the samples that are never trained on.
    """

    train: DataSource
    held_out: DataSource


def split_held_out(dataset: DataSource, fraction: float) -> Split:
    """Holds samples out by the hash of their content, so that the same text is always on the same side.

    The same tokens have the same hash in any container and dtype, except uint8, which stands for the bytes of a text.

    Args:
      dataset: the samples to split, each as `to_tokens` takes it.
      fraction: the share of samples to hold out, between 0 and 1. However few samples there are, at least one is on
        each side: that of the least hash is held out, or that of the greatest trained on.

    Returns:
      `Split(train, held_out)`, two `Subset`s; each keeps the order of the dataset.

    Raises:
      ValueError: `fraction` is not between 0 and 1, all samples are alike, or a sample does not consist of tokens.
    """
    if not 0 < fraction < 1:
        raise UserError(f"the held-out fraction must lie between 0 and 1, not {fraction}")
    if hasattr(dataset, "sample_hashes"):
        hashes: Int64[np.ndarray, " N"] = dataset.sample_hashes
    else:
        hashes = np.zeros(num_samples_of(dataset), np.int64)
        for sample_id in range(len(dataset)):
            raise_if_interrupted()
            hashes[sample_id] = sample_hash(dataset[sample_id])
    shares = hashes / 2**_HASH_BITS
    if not len(shares) or shares.min() == shares.max():
        alike = " that are all alike" if len(shares) > 1 else ""
        raise UserError(
            f"there must be two different samples at least to hold one out from training, not {len(shares):,}{alike}"
        )
    is_held_out = shares < fraction
    if not is_held_out.any():
        is_held_out = shares == shares.min()
    elif is_held_out.all():
        is_held_out = shares < shares.max()
    return Split(Subset(dataset, np.flatnonzero(~is_held_out)), Subset(dataset, np.flatnonzero(is_held_out)))


def sample_hash(sample: Sample) -> int:
    """A hash of the tokens of a sample in any container: the first 62 bits of SHA-256 of bytes, or of int64."""
    if described := describe_fields(sample):
        raise UserError(f"split_held_out takes samples of tokens, not {described}: divide them, Split(train, held_out)")
    tokens = to_tokens(sample)
    content = tokens.astype(np.uint8 if tokens.dtype == np.uint8 else "<i8", copy=False).tobytes()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> (64 - _HASH_BITS)
