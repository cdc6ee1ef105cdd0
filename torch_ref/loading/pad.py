"""Batches of the bucket's shape from anybody's collator: rows, and the length, are padded after it ran."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from torch_ref.checks import MAX_LISTED, known_keywords
from torch_ref.loading.planned import PlannedRow
from torch_ref.loading.varlen import varlen_of
from torch_ref.planning.plan import Plan

__all__ = ["pad_to_bucket"]

_LABELS = ("labels", "label")
_OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask")
_WITH_ZEROS = (*_OF_TOKENS, "decoder_input_ids", "decoder_attention_mask")  # without a word in `pad`
_COUNTS = ("num_sequences", "num_tokens", "num_microbatches")
_VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_STARTS = "where segments start"
_ALSO = ("is_real", "ids", *_COUNTS, *_VARLEN)


@known_keywords
def pad_to_bucket(
    collator: Callable[[list[Any]], Any],
    plan: Plan,
    *,
    pad: Mapping[str | int, float | tuple[str, float]] | None = None,
    also: Iterable[str] = (),
) -> Callable[[Sequence[PlannedRow]], Any]:
    """Return a `collate_fn` for a `PlannedDataset` whose batches all have the shape of their bucket.

    The collator gets the samples of a microbatch, and what it returns is padded: axes of the length to T, and rows to
    B. An empty microbatch is one of padding rows alone; the collator gets one sample for it, of which nothing remains.
    torch's `default_collate`, which stacks, gets the samples one by one, and so does every collator of packed rows and
    of plans that cut beginnings off.

    Axes of the length are those, after the first, that are as long as the second axis of `input_ids`, or without it of
    all tensors that have one. Every tensor with a second axis has one of the length, or `pad` says "row". In plans of
    two lengths, `labels` and names that begin with `decoder_` or `target` have the second one.

    Rows of padding have `attention_mask` 0 and the padding value elsewhere. Rows that a sampler of
    `padding_rows="repeat"` repeats keep their values, but for `labels`, and tensors whose value in `pad` is negative or
    NaN: targets that losses leave out.

    The samples of a packed row follow each other along T. They have `position_ids`, 0 at the start of each sample and
    of padding, and no `attention_mask`: with these alone, and `use_cache=False` as Trainer sets it, causal models of
    transformers keep samples apart. The first of each sample's `labels` is padding, as a loss that shifts labels
    predicts it from the sample before; `pad={"labels": ("token", -100)}` keeps it, for a loss that compares each
    token with its own label. What has no axis of the length becomes [B, P, ...].

    Args:
        collator: of a list of samples: `default_collate`, one of transformers, or your own. It returns a dict, tuple or
            list of tensors, or one tensor, [n, ...] for n samples.
        plan: a plan of the sampler, of any epoch.
        pad: the padding value of tensors, by name, or by place where the collator returns no dict; ("row", value) for
            one without axes of the length; ("token", value) where the second axis is the length and no other is. Where
            it is not given: of `labels`, the collator's `label_pad_token_id`; of `input_ids`, its tokenizer's
            `pad_token_id`; 0 of `attention_mask`, `token_type_ids`, `position_ids`, `special_tokens_mask`,
            `decoder_input_ids`, `decoder_attention_mask`, and of a tensor that alone has a second axis. It must be
            given of all others. Padding is on the tokenizer's `padding_side`, on the right by default.
        also: what to add to each batch: "is_real" bool[B]; "ids" int64[B], -1 for padding, or [B, P] of packed rows;
            real samples and tokens of the whole step, over all replicas and microbatches, "num_sequences" and
            "num_tokens", and its "num_microbatches"; of packed rows "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q"
            and "max_length_k", as `varlen` gives them.

    Returns:
        A function of the rows of a microbatch. It raises ValueError, with what to do, if a tensor has no padding value,
        `pad` names one that is not there, an integer tensor that gets 0 holds -100, the collator returns something else
        than tensors of one row a sample, samples are longer than their bucket (unless the plan truncates and it is the
        longest), or if a tensor has no axis of the length, or others than in a batch before.

    Raises:
        ValueError: if `also` has another name, or one of packed rows where there are none; for samples of more than two
            lengths, and packed rows of two.

    Example:
        >>> from torch_ref import PlanBatchSampler, PlannedDataset, make_plan
        >>> plan = make_plan([1, 3], [(2, 4)], order="length")
        >>> sampler = PlanBatchSampler(plan)
        >>> samples = [{"x": torch.tensor([7]), "labels": 1}, {"x": torch.tensor([5, 6, 7]), "labels": 0}]
        >>> collate = pad_to_bucket(default_collate, plan, pad={"labels": -100})
        >>> loader = torch.utils.data.DataLoader(
        ...     PlannedDataset(sampler, samples), batch_sampler=sampler, collate_fn=collate
        ... )
        >>> [batch["x"].tolist() for batch in loader]
        [[[7, 0, 0, 0], [5, 6, 7, 0]]]
    """
    num_lengths, is_packed = len(plan.buckets.shapes[0]) - 1, plan.row_offsets is not None
    if num_lengths > 2 or (is_packed and num_lengths > 1):
        kind = "packed rows of two lengths" if is_packed else f"samples of {num_lengths} lengths"
        raise ValueError(f"pad_to_bucket takes no {kind}: use PlannedDataset(..., fields=...).collate")
    also = tuple(also)
    if unknown := [name for name in also if name not in (_ALSO if is_packed else _ALSO[: -len(_VARLEN)])]:
        raise ValueError(f"also has {', '.join(map(repr, unknown))}, batches can have {', '.join(_ALSO)}")
    specs = {name: spec if isinstance(spec, tuple) else ("", spec) for name, spec in (pad or {}).items()}
    if wrong := [name for name, spec in specs.items() if len(spec) != 2 or spec[0] not in ("", "row", "token")]:
        raise ValueError(f'pad must have numbers, ("row", number) or ("token", number) as values: wrong for {wrong}')
    return _PadToBucket(collator, plan, specs, also)


class _Collated(NamedTuple):
    """What a collator returned, and its tensors by name or place, [n, ...] for n samples."""

    returned: Any
    tensors: dict[str | int, Tensor]


class _PadToBucket:
    """The `collate_fn`: picklable, and aware of which axes of each tensor are the length."""

    def __init__(
        self,
        collator: Any,
        plan: Plan,
        specs: dict[str | int, tuple[str, float]],
        also: tuple[str, ...],
    ) -> None:
        told = {name: value for name, (_, value) in specs.items()}
        self._axes: dict[str | int, set[int]] = {
            name: {"row": set[int](), "token": {1}}[kind] for name, (kind, _) in specs.items() if kind
        }
        self._aligned = {name for name, (kind, _) in specs.items() if kind == "token"}
        tokenizer = getattr(collator, "tokenizer", None)
        found: dict[str | int, Any] = {
            "labels": getattr(collator, "label_pad_token_id", None),
            "input_ids": getattr(tokenizer, "pad_token_id", None),
        }
        self._collator, self._told, self._also = collator, told, also
        self._values = {name: value for name, value in found.items() if value is not None} | told
        self._values["attention_mask"] = 0
        self._is_left = getattr(tokenizer, "padding_side", "right") == "left"
        self._is_packed = plan.row_offsets is not None
        self._shapes, self._samples_per_row = plan.buckets.shapes, plan.samples_per_row
        self._truncates = plan.overlong == "truncate"

    def __call__(self, rows: Sequence[PlannedRow]) -> Any:
        if not isinstance(rows[0], PlannedRow):
            raise ValueError("pad_to_bucket collates rows of a PlannedDataset: PlannedDataset(sampler, dataset)")
        if self._is_packed:
            collated = [self._collate([sample]) for row in rows for sample in row.sample]
            parts = iter(collated)
            made = [self._pack([next(parts).tensors for _ in row.sample], row) for row in rows]
        else:
            alone = self._collator is default_collate or rows[0].windows is not None
            shares = [[row] for row in rows] if alone else [rows]
            collated = [self._collate([row.sample for row in share]) for share in shares]
            made = [self._pad_lengths(part.tensors, share) for part, share in zip(collated, shares, strict=True)]
        batch = {name: self._fill_rows(name, _join(name, [part[name] for part in made]), rows) for name in made[0]}
        returned = collated[0].returned
        if self._is_packed or self._also:
            if not isinstance(returned, Mapping):
                raise ValueError("packed rows, and also=, add tensors by name: the collator must return a dict")
            batch = self._add(rows, batch)
        if isinstance(returned, Mapping):
            return batch
        if isinstance(returned, Tensor):
            return batch[0]
        return type(returned)(*batch.values()) if hasattr(returned, "_fields") else type(returned)(batch.values())

    def _collate(self, samples: list[Any]) -> _Collated:
        returned = self._collator(samples)
        tensors = {0: returned} if isinstance(returned, Tensor) else returned
        tensors = dict(tensors.items() if isinstance(tensors, Mapping) else enumerate(tensors))
        for name, value in tensors.items():
            if not isinstance(value, Tensor) or not value.ndim or len(value) != len(samples):
                found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"the collator must return tensors [n, ...] of n samples, and of {len(samples)} returned {name!r}: "
                    f"{found}. Leave out of the samples what has no tensor, and let it flatten nothing"
                )
        self._check_names(tensors)
        for name, value in tensors.items():
            self._check_value(name, value)
        return _Collated(returned, tensors)

    def _check_names(self, tensors: dict[str | int, Tensor]) -> None:
        """Raise ValueError if `pad` names a tensor that is not there, or does not name one that it must."""
        if unknown := [name for name in self._told if name not in tensors]:
            raise ValueError(f"pad names {unknown}, and the collator returned {[*tensors]}")
        sequences = [name for name in self._sizes(tensors) if name not in _LABELS]
        alone = sequences if len(sequences) == 1 else []
        if missing := [name for name in tensors if name not in (*self._values, *_WITH_ZEROS, *alone)]:
            raise ValueError(
                f"{', '.join(map(str, missing))} must have a padding value: pad={{{missing[0]!r}: -100}} for targets "
                f"that the loss leaves out, pad={{{missing[0]!r}: 0}} for what is no target, and ('row', number) for "
                'what has no axis of the length. also=("is_real",) says which rows hold a sample'
            )

    def _sizes(self, tensors: dict[str | int, Tensor]) -> dict[str | int, int]:
        """Return the size of the second axis of each tensor that has one of the length."""
        return {name: value.shape[1] for name, value in tensors.items() if value.ndim > 1 and self._axes.get(name, {1})}

    def _check_value(self, name: str | int, value: Tensor) -> None:
        """Raise ValueError if the padding value is wrong."""
        if name in self._values:
            padding, limits = self._values[name], None if value.is_floating_point() else _limits(value.dtype)
            if limits and not (limits[0] <= padding <= limits[1] and padding % 1 == 0):
                raise ValueError(f"{name} is {value.dtype}, which holds no padding value of {padding}")
            return
        if not value.is_floating_point() and bool((value == -100).any()):
            raise ValueError(
                f"{name} holds -100, and would be padded with 0: give its padding value, pad={{{name!r}: -100}}"
            )

    def _lengths(self, tensors: dict[str | int, Tensor]) -> list[int]:
        """Return the size of each length of these samples, as padded by the collator."""
        found: list[int] = []
        for side in range(len(self._shapes[0]) - 1):
            sizes = {name: size for name, size in self._sizes(tensors).items() if self._side(name) == side}
            if not sizes:
                raise ValueError(
                    f"the collator returned no tensor [n, length] of {('the source', 'the target')[side]}"
                    f"{self._names_of_targets()}"
                )
            aligned = [size for name, size in sizes.items() if name in self._aligned]
            known = [sizes["input_ids"]] if "input_ids" in sizes else aligned or sizes.values()
            if len({*known}) > 1:
                raise ValueError(
                    f"second axes have sizes {sizes}, and one alone is the length: name each tensor without it, "
                    f"pad={{{next(iter(sizes))!r}: ('row', 0)}} if it is {next(iter(sizes))}{self._names_of_targets()}"
                )
            found.extend({*known})
        return found

    def _side(self, name: str | int) -> int:
        """Return which length a tensor has."""
        is_target = str(name) in _LABELS or str(name).startswith(("decoder_", "target"))
        return int(is_target and len(self._shapes[0]) > 2)

    def _names_of_targets(self) -> str:
        """Return what to do about a tensor of the second length, in plans of two, else nothing."""
        if len(self._shapes[0]) == 2:
            return ""
        return (
            "; the second length is that of labels and of names that begin with decoder_ or target: rename what has it,"
            " or take PlannedDataset(..., fields=) and its collate, which let you name both lengths"
        )

    def _length_axes(self, name: str | int, value: Tensor, length: int) -> set[int]:
        """Return the axes of the length: those that are as long, and were in all batches so far."""
        found = {axis for axis in range(1, value.ndim) if value.shape[axis] == length}
        if value.ndim > 1 and not found and self._axes.get(name, {1}):
            raise ValueError(
                f"{name!r} is {list(value.shape)} where samples are {length} long: if it has no axis of the length, "
                f"pad={{{name!r}: ('row', {self._values.get(name, 0)})}}"
            )
        known = self._axes.setdefault(name, found)
        if known - found:
            raise ValueError(
                f"{name!r} is {list(value.shape)} where samples are {length} long, and its axes {sorted(known)} are "
                f"the length: if only the second is, pad={{{name!r}: ('token', {self._values.get(name, 0)})}}"
            )
        return known

    def _pad_lengths(self, tensors: dict[str | int, Tensor], rows: Sequence[PlannedRow]) -> dict[str | int, Tensor]:
        """Return tensors whose axes of the length have that of the bucket."""
        bucket, lengths = rows[0].bucket, self._lengths(tensors)
        padded = {}
        for name, value in tensors.items():
            length, limit = lengths[self._side(name)], bucket[1 + self._side(name)]
            for axis in self._length_axes(name, value, length):
                if rows[0].windows is not None:
                    value = _window(value, axis, rows[0].windows[0], self._side(name))
                if value.shape[axis] > limit:
                    value = self._cut(value, axis, limit, rows)
                value = _extend(value, axis, limit, self._values.get(name, 0), left=self._is_left)
            padded[name] = value
        return padded

    def _cut(self, value: Tensor, axis: int, limit: int, rows: Sequence[PlannedRow]) -> Tensor:
        """Return the start of samples that the plan truncates."""
        if self._truncates and rows[0].bucket == self._shapes[-1] and not self._is_left:
            return value.narrow(axis, 0, limit)
        ids = [row.ids for row in rows if row.ids is not None]
        raise ValueError(
            f"the collator returned {value.shape[axis]} positions for a bucket of {limit}, of samples "
            f"{ids[:MAX_LISTED]}: plan with the lengths that it returns (length_multiple= for its pad_to_multiple_of)"
        )

    def _pack(self, samples: list[dict[str | int, Tensor]], row: PlannedRow) -> dict[str | int, Tensor]:
        """Return the samples of a row, [1, l, ...] each, one after the other, and where they and padding start."""
        limit, most = row.bucket[1], self._samples_per_row[self._shapes.index(row.bucket)]
        lengths = [self._lengths(sample)[0] for sample in samples]
        windows = row.windows or [(0, limit if self._truncates else length) for length in lengths]
        sizes = np.array([min(stop, length) - start for (start, stop), length in zip(windows, lengths, strict=True)])
        if sizes.sum() > limit:
            raise ValueError(f"samples {row.ids} have {sizes.tolist()} positions for a row of {limit}: plan with these")
        packed: dict[str | int, Tensor] = {}
        for name in samples[0]:
            value, parts = self._values.get(name, 0), [sample[name] for sample in samples]
            axes = set[int]().union(*map(self._length_axes, repeat(name), parts, lengths))
            if axes - {1}:
                raise ValueError(f"packed rows cannot hold {name!r}, which has two axes of the length")
            if not axes:
                packed[name] = _extend(torch.cat(parts), 0, most, value)[None]
                continue
            joined = torch.cat([part[:, start:stop] for part, (start, stop) in zip(parts, windows, strict=True)], dim=1)
            if name in _LABELS and name not in self._aligned:
                joined[:, sizes.cumsum() - sizes] = value
            packed[name] = _extend(joined, 1, limit, value)
        packed[_STARTS] = torch.zeros(1, limit + 1, dtype=torch.bool)
        packed[_STARTS][0, [0, *sizes.cumsum()]] = True
        packed[_STARTS] = packed[_STARTS][:, :limit]
        return packed

    def _fill_rows(self, name: str | int, value: Tensor, rows: Sequence[PlannedRow]) -> Tensor:
        """Return a tensor [B, ...], with padding in rows that hold no sample."""
        padding = self._values.get(name, 0)
        is_target = name in _LABELS or (name in self._told and not padding >= 0)
        filled = _extend(value, 0, rows[0].bucket.rows, padding)
        for place, row in enumerate(rows):
            if not row.is_real and (row.ids is None or is_target):
                filled[place] = padding
        return filled

    def _add(self, rows: Sequence[PlannedRow], batch: dict[str | int, Tensor]) -> dict[str | int, Any]:
        """Return a batch with what packed rows have, and what `also` names."""
        num_rows, slots = rows[0].bucket.rows, 1
        added: dict[str, Any] = {name: torch.tensor(float(getattr(rows[0], name))) for name in _COUNTS}
        if self._is_packed:
            slots = self._samples_per_row[self._shapes.index(rows[0].bucket)]
            is_start = batch.pop(_STARTS)
            is_start[:, 0] = True
            places = varlen_of(is_start, slots)
            batch.setdefault("position_ids", places.position_ids)
            batch.pop("attention_mask", None)
            added |= dict.fromkeys(_VARLEN[:2], places.cu_seqlens) | dict.fromkeys(_VARLEN[2:], places.max_seqlen)
        ids = torch.full((num_rows, slots), -1)
        for place, row in enumerate(rows):
            if row.is_real:
                held = row.ids if isinstance(row.ids, list) else [row.ids]
                ids[place, : len(held)] = torch.tensor(held)
        added |= {"ids": ids if self._is_packed else ids[:, 0], "is_real": ids[:, 0] >= 0}
        return batch | {name: added[name] for name in self._also}


def _join(name: str | int, parts: list[Tensor]) -> Tensor:
    """Return parts of a batch along its rows."""
    if len(shapes := {tuple(part.shape[1:]) for part in parts}) > 1:
        raise ValueError(
            f"{name!r} has rows of shapes {sorted(shapes)[:MAX_LISTED]} in a microbatch: give a collator that pads it, "
            "or plan with the length of that axis"
        )
    return torch.cat(parts)


def _window(value: Tensor, axis: int, window: tuple[Any, Any], side: int) -> Tensor:
    """Return what the plan keeps of a sample along an axis of one of its lengths."""
    start, stop = (bound[side] if isinstance(bound, Sequence) else bound for bound in window)
    return value.narrow(axis, start, min(stop, value.shape[axis]) - start)


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    """Return the least and the largest number of an integer dtype."""
    return (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _extend(value: Tensor, axis: int, size: int, padding: float, *, left: bool = False) -> Tensor:
    """Return a tensor with an axis of this size, padded at its end or at its start."""
    shape = list(value.shape)
    num_held, shape[axis] = shape[axis], size
    extended = value.new_full(shape, padding)
    extended.narrow(axis, size - num_held if left else 0, num_held).copy_(value)
    return extended
