"""Finds the fields of samples, and which of their axes have a sample's length, from arguments or a few samples."""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
import numpy.typing as npt

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import is_numeric
from jvarlen._common.types import Array
from jvarlen.batches.fields import (
    LENGTH_NAMES,
    RESERVED_NAMES,
    WEIGHTS,
    Field,
    FieldAxes,
    Fields,
    ParsedAxes,
    names_of_lengths,
    parse_axes,
)  # fmt: skip
from jvarlen.data.samples import AnyDataset, Sample, describe_fields, has_fields, is_named_tuple, named_values
from jvarlen.loading.reading import only_iterates
from jvarlen.planning.steps import PlannedSteps

__all__ = ["find_fields", "find_fields_among", "find_fields_of_plan", "spread_over"]

_MOST_ITERATED = 16  # samples of a dataset that can only be iterated
_NUM_SPREAD = 16  # samples that are read, so that a few bad ones among them do not decide


def find_fields(
    samples: Sequence[Sample],
    axes: FieldAxes | None,
    num_lengths: int,
    *,
    is_packed: bool = False,
    lengths: npt.ArrayLike | None = None,
) -> Fields | None:
    """The fields of samples, None of tokens; two lengths must be known. Raises ValueError where they are unclear."""
    if axes is not None and not (isinstance(axes, Mapping) and all(isinstance(name, str) for name in axes)):
        raise UserError(f"fields= must map names to axes, such as {{'tokens': 'length'}}, not be {axes!r}")
    if axes is None and not _has_fields(samples[0], axes, num_lengths):
        return None
    words, held = names_of_lengths(axes, num_lengths), [tuple(named_values(sample)) for sample in samples]
    has_own_words = words not in LENGTH_NAMES
    if is_packed and has_own_words:
        raise UserError(f"packed pairs have the lengths 'source' and 'target': use these words, not {_quote(words)}")
    ((has, _),) = collections.Counter(names for names in held if names).most_common(1) or [((), 0)]
    if not has:
        raise UserError(
            f"fields= are those of mappings, dataclasses or named tuples, not of a {type(samples[0]).__name__}"
        )
    names = [name for name in (has if axes is None else axes) if name != WEIGHTS]
    if reserved := [name for name in names if name in RESERVED_NAMES or (has_own_words and name.endswith("_lengths"))]:
        raise UserError(
            f"every batch has arrays of the names {_quote(reserved)}, so no field can: rename them"
            + ", or give fields={name: axes, …} without them" * (axes is None)
        )
    if missing := [name for name in axes or () if all(name not in each for each in held)]:
        raise UserError(f"samples have no field {_quote(missing)}, but {_quote(has)}")
    found, lengths = _arrays(names, samples, lengths)
    if axes is None:
        parsed = {name: ParsedAxes(sides) for name, sides in _sides_by_shapes(found, words, lengths).items()}
    else:
        parsed = {name: parse_axes(name, axes[name], words) for name in names}
    weights = _weights(samples, axes, words)
    fields = tuple(_field(name, arrays, parsed[name]) for name, arrays in found.items())
    if has_own_words:
        fields = tuple(field._replace(length_names=words) for field in fields)
    if without := [word for side, word in enumerate(words) if all(side not in field.sides for field in fields)]:
        raise UserError(f"no field has the axis {_quote(without)}: {_shapes_of(found)}")
    if is_packed and (squares := [field.name for field in fields if len(field.sides) > 1]):
        raise UserError(
            f"{_quote(squares)} cannot be packed, having two axes of lengths: plan without packing, or give fields= "
            "without them"
        )
    predicted = "target_tokens" if words == LENGTH_NAMES[1] else "tokens"
    if len(words) > 1 and any(field.name == predicted and field.sides != (len(words) - 1,) for field in fields):
        raise UserError(
            f"{predicted} are tokens of the {words[-1]}, as next_token_targets reads them: rename this field"
        )
    return (*fields, *weights)


