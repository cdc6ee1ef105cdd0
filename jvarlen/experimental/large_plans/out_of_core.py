"""Plans an epoch in pieces on disk, with the digest of the same plan made in memory.

Finished work is kept in a directory beside the file of the plan until that is complete, so a repeated call continues an
interrupted one. Letters: N samples, n of them in the plan, M microbatches a step, S steps, K buckets.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Int64, Integer
from tqdm import tqdm

from jvarlen._common.checks import UserError, check_choices, list_first
from jvarlen._common.files import FULL_DISK, check_place, move_into_place, read_object
from jvarlen._common.terminal import progress_bar
from jvarlen.experimental.large_plans import stages
from jvarlen.experimental.large_plans.columns import PartFiles, mapped_file, run_ahead
from jvarlen.experimental.large_plans.histogram import LargeOverlong, histogram_in_pieces, overlong_counts
from jvarlen.experimental.large_plans.raw_plan import MappedPlan, PlanFileWriter, open_plan
from jvarlen.experimental.large_plans.stages import (
    Grouped,
    Pieces,
    Source,
    Stage,
    cut_steps,
    group,
    id_dtype,
    sort_by_block,
    sort_by_length,
)
from jvarlen.planning.buckets import AnyBucket, Bucket, Buckets, check_buckets, rows_of_steps
from jvarlen.planning.grouping import BucketTable, canonical_steps, emitted_steps
from jvarlen.planning.lengths import LengthHistogram, check_kind
from jvarlen.planning.order import Order, as_order, block_order, check_seed
from jvarlen.planning.plan_file import DIGEST_CHUNK
from jvarlen.planning.rules import PlanRules

__all__ = ["plan_on_disk"]

_VERSION = 1  # of what is kept of an interrupted call


def plan_on_disk(
    lengths: Integer[np.ndarray, " N"],
    buckets: Buckets[Bucket] | Sequence[tuple[int, int]],
    path: str | os.PathLike[str],
    *,
    num_microbatches: int | None = None,
    order: str | Order = "shuffle",
    seed: int = 0,
    epoch: int = 0,
    overlong: LargeOverlong = "error",
    progress: bool = True,
) -> MappedPlan:
    """Writes the plan that `make_plan` makes of the same arguments to a file, in pieces, and opens it.

    It takes some 1.5 GB of memory, and 60 bytes for each step. To continue after an interruption, repeat the call.

    Args:
      lengths: integers[N], tokens a sample; those of a memory-mapped file are read in pieces.
      buckets: `Buckets`, or (rows, length) pairs, lengths strictly ascending.
      path: the file to write.
      num_microbatches: M; None: as in `make_plan`.
      order: a word, or an `Order` by one.
      seed: 0 ≤ seed < 2**63.
      epoch: 0 ≤ epoch < 2**63.
      overlong: as in `make_plan`.
      progress: whether to show a progress bar of each stage.

    Returns:
      A `MappedPlan`, with the digest of the plan made in memory.

    Raises:
      ValueError: arguments that are not as described; lengths that are too long, or have changed since an interrupted
        call; other arguments than those of that call.
      OSError: the file cannot be written; on a full disk the message says how many bytes are needed.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     plan = plan_on_disk([3, 1, 4, 8], [(2, 4), (1, 8)], f"{directory}/plan", order="length", progress=False)
      ...     plan.rows(0).tolist()
      [[1, 0]]
    """
    check_seed(seed, epoch)
    checked = check_buckets(buckets, num_microbatches)
    order = as_order(order)
    if not isinstance(checked.shapes[0], Bucket) or not isinstance(order.by, str):
        raise UserError("a plan on disk is of samples of one length, in an order by name")
    _write_plan(
        np.asanyarray(lengths),
        checked,
        Path(path),
        PlanRules(order, seed=int(seed), epoch=int(epoch)),
        overlong,
        progress,
    )
    plan = open_plan(path)
    vars(plan).update(new_shape_every=int(order.new_shape_every), epoch=int(epoch))
    return plan


def _write_plan(
    lengths: Integer[np.ndarray, " N"],
    buckets: Buckets[AnyBucket],
    out: Path,
    rules: PlanRules,
    overlong: LargeOverlong,
    progress: bool,
) -> None:
    check_kind(lengths)
    check_choices(overlong=(overlong, LargeOverlong))
    check_place(out)
    source = mapped_file(lengths)
    if source is not None and out.exists() and source.samefile(out):
        raise UserError(f"{out} is the file of the lengths: the plan needs another one")
    settings = _settings_of(lengths, buckets, rules, overlong)
    with _naming_needed_bytes(8 * len(lengths), out.parent), _kept(out, settings, lengths) as kept:
        histogram = kept.histogram(lengths)
        edges = np.array([bucket.lengths[0] for bucket in buckets.shapes])
        num_samples, num_dropped, num_truncated = _count(lengths, histogram, edges, overlong)
        steps = canonical_steps(num_samples, rows_of_steps(buckets))
        writer = PlanFileWriter(kept.directory / "plan", len(edges), len(steps.bucket), int(num_samples.sum()))
        to_group, ordered = _sort_stages(kept.directory, lengths, histogram, rules)
        has_places = rules.emits_by_arrival
        grouped = Grouped(kept.directory / "grouped", num_samples, len(lengths), int(edges[-1]), has_places)
        to_group.append(group(ordered, grouped, BucketTable(edges, overlong)))
        with _naming_needed_bytes(writer.num_bytes + _bytes_of(to_group, kept, len(lengths)), kept.directory):
            writer.take_space()
            for stage, before in zip(to_group, [None, *to_group], strict=False):
                _run_stage(stage, kept, progress)
                if before is not None and isinstance(before.files, PartFiles):
                    before.files.delete()
            last_places = grouped.last_places(steps.offsets)
            emitted = emitted_steps(steps, rules, last_places, len(lengths), edges)
            writer.write("buckets", np.array(buckets.shapes))
            writer.write("step_bucket", steps.bucket[emitted])
            writer.write("num_tokens", grouped.num_tokens(steps.offsets)[emitted])
            _write_ids(writer, grouped, steps.offsets, emitted, kept, progress)
            writer.finish(
                microbatches_per_step=buckets.num_microbatches,
                overlong=overlong,
                num_dropped=num_dropped,
                num_truncated=num_truncated,
            )
        kept.check_lengths(lengths)
        kept.forget()  # before the file that it describes is gone
        move_into_place(kept.directory / "plan", out)
        shutil.rmtree(kept.directory)


def _settings_of(
    lengths: Integer[np.ndarray, " N"], buckets: Buckets[AnyBucket], rules: PlanRules, overlong: LargeOverlong
) -> dict[str, Any]:
    """What must be the same in the call that goes on, as JSON."""
    order = rules.order
    return {
        "lengths": _identity(lengths),
        "buckets": [list(bucket) for bucket in buckets.shapes],
        "num_microbatches": buckets.num_microbatches,
        "order": order.by,
        "block_size": order.sample_blocks,
        "seed": rules.seed,
        "epoch": rules.epoch,
        "shuffle_steps": bool(order.shuffle_steps),
        "longest_first": bool(order.longest_first),
        "new_shape_every": int(order.new_shape_every),
        "overlong": overlong,
        "version": [_VERSION, stages.PIECE],
    }


def _bytes_of(to_group: list[Stage], kept: _Kept, num_samples: int) -> int:
    """The most bytes that stages still need at a time: each reads what the one before it wrote."""
    rows = [0, *(stage.files.row_bytes for stage in to_group)]
    is_done = [kept.done(stage.name) == kept.num_pieces(stage.name) for stage in to_group]
    pairs = [a + b for (a, b), done in zip(itertools.pairwise(rows), is_done, strict=True) if not done]
    return num_samples * max([rows[-1], *pairs])


class _DiskFullError(OSError):
    """A full disk; the message says how many bytes are needed."""


class _Kept:
    """What an interrupted call leaves behind: how many pieces of each stage are done.

    Attributes:
      directory: where it is.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]):
        self.directory = directory
        self._path = directory / "state.json"
        self._state: dict[str, Any] = {"settings": settings, "boot": _boot(), "done": {}, "num_pieces": {}, "sizes": {}}
        state = read_object(self._path) if self._path.exists() else None
        if state is not None:
            kinds = {"settings": dict, "boot": str, "done": dict, "num_pieces": dict, "sizes": dict}
            if wrong := [name for name, kind in kinds.items() if not isinstance(state.get(name), kind)]:
                raise UserError(f"{self._path} is damaged ({list_first(wrong)}): delete {directory} to begin again")
        if state is None or state["boot"] != _boot():  # what was written before a power cut may not be on disk
            self._write()
            return
        begun = state["settings"]
        if begun.get("lengths") != settings["lengths"]:
            raise UserError(f"the lengths changed since planning began; delete {directory} to begin again")
        differing = [
            f"{name} was {begun.get(name)!r}, not {value!r}"
            for name, value in settings.items()
            if begun.get(name) != value
        ]
        if differing:
            raise UserError(
                f"an interrupted plan has other settings: {'; '.join(differing)}. Repeat its call to go on, or delete "
                f"{directory} to begin again"
            )
        self._state = state

    @property
    def is_begun(self) -> bool:
        """Whether a piece of a stage is done."""
        return bool(self._state["sizes"])

    def check_lengths(self, lengths: Integer[np.ndarray, " N"], error: Exception | None = None) -> None:
        """Raises ValueError, because of an error perhaps, if lengths are others than those of the call."""
        try:
            changed = _identity(lengths) != self._state["settings"]["lengths"]
        except OSError:
            changed = True
        if changed:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise UserError("the lengths changed while they were planned: plan them again") from error

    def forget(self) -> None:
        """Forgets what is done."""
        self._path.unlink()

    def done(self, stage: str) -> int:
        """How many pieces are done."""
        return self._state["done"].get(stage, 0)

    def num_pieces(self, stage: str) -> int | None:
        """How many pieces there are; None before the first one is done."""
        return self._state["num_pieces"].get(stage)

    def sizes(self, stage: str) -> list[int] | int:
        """How many samples each group has so far."""
        return self._state["sizes"].get(stage, 0)

    def commit(self, stage: str, done: int, num_pieces: int, sizes: Int64[np.ndarray, " groups"] | None = None) -> None:
        """Records that this many pieces are done, and written."""
        self._state["done"][stage], self._state["num_pieces"][stage] = done, num_pieces
        if sizes is not None:
            self._state["sizes"][stage] = sizes.tolist()
        self._write()

    def _write(self) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._state))
        part.replace(self._path)  # not synchronised with the disk, which would wait for all that is written

    def histogram(self, lengths: Integer[np.ndarray, " N"]) -> LengthHistogram:
        """The histogram of all lengths, counted once."""
        path = self.directory / "histogram.npy"
        if not self.done("histogram"):
            np.save(path, np.stack(histogram_in_pieces(lengths)))
            self.commit("histogram", 1, 1)
        return LengthHistogram(*np.load(path, allow_pickle=False))


