"""Distributed sample sort over the processes of `torch.distributed`, evenly balanced."""

from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree

from torch_ref.checks import MAX_LISTED, check_integer, known_keywords

__all__ = ["NanRule", "Result", "sample_sort"]

Result = Literal["interleaved", "block"]
NanRule = Literal["raise", "last"]

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BITS = {dtype.itemsize: dtype for dtype in _SIGNED}


class _Place(NamedTuple):
    """The rank of a process in its group, and the size of that."""

    group: Any
    rank: int
    num_processes: int


class _Rows(NamedTuple):
    """A process's keys as integers of the same bits, and the leaves of its payload with their names."""

    bits: Tensor
    dtype: torch.dtype
    leaves: list[Tensor]
    names: list[str]
    spec: pytree.TreeSpec | None


class _Shard(NamedTuple):
    """What a process sends to the others about its rows; all must have the same terms."""

    num_rows: int
    first_nan: list[int]
    num_nan: int
    terms: dict[str, str]


@known_keywords
def sample_sort(
    keys: Tensor,
    *,
    group: "distributed.ProcessGroup | None" = None,
    result: Result = "interleaved",
    oversampling: int = 4,
    nan: NanRule = "raise",
    payload: Any = None,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Any]:
    """Sort the keys of all processes of a group; afterwards each has an even share of them.

    Every process of the group calls it with its keys, however many. A row's index is the number of rows on lower ranks
    plus its position. The order is that of `np.lexsort((index, keys))`: by key, ties by index, -0.0 with 0.0. Without a
    process group, or in one of a single process, nothing is sent.

    With p processes, N rows of w bytes in all (key, index and payload) and k = `oversampling`:

    - A process takes every h-th of its sorted keys as a sample, h = ceil(N / (k * p**2)), with its place; S in all. The
      samples at the ends of p even parts are the splitters: keys with indices, so that equal keys are split as well.
    - At most N / p * (1 + (1 + 1/p) / k) + 1 rows arrive at a process between its splitters, whatever the keys and
      however uneven the shards: there are S / p samples between two splitters, rounded up, of h rows each, and each
      process has fewer than h rows more. So memory is in proportion to a process's rows, N / p and k * p**2.
    - A process that has n rows and sorts m sends n * w + m * w bytes of rows, p * floor(n / h) keys and p**2 integers,
      what it sends to itself included; a payload travels twice. There are 4 + 2 * (2 + number of payload tensors)
      collectives: two to agree on the arguments, one for samples, one for counts, two for each column.

    Where a process dies or fails in between, the others end with the error of their process group, at the latest after
    its timeout (`init_process_group(timeout=...)`). Arguments are compared first, so a bad one on a single process is
    an error on all. The comparison pickles a few strings: processes must trust one another.

    Args:
        keys: integers or floats[n] of at most 64 bits, n >= 0; on the device that the group's backend sends from, which
            is the process's current device where that is CUDA.
        group: the processes; None for the default group.
        result: "interleaved": rank d gets the global ranks d, d + p, d + 2p and so on, so that neighbours in order are
            on neighbouring processes. "block": rank d gets those from d * ceil(N / p) on.
        oversampling: k >= 1, samples a process takes for each process. More even work for more samples; the result does
            not depend on it.
        nan: "raise", or "last": they go to the end, by index.
        payload: tensors [n, ...] that follow their key, one or a tuple, list or dict of them.

    Returns:
        (keys, indices), or (keys, indices, payload) where one was given: this process's share in ascending order, keys
        in their dtype and bits, indices int64. Interleaved, a share is N / p rows rounded up or down; as blocks,
        ceil(N / p) rows until none are left. None of them has a gradient.

    Raises:
        ValueError: on every process, if an argument is bad on any (named by rank), if dtype, kind of device, options
            or the payload's structure differ (with the ranks), or for NaN (by index); on one that is not in the group.

    References:
        H. Shi and J. Schaeffer, "Parallel Sorting by Regular Sampling", Journal of Parallel and Distributed Computing
        14(4), 1992.

    Example:
        >>> keys, indices = sample_sort(torch.tensor([30, 10, 20, 10]))
        >>> keys, indices
        (tensor([10, 10, 20, 30]), tensor([1, 3, 2, 0]))
    """
    place = _find_place(group)
    rows, problem = None, ""
    shard = _Shard(0, [], 0, {})
    try:
        _check_choice("result", result, Result)
        _check_choice("nan", nan, NanRule)
        most_samples = check_integer("oversampling", oversampling) * place.num_processes**2
        rows = _read_rows(keys, payload)
        shard = _describe(rows, nan, {"result": result, "oversampling": str(oversampling), "nan": nan})
    except ValueError as error:
        problem = str(error)
    shards = _agree(shard, problem, place)
    assert rows is not None  # or a problem was raised

    num_rows = [shard.num_rows for shard in shards]
    start = sum(num_rows[: place.rank])
    index = torch.arange(start, start + len(rows.bits), device=rows.bits.device)
    codes, columns = _sort([rows.bits, index, *rows.leaves], rows.dtype)
    if place.num_processes > 1 and sum(num_rows) > 0:
        stride = -(-sum(num_rows) // most_samples)
        sent = _split(codes, num_rows, stride, place)
        counts = _gather_counts(sent, rows.bits.device, place)
        columns = _exchange(columns, sent, [row[place.rank] for row in counts], place)
        # From lower ranks first, and each run in order: among equal keys the indices ascend already.
        columns = _sort(columns, rows.dtype)[1]
        columns = _lay_out(columns, [sum(column) for column in zip(*counts, strict=True)], result, place)
    return _give_back(columns, rows)


# Arguments, and what the processes say about them


def _find_place(group: Any) -> _Place:
    if not (distributed.is_available() and distributed.is_initialized()):
        if group is not None:
            raise ValueError("group needs torch.distributed to be initialised: call init_process_group first")
        return _Place(None, 0, 1)
    rank = distributed.get_rank(group)
    if rank < 0:
        raise ValueError(f"process {distributed.get_rank()} is not in the group, only those in it may call")
    return _Place(group, rank, distributed.get_world_size(group))


def _check_choice(name: str, value: object, choices: Any) -> None:
    if not isinstance(value, str) or value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}")