def find_fields_of_plan(
    plan: PlannedSteps, dataset: AnyDataset, axes: FieldAxes | None, lengths: npt.ArrayLike | None, start_step: int = 0
) -> tuple[Fields | None, AnyDataset]:
    """The fields, None for samples of tokens, and the dataset: an iterator gets back the samples that were taken."""
    if lengths is not None and plan.largest_id >= len(lengths):  # type: ignore[arg-type]
        raise UserError(f"the plan holds sample {plan.largest_id}, and lengths are of {len(lengths)} samples")  # type: ignore[arg-type]
    num_lengths, samples = len(plan.buckets.shapes[0].lengths), dataset
    if only_iterates(dataset):
        samples = list(itertools.islice(dataset, _MOST_ITERATED))
        ids: Iterable[int] = range(len(samples))
        if isinstance(dataset, Iterator):
            dataset = itertools.chain(samples, dataset)
    else:
        to_come = plan.local_rows(plan.groups(min(start_step, plan.num_steps - 1))[0]).ids
        for _, sample in _readable(dataset, to_come[to_come >= 0][: axes is None].tolist()):
            if not _has_fields(sample, axes, num_lengths):  # of tokens, no sample of earlier steps is read
                return None, dataset
        ids = _different_samples(plan, lengths)
    fields = find_fields_among(samples, ids, axes, num_lengths, is_packed=plan.is_packed, lengths=lengths)
    if plan.num_tokens.sum() == plan.num_samples * (num_lengths if plan.size == "sum" else 1):
        _check_rows(fields or ())
    return fields, dataset


def find_fields_among(
    dataset: AnyDataset,
    ids: Iterable[int],
    axes: FieldAxes | None,
    num_lengths: int,
    *,
    is_packed: bool,
    lengths: npt.ArrayLike | None = None,
) -> Fields | None:
    """`find_fields` of the readable ones of these samples; None if axes are not given and the first has no fields."""
    samples: dict[int, Sample] = {}
    for i, sample in _readable(dataset, dict.fromkeys(ids)):
        samples[i] = sample
        if axes is None and not _has_fields(sample, axes, num_lengths):
            break
    if not samples:
        return None
    known = None if lengths is None else np.asarray(lengths)[list(samples)]
    return find_fields([*samples.values()], axes, num_lengths, is_packed=is_packed, lengths=known)


def _check_rows(fields: Fields) -> None:
    """Raises ValueError if all fields of a length, which is 1 in all samples, have their tokens along the next axis."""
    with_length = [field for field in fields if field.sides and field.name != WEIGHTS]
    if with_length and all(field.shape[:1] not in ((), (1,)) and "int" in field.dtype for field in with_length):
        raise UserError(
            f"all samples have length 1 in the plan, and {_quote(field.name for field in with_length)} a second axis "
            f"of size {with_length[0].shape[0]}: let samples hold the only row, {with_length[0].name}[0], and plan "
            "with its length"
        )


def _readable(dataset: AnyDataset, ids: Iterable[int]) -> Iterator[tuple[int, Sample]]:
    """Reads these samples; returns those that can be read, with their ids."""
    for i in ids:
        try:
            sample = dataset[i]
        except MemoryError:
            raise
        except (Exception, SystemExit):  # its step names the sample
            continue
        yield i, sample


