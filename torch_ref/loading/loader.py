"""Loads the batches of one replica, step by step, with torch's DataLoader."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset

from torch_ref.checks import check_integer, known_keywords
from torch_ref.loading.batch import AnyBatch, AnyStep, StepBatch
from torch_ref.loading.collate import Collator, Placed
from torch_ref.loading.fields import FieldSpec, read_samples
from torch_ref.loading.sampler import share_of
from torch_ref.planning.plan import Plan

__all__ = ["SampleSource", "load"]


class SampleSource(Protocol):
    """A dataset that `load` reads, whose samples are as described there."""

    def __getitem__(self, index: int, /) -> Any:
        """Return sample `index`."""


class _Steps(Dataset[AnyStep]):
    """The steps of a plan as a dataset of batches, so that a DataLoader worker prepares whole steps."""

    def __init__(self, plan: Plan, dataset: SampleSource, share: slice, collator: Collator, *, repeats: bool) -> None:
        self._plan, self._dataset, self._share, self._collator, self._repeats = plan, dataset, share, collator, repeats

    def __getitem__(self, step: int) -> AnyStep:
        groups = [self._read(group) for group in self._plan.groups(step)]
        return StepBatch(groups, float(self._plan.num_sequences[step])) if self._plan.has_many_groups else groups[0]

    def _read(self, group: int) -> AnyBatch:
        plan = self._plan
        bucket = plan.buckets.shapes[plan.group_bucket[group]]
        arrays = [plan.rows(group), plan.chunks(group), plan.ends(group)]
        of_group = [values for values in arrays if values is not None]
        if plan.row_offsets is None:
            of_group = [values[..., None] for values in of_group]
        is_real = of_group[0][self._share][..., 0] >= 0
        placed = [values[self._share].copy() for values in of_group]
        if self._repeats:
            for values, of_all in zip(placed, of_group, strict=True):
                values[~is_real] = of_all[0, 0]
        ids = placed[0][placed[0] >= 0].tolist()
        read = read_samples(self._dataset, ids)
        return self._collator.batch(
            bucket,
            Placed(placed[0], is_real, [read[i] for i in ids], *placed[1:]),
            int(plan.group_offsets[group + 1] - plan.group_offsets[group]),
            int(plan.group_tokens[group]) if len(is_real) == plan.num_microbatches else None,
        )


@known_keywords
def load(
    plan: Plan,
    dataset: SampleSource,
    *,
    rank: int = 0,
    num_replicas: int = 1,
    start_step: int = 0,
    num_workers: int = 0,
    fields: Mapping[str, FieldSpec] | None = None,
    padding_rows: str = "zeros",
) -> DataLoader[Any]:
    """Read a replica's batches in the plan's order.

    Args:
        plan: the plan; M must be a multiple of `num_replicas`.
        dataset: sample i is `dataset[i]`: 1-D integers (uint8, say) as long as they were for the plan; or
            `WeightedTokens`, whose weights go into the batch; in plans of two lengths a pair of such, (source, target).
            Or a dict or dataclass of fields: arrays, tensors, lists or numbers. `__getitems__`, if there is one, reads
            the samples of a step at once.
        rank: this replica, 0 <= rank < num_replicas.
        num_replicas: how many replicas share each step.
        start_step: the first step to read, 0 <= start_step <= num_steps; where a run stopped, say.
        num_workers: processes that read ahead; 0 reads in this one.
        fields: of samples with fields, which of their leading axes have the sample's length: "length" for [l, ...],
            which is padded or packed; "length length" for [l, l, ...], which packed rows cannot hold; "row" for all
            others, which are stacked. In plans of two lengths "source" and "target" take the place of "length"; in
            plans of more, or of two, as many words of your own, which name the lengths in the order in which they come:
            "frames height width" is padded to [m, B, T, T, T, ...], with the tensors `frames_lengths` and so on. Words
            in another order are found only where a bucket does not hold the samples so. ("length", -100) gives the
            value of padding, too, else 0. In "length of length", or "target of source", values are positions along the
            last length of their sample, >= 0 and below it or equal to a negative padding value; batches have positions
            in the row, int64, and by default the length of the bucket in padding. Fields that are not named are left
            out, but for `weights`. None: all fields, their axes as they vary among up to 18 samples; for plans of one
            length.
        padding_rows: "zeros", or the padding values of fields; or "repeat": the first row of the group again, with
            weight 0.

    Returns:
        An iterable of `Batch`es with m = M / num_replicas, one for each step from `start_step`; of `PairBatch`es for
        pairs; of `StepBatch`es of such where steps have several groups; or of plain dicts of tensors for samples with
        fields. These hold the fields, [m, B, T, ...], [m, B, T, T, ...] or [m, B, ...] ([m, B, P, ...] in packed rows),
        and the tensors of a `Batch` or `PairBatch` but for the tokens, and, of packed rows, the lengths. A field
        `weights`, one number a token (of the target) or one a sample, is the loss weights, named in `fields` or not;
        samples without it have 1. Dtypes stay; Python's floats get torch's default one, and uint16, uint32 and uint64
        become int64.

    Raises:
        ValueError: if an argument is out of its range, or `num_replicas` does not divide M; while iterating, with the
            first offenders, if samples are longer than their bucket (unless the plan truncates and the bucket is the
            longest) or the samples of a whole step not as long as planned, if their fields are not alike or have names
            of a batch's tensors, if positions are not in the part of their sample that a row holds, if an integer field
            without a padding value holds -100, or if the axes of fields cannot be inferred.
    """
    start_step = check_integer("start_step", start_step, minimum=0, maximum=plan.num_steps)
    num_workers = check_integer("num_workers", num_workers, minimum=0)
    if padding_rows not in ("zeros", "repeat"):
        raise ValueError(f'padding_rows must be "zeros" or "repeat", got {padding_rows!r}')
    if not hasattr(dataset, "__getitem__"):
        raise ValueError(f"samples are read by their ids, which {type(dataset).__name__} lacks: make a list of them")
    share, collator = share_of(plan, rank, num_replicas), Collator(plan, dataset, fields)
    steps = _Steps(plan, dataset, share, collator, repeats=padding_rows == "repeat")
    return DataLoader(steps, batch_size=None, sampler=range(start_step, plan.num_steps), num_workers=num_workers)