def _read_rows(keys: Any, payload: Any) -> _Rows:
    if not isinstance(keys, Tensor) or keys.ndim != 1 or keys.layout != torch.strided:
        kind = f"shape {tuple(keys.shape)}" if isinstance(keys, Tensor) else type(keys).__name__
        raise ValueError(f"keys must be a dense 1-D tensor, got {kind}")
    if keys.dtype not in _SIGNED + _UNSIGNED + _FLOATS:
        raise ValueError(f"keys must be integers or floats of 8 to 64 bits, got {keys.dtype}")
    # None would be a leaf.
    paths, spec = ([], None) if payload is None else pytree.tree_flatten_with_path(payload)
    names = [f"payload{pytree.keystr(path)}" for path, _ in paths]
    bad = [
        f"{name} is {_describe_leaf(leaf)}"
        for name, (_, leaf) in zip(names, paths, strict=True)
        if not isinstance(leaf, Tensor)
        or (leaf.shape[:1], leaf.device, leaf.layout) != (keys.shape, keys.device, torch.strided)
    ]
    if bad:
        listed = ", ".join(bad[:MAX_LISTED]) + (f" and {len(bad) - MAX_LISTED} more" if bad[MAX_LISTED:] else "")
        raise ValueError(f"payload must be dense tensors of {len(keys)} rows on {keys.device}, as keys are: {listed}")
    # The bits of floats survive every move, and devices that know little of unsigned integers can sort them.
    bits = keys.detach().contiguous().view(_BITS[keys.dtype.itemsize])
    return _Rows(bits, keys.dtype, [leaf.detach() for _, leaf in paths], names, spec)


def _describe_leaf(leaf: object) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)} on {leaf.device}" if isinstance(leaf, Tensor) else type(leaf).__name__


def _describe(rows: _Rows, nan: NanRule, terms: dict[str, str]) -> _Shard:
    unordered = torch.empty(0, dtype=torch.int64)
    if nan == "raise" and rows.dtype in _FLOATS:
        unordered = rows.bits.view(rows.dtype).isnan().nonzero()[:, 0]
    leaves = [
        f"{name} {leaf.dtype} {('n', *leaf.shape[1:])}" for name, leaf in zip(rows.names, rows.leaves, strict=True)
    ]
    terms = terms | {
        "dtype": str(rows.dtype),
        "device": rows.bits.device.type,
        "payload": ", ".join(leaves) or "no payload",
    }
    return _Shard(len(rows.bits), unordered[:MAX_LISTED].tolist(), len(unordered), terms)


def _agree(shard: _Shard, problem: str, place: _Place) -> list[_Shard]:
    """Return what every process says, by rank, once all have heard that nothing is wrong."""
    gathered: list[tuple[_Shard, str]] = [(shard, problem)] * place.num_processes
    if place.num_processes > 1:
        distributed.all_gather_object(gathered, (shard, problem), group=place.group)
    shards = [shard for shard, _ in gathered]
    problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(gathered) if problem]
    if problems:
        more = f"\nand {len(problems) - MAX_LISTED} more ranks" if problems[MAX_LISTED:] else ""
        raise ValueError("\n".join(problems[:MAX_LISTED]) + more)
    for term in shards[0].terms:
        ranks: dict[str, list[int]] = {}
        for rank, shard in enumerate(shards):
            ranks.setdefault(shard.terms[term], []).append(rank)
        if len(ranks) > 1:
            listed = "; ".join(f"{value} on ranks {ranks[value]}" for value in ranks)
            raise ValueError(f"all processes must give the same {term}: {listed}")
    _refuse_nan(shards)
    return shards