@contextlib.contextmanager
def _kept(out: Path, settings: dict[str, Any], lengths: Integer[np.ndarray, " N"]) -> Iterator[_Kept]:
    """The directory beside the plan, in which one process at a time works; wrong input leaves none."""
    directory = out.with_name(f".{out.name}.part")
    directory.mkdir(exist_ok=True)
    try:
        with FileLock(directory / "lock", timeout=0):
            kept = _Kept(directory, settings)
            try:
                yield kept
            except Exception as error:
                kept.check_lengths(lengths, error)
                if isinstance(error, UserError) and not kept.is_begun:
                    shutil.rmtree(directory)
                raise
            except KeyboardInterrupt as interrupt:
                interrupt.add_note(f"what is done of the plan is kept in {directory}; repeat the call to go on")
                raise
    except Timeout:
        raise UserError(f"another process writes {out} at this moment") from None


def _boot() -> str:
    """Differs once the machine has been started again; empty where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _identity(lengths: Integer[np.ndarray, " N"]) -> list[Any]:
    """Differs if the lengths do: size and time of change of a memory-mapped file, else a checksum."""
    path = mapped_file(lengths)
    if path is not None:
        found = path.stat()
        return [str(lengths.dtype), len(lengths), found.st_size, found.st_mtime_ns]
    checksum = 0
    for start in range(0, len(lengths), stages.PIECE):
        checksum = zlib.crc32(np.ascontiguousarray(lengths[start : start + stages.PIECE]).data, checksum)
    return [str(lengths.dtype), len(lengths), checksum]


def _count(
    lengths: Integer[np.ndarray, " N"],
    histogram: LengthHistogram,
    edges: Int64[np.ndarray, " K"],
    overlong: LargeOverlong,
) -> tuple[Int64[np.ndarray, " K"], int, int]:
    """Samples of each bucket, and how many are dropped and truncated."""
    num_samples = np.zeros(len(edges) + 1, np.int64)
    np.add.at(num_samples, np.searchsorted(edges, histogram.lengths), histogram.counts)
    num_dropped, num_truncated = overlong_counts(lengths, histogram, int(edges[-1]), overlong)
    num_samples[-2] += num_truncated
    return num_samples[:-1], num_dropped, num_truncated


def _sort_stages(
    directory: Path, lengths: Integer[np.ndarray, " N"], histogram: LengthHistogram, rules: PlanRules
) -> tuple[list[Stage], Pieces]:
    """The stages that order the samples, and the pieces in order once these are done."""
    order, block_size, num_samples = rules.order.by, rules.order.sample_blocks, len(lengths)
    has_keys, by_length = order == "shuffle" or block_size is not None, str(order).startswith("length")
    length_dtype = np.min_scalar_type(int(histogram.lengths[-1]))
    pieces: Pieces = Source(lengths, length_dtype, (rules.seed, rules.epoch) if has_keys else None)
    dtypes = {"id": id_dtype(num_samples), "length": length_dtype} | ({"key": np.uint32} if has_keys else {})
    to_order = []
    if by_length:
        stage, pieces = sort_by_length(
            pieces, directory / "by_length", histogram, descending=order == "length_descending", dtypes=dtypes
        )
        to_order.append(stage)
    if has_keys:
        size = min(block_size or num_samples, num_samples)
        ranks = None
        if order == "shuffle" and size < num_samples:
            ranks = np.argsort(block_order(-(-num_samples // size), seed=rules.seed, epoch=rules.epoch))
        stage, pieces = sort_by_block(
            pieces, directory / "by_key", num_samples, size, ranks, is_by_id=not by_length, dtypes=dtypes
        )
        to_order.append(stage)
    return to_order, pieces


def _run_stage(stage: Stage, kept: _Kept, progress: bool) -> None:
    """Runs what is left of a stage."""
    starts, first = stage.pieces.starts, kept.done(stage.name)
    stage.files.sizes[:] = kept.sizes(stage.name)
    with _bar(stage.name, starts, first, progress) as bar:
        for piece, grouped in enumerate(run_ahead(stage.work, range(first, len(starts) - 1)), first):
            stage.files.append(*grouped)
            kept.commit(stage.name, piece + 1, len(starts) - 1, stage.files.sizes)
            bar.update(starts[piece + 1] - starts[piece])


def _write_ids(
    writer: PlanFileWriter,
    grouped: Grouped,
    offsets: Int64[np.ndarray, " S_plus_1"],
    emitted: Int64[np.ndarray, " S"],
    kept: _Kept,
    progress: bool,
) -> None:
    """Writes the ids of the steps in their order, and the digests of their chunks."""
    planned_offsets = np.cumulative_sum(np.diff(offsets)[emitted], include_initial=True)
    writer.write("step_offsets", planned_offsets)
    cuts = cut_steps(planned_offsets)
    starts = planned_offsets[cuts]

    def ids_of(piece: int) -> Int64[np.ndarray, " m"]:
        return grouped.ids_of(offsets, emitted[cuts[piece] : cuts[piece + 1]])

    first = kept.done("write")
    with _bar("write the steps", starts, first, progress) as bar:
        for piece, ids in enumerate(run_ahead(ids_of, range(first, len(cuts) - 1)), first):
            writer.write("sample_ids", ids, int(starts[piece]))
            kept.commit("write", piece + 1, len(cuts) - 1)
            bar.update(len(ids))
    first = kept.done("hash")
    starts = np.append(np.arange(0, starts[-1], DIGEST_CHUNK), starts[-1])
    with _bar("hash", starts, first, progress) as bar:
        for chunk in writer.write_chunk_digests(first):
            kept.commit("hash", chunk, len(starts) - 1)
            bar.update(starts[chunk] - starts[chunk - 1])


def _bar(name: str, starts: Int64[np.ndarray, " pieces_plus_1"], first: int, progress: bool) -> tqdm:
    return progress_bar(
        total=int(starts[-1]), initial=int(starts[first]), desc=name, unit="sample", unit_scale=True, progress=progress
    )


@contextlib.contextmanager
def _naming_needed_bytes(needed: int, directory: Path) -> Iterator[None]:
    """A block whose error on a full disk says how many bytes it needs; raised at once where there are too few."""

    def error() -> OSError:
        free = shutil.disk_usage(directory).free
        return _DiskFullError(
            errno.ENOSPC,
            f"planning needs {needed:,} bytes in {directory}, of which it has {_size(directory):,} and {free:,} are "
            "free; make room and repeat the call to go on",
        )

    if shutil.disk_usage(directory).free < needed - _size(directory):
        raise error()
    try:
        yield
    except OSError as full:
        if isinstance(full, _DiskFullError) or full.errno not in FULL_DISK:
            raise
        raise error() from full


def _size(directory: Path) -> int:
    """The bytes on disk of the files in a directory and below."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