def _different_samples(plan: PlannedSteps, lengths: npt.ArrayLike | None) -> Iterator[int]:
    """Samples of lengths as different as any, and some of all parts of the plan, the same on all processes."""
    if lengths is not None:
        planned = np.asarray(lengths)[: plan.largest_id + 1].reshape(plan.largest_id + 1, -1)
        for key in (*planned.T, planned[:, 0] - planned[:, -1]):
            yield from (key.argmin().item(), key.argmax().item())
    for k in np.unique(plan.group_bucket)[[0, -1]].tolist():
        for group in np.flatnonzero(plan.group_bucket == k)[[0, -1]].tolist():
            ids = plan.local_rows(group).ids
            yield from ids[ids >= 0][[0, -1]].tolist()
    groups = spread_over(plan.num_groups)
    for group in groups:
        ids = plan.local_rows(group).ids
        ids = ids[ids >= 0]
        yield from ids[spread_over(len(ids), -(-_NUM_SPREAD // len(groups)))].tolist()


def spread_over(size: int, most: int = _NUM_SPREAD) -> list[int]:
    """At most `most` of the integers below a size, evenly: enough samples that some bad ones are not the majority."""
    return np.unique(np.linspace(0, size, most, endpoint=False, dtype=np.int64)).tolist() if size else []


def _has_fields(sample: Sample, axes: FieldAxes | None, num_lengths: int) -> bool:
    """Whether a sample has named fields; of two lengths, a named tuple of two arrays is a pair if no axes are given."""
    return has_fields(sample) or (
        is_named_tuple(sample)
        and describe_fields(sample) is not None
        and (num_lengths == 1 or len(sample) != 2 or axes is not None)
    )


def _arrays(
    names: Sequence[str], samples: Sequence[Sample], lengths: npt.ArrayLike | None
) -> tuple[dict[str, list[np.ndarray]], npt.ArrayLike | None]:
    """The fields of all samples that have them, and the lengths of these; raises ValueError if none has."""
    rows: dict[int, dict[str, np.ndarray]] = {}
    errors = []
    for place, sample in enumerate(samples):
        try:
            rows[place] = {name: _array(name, named_values(sample)) for name in names}
        except UserError as error:  # its step names the sample
            errors.append(error)
    if not rows:
        raise errors[0]
    found = {name: [row[name] for row in rows.values()] for name in names}
    for arrays in found.values():  # an empty list has no type, and may stand for more axes
        sized = [array for array in arrays if array.shape != (0,)]
        arrays[:] = [array if array.shape != (0,) or not sized else sized[0][:0] for array in arrays]
    return found, None if lengths is None else np.asarray(lengths)[list(rows)]


def _array(name: str, values: Mapping[str, Array]) -> np.ndarray:
    try:
        array = np.asarray(value := values[name])
    except (LookupError, AttributeError):
        raise UserError(f"the field {name!r} is not in all samples") from None
    except (TypeError, ValueError) as error:
        dtype = str(getattr(value, "dtype", type(value).__name__))
        reason = "give tensors as .float()" if dtype == "torch.bfloat16" else error
        raise UserError(f"NumPy makes no array of the field {name!r}, {dtype}: {reason}") from None
    if not is_numeric(array.dtype):
        kind = {"U": "text", "S": "bytes", "O": "objects"}.get(array.dtype.kind, array.dtype)
        advice = "rename it" if name == WEIGHTS else "give fields={name: axes, …} without it"
        raise UserError(f"the field {name!r} holds {kind}, no numbers: {advice}")
    return array


def _weights(samples: Sequence[Sample], axes: FieldAxes | None, words: tuple[str, ...]) -> Fields:
    """The field of loss weights, if `axes` names it; raises ValueError if they cannot be weights of a loss.

    It is read from all samples that have it, named or not: mixtures add it.
    """
    word, said = words[-1], (axes or {}).get(WEIGHTS)
    weighted = [sample for sample in samples if WEIGHTS in named_values(sample)]
    found = _arrays([WEIGHTS], weighted, None)[0] if weighted else {}
    if said not in (None, "row", word) or (found and all(array.ndim > 1 for array in found[WEIGHTS])):
        raise UserError(
            f"weights are those of the loss: one a sample, 'row', or one along {word!r}; "
            + (f"rename the others: {_shapes_of(found)}" if said in (None, "row", word) else f"not {said!r}")
        )
    return () if said is None else (Field(WEIGHTS, (len(words) - 1,), (), "float32"),)


def _field(name: str, arrays: list[np.ndarray], parsed: ParsedAxes) -> Field:
    """The field of these arrays; raises ValueError if they differ beyond the axes of lengths."""
    sides, padding, positions_of = parsed
    counts = collections.Counter(array.shape[len(sides) :] for array in arrays if array.ndim >= len(sides))
    ((shape, most),) = counts.most_common(1) or [((), 0)]
    if 2 * most <= len(arrays):
        raise UserError(
            f"the field {name!r} has {_quote(dict.fromkeys(array.shape for array in arrays))}: only "
            f"{f'its first {len(sides)} axes' if sides else 'the first axes of fields'} can differ between samples"
        )
    types = [array.dtype for array in arrays if array.size] or [array.dtype for array in arrays]
    num_of_kind = collections.Counter(dtype.kind.replace("u", "i") for dtype in types)
    least = min(2, max(num_of_kind.values()))  # so that no single odd sample decides
    types = [dtype for dtype in types if num_of_kind[dtype.kind.replace("u", "i")] >= least]
    dtype = jax.dtypes.canonicalize_dtype(np.result_type(*types))
    if positions_of is not None:
        if dtype.kind not in "iu":
            raise UserError(f"the field {name!r} holds {dtype.name}, and positions in a sample are integers")
        dtype = np.dtype(np.int32)
    if padding is not None and not _holds(dtype, padding):
        raise UserError(f"the padding value {padding!r} of the field {name!r} is none of its dtype, {dtype.name}")
    return Field(name, sides, shape, dtype.name, padding, positions_of)


def _holds(dtype: np.dtype, value: float) -> bool:
    """Whether a number is one of a dtype; rounded where these are floats."""
    if dtype.kind in "fcV":  # V: bfloat16 and the like
        with np.errstate(over="ignore"):
            return bool(np.isfinite(np.asarray(value).astype(dtype)) or not np.isfinite(value))
    limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return limits[0] <= value <= limits[1] and value == int(value)


def _sides_by_shapes(
    found: dict[str, list[np.ndarray]], words: tuple[str, ...], lengths: npt.ArrayLike | None
) -> dict[str, tuple[int, ...]]:
    """For each field, which of its first axes have which length: those that differ between samples, as lengths do."""
    sizes = {
        name: [tuple(array.shape[axis : axis + 1] for array in arrays) for axis in range(2)]
        for name, arrays in found.items()
    }
    varying = [of_axes[0] for of_axes in sizes.values() if len(set(of_axes[0])) > 1]
    say = f"give fields={{name: axes, …}}, of {_quote([*words, 'row'])}"
    if len(words) > 1 and lengths is None:
        raise UserError(f"give lengths=, which decide the axes of fields, or {say}; {_shapes_of(found)}")
    if not varying:
        raise UserError(
            f"samples of one length alone do not show which axes of fields have it: {say}; {_shapes_of(found)}"
        )
    sides = np.reshape([] if lengths is None else lengths, (-1, len(words))).T.tolist()
    known = [tuple((size,) for size in side) for side in sides]
    if len(words) == 1:  # from the samples themselves: reading them shows what differs from the plan
        known = [max(varying, key=lambda of_axis: sum(map(operator.eq, of_axis, known[0])))]
    found_sides: dict[str, tuple[int, ...]] = {}
    unclear = []
    for name, of_axes in sizes.items():
        first, second = (  # the lengths that an axis has, and −1 if it has one size
            [side for side, of_side in enumerate(known) if of_axis == of_side] + [-1] * (len(set(of_axis)) == 1)
            for of_axis in of_axes
        )
        if first == [-1]:
            found_sides[name] = ()
        elif len(first) == 1 and (-1 in second or len(second) == 1):  # a size that is a length of all could be either
            found_sides[name] = (*first, *(second if -1 not in second else ()))
        else:
            unclear.append(name)
    if unclear:
        raise UserError(f"which length {_quote(unclear)} have is unclear: {say}; {_shapes_of(found)}")
    return found_sides


def _quote(values: Iterable[object]) -> str:
    return list_first(repr(value) if isinstance(value, str) else str(value) for value in values)


def _shapes_of(found: dict[str, list[np.ndarray]]) -> str:
    """The fields with shapes that samples have."""
    texts = (f"{name} {_quote(dict.fromkeys(array.shape for array in arrays))}" for name, arrays in found.items())
    return f"found {list_first(texts, '; ')}"