def _refuse_nan(shards: list[_Shard]) -> None:
    total = sum(shard.num_nan for shard in shards)
    if total:
        starts = accumulate((shard.num_rows for shard in shards), initial=0)
        # One more start than shards: the last is N.
        ids = [start + position for start, shard in zip(starts, shards, strict=False) for position in shard.first_nan]
        raise ValueError(f"keys must not be NaN (or nan='last'): ids {ids[:MAX_LISTED]}, {total} in all")


def _give_back(columns: list[Tensor], rows: _Rows) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Any]:
    bits, indices, *leaves = columns
    keys = bits.view(rows.dtype)
    return (keys, indices) if rows.spec is None else (keys, indices, pytree.tree_unflatten(leaves, rows.spec))


# One process's rows


def _sort(columns: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Sort rows stably by the first column, which holds keys' bits; return their codes too."""
    codes, order = torch.sort(_codes(columns[0], dtype), stable=True)
    return codes, [column[order] for column in columns]


def _codes(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return signed integers, as wide, that are ordered and tied as the keys are; NaN is the largest."""
    limits = torch.iinfo(bits.dtype)
    if dtype in _SIGNED:
        return bits
    if dtype in _UNSIGNED:
        return bits ^ limits.min
    # A float is a sign and a magnitude; of -0.0 the latter is 0.
    magnitude = bits & limits.max
    infinity = torch.tensor(torch.inf, dtype=dtype).view(bits.dtype).item()
    codes = torch.where(bits < 0, -magnitude, magnitude)
    return codes.masked_fill_(magnitude > infinity, limits.max)


# Between processes


def _split(codes: Tensor, num_rows: list[int], stride: int, place: _Place) -> list[int]:
    """Return how many of this process's rows, which are sorted, go to each process."""
    num_samples = [size // stride for size in num_rows]
    to_each = codes[stride - 1 :: stride].repeat(place.num_processes)
    # Not all_gather, whose parts must be of one size: one process may have all rows.
    (samples,) = _exchange([to_each], [num_samples[place.rank]] * place.num_processes, num_samples, place)

    # Samples come by rank, then position: sorted stably, they are in the order of (key, index).
    ascending, order = torch.sort(samples, stable=True)
    num_below = torch.arange(1, place.num_processes, device=codes.device) * len(samples) // place.num_processes
    # Where there are fewer samples than processes, the first of them serves more than once.
    last_below = (num_below - 1).clamp(min=0)
    number = order[last_below]
    sizes = torch.tensor(num_samples, device=codes.device)
    ends = sizes.cumsum(dim=0)
    source = torch.searchsorted(ends, number, right=True)
    on_source = number - (ends - sizes)[source]

    splitters = ascending[last_below]
    # Keys equal to a splitter have lower indices than it on lower ranks, and higher ones on higher ranks.
    cuts = torch.where(
        source > place.rank,
        torch.searchsorted(codes, splitters, right=True),
        torch.searchsorted(codes, splitters),
    )
    cuts = torch.where(source == place.rank, (on_source + 1) * stride, cuts)
    bounds = [0, *cuts.tolist(), len(codes)]
    return [end - start for start, end in pairwise(bounds)]


def _gather_counts(sent: list[int], device: torch.device, place: _Place) -> list[list[int]]:
    """Return how many rows go from each process (outer list) to each (inner)."""
    to_each = torch.tensor(sent, device=device).repeat(place.num_processes)
    sizes = [len(sent)] * place.num_processes
    (counts,) = _exchange([to_each], sizes, sizes, place)
    return counts.view(place.num_processes, place.num_processes).tolist()


def _lay_out(columns: list[Tensor], held: list[int], result: Result, place: _Place) -> list[Tensor]:
    """Exchange sorted rows, held[s] of them on process s in turn, for this process's share of the result."""
    per_process = -(-sum(held) // place.num_processes)
    starts = list(accumulate(held, initial=0))

    def find_rows(source: int, target: int) -> range:
        """Return the positions of those rows on one process that belong on the other."""
        start, size = starts[source], held[source]
        if result == "interleaved":
            return range((target - start) % place.num_processes, size, place.num_processes)
        first = target * per_process - start
        return range(min(max(first, 0), size), min(max(first + per_process, 0), size))

    processes = range(place.num_processes)
    given = [find_rows(place.rank, target) for target in processes]
    grouped = [torch.cat([column[part.start : part.stop : part.step] for part in given]) for column in columns]
    received = [len(find_rows(source, place.rank)) for source in processes]
    return _exchange(grouped, [len(part) for part in given], received, place)


def _exchange(columns: list[Tensor], sent: list[int], received: list[int], place: _Place) -> list[Tensor]:
    """Send rows, which are grouped by target, and return those received, by source."""
    arrived = [column.new_empty((sum(received), *column.shape[1:])) for column in columns]
    for column, out in zip(columns, arrived, strict=True):
        distributed.all_to_all_single(_as_bytes(out), _as_bytes(column), received, sent, group=place.group)
    return arrived


def _as_bytes(rows: Tensor) -> Tensor:
    """Return contiguous rows as uint8[n, bytes of a row], which every backend sends, whatever the dtype."""
    return rows.view(len(rows), rows.shape[1:].numel()).view(torch.uint8)
