"""The list of bad samples of a run, `bad_samples.jsonl`: what was left out of files, steps and evaluations."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import jax

from jvarlen._common.checks import UserError
from jvarlen._common.files import regular_file, write_atomically
from jvarlen._common.progress import show_line
from jvarlen.distributed.processes import gather_texts, is_main_process, together
from jvarlen.loading.plan_source import SkippedSample

__all__ = ["BAD_SAMPLES", "BadSamples", "open_bad_samples", "write_bad_records"]

BAD_SAMPLES = "bad_samples.jsonl"  # of process 0; process 1 has bad_samples.1.jsonl

_MOST_SHOWN = 5  # all are in the file


class BadSamples:
    """Writes the samples that a process skips; `num_in_files`, `num_in_steps` and so on count what the files list."""

    def __init__(
        self,
        file: IO[str] | None,
        num_in_files: int,
        num_in_steps: int,
        evaluated: set[tuple[str, int]],
        progress: bool,
    ):
        """`evaluated` are the names and ids of what the lists of all processes have of evaluations."""
        self._file = file
        self._progress = progress
        self._num_shown = 0
        self.num_in_files, self._num_in_steps = num_in_files, num_in_steps
        self._evaluated, self._num_evaluated_before = evaluated, len(evaluated)

    def log(self, num_steps_done: int, skipped: Sequence[SkippedSample]) -> None:
        """Lists what a step, which so many came before, has left out; OSError if it cannot be written."""
        if self._file is not None:
            self._num_in_steps += len(skipped)
            self._add(f"step {num_steps_done + 1:,}", [one._asdict() | {"step": num_steps_done} for one in skipped])

    def log_evaluation(self, name: str, skipped: Sequence[SkippedSample]) -> None:
        """Lists what a step of an evaluation has left out, if it is not in the list yet; raises OSError as `log`."""
        new = {one.id: one.reason for one in skipped if (name, one.id) not in self._evaluated}
        self._evaluated |= {(name, i) for i in new}
        rows = [{"step": None, "evaluation": name, "id": i, "reason": reason} for i, reason in new.items()]
        self._add(f"evaluation on {name}", rows)

    def _add(self, where: str, rows: Sequence[dict[str, Any]]) -> None:
        if not rows or self._file is None:
            return
        try:
            self._file.writelines(json.dumps(row) + "\n" for row in rows)
            self._file.flush()
        except OSError as error:
            raise OSError(f"{self._file.name} cannot be written: {error.strerror}") from error
        for row in rows[: _MOST_SHOWN - self._num_shown]:
            self._num_shown += 1
            show_line(f"{where} leaves out sample {row['id']}: {row['reason']}", progress=self._progress)

    def sync(self) -> None:
        """Returns when the list would survive a power cut."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def num_in_steps(self) -> int:
        """Samples that the steps of all processes have left out, those before a resume too; all processes call it."""
        return sum(map(int, gather_texts("the number of bad samples", str(self._num_in_steps))))

    def num_in_evaluations(self) -> int:
        """Samples that the evaluations of all processes have left out, each once; all processes call it."""
        before, now = self._num_evaluated_before, len(self._evaluated)
        return before + sum(map(int, gather_texts("the number of bad samples of evaluations", str(now - before))))


def write_bad_records(run_dir: Path, records: Sequence[dict[str, Any]]) -> None:
    """Begins the list with the records of files that are no samples."""
    if records:
        _write(run_dir / BAD_SAMPLES, records)


@contextlib.contextmanager
def open_bad_samples(run_dir: Path, *, start_step: int, skips: bool, progress: bool) -> Iterator[BadSamples]:
    """A block with the lists of all processes, without what `start_step` and later steps have left out.

    What evaluations have left out stays, so that they list it once.
    """
    num_in_files = num_in_steps = 0
    evaluated = set[tuple[str, int]]()
    with together("open the lists of bad samples"):
        for path in sorted(run_dir.glob("bad_samples*.jsonl")) if is_main_process() else ():
            kept = [row for row in _rows(path) if row["step"] is None or row["step"] < start_step]
            _write(path, kept)
            evaluated |= {(row["evaluation"], row["id"]) for row in kept if "evaluation" in row}
            num_in_steps += sum(row["step"] is not None for row in kept)
            num_in_files += sum(row["step"] is None and "evaluation" not in row for row in kept)
    shared = json.loads(gather_texts("the bad samples of evaluations", json.dumps(sorted(evaluated)))[0])
    index = jax.process_index()
    own = run_dir / (BAD_SAMPLES if index == 0 else f"bad_samples.{index}.jsonl")
    with own.open("a") if skips else contextlib.nullcontext() as file:
        yield BadSamples(file, num_in_files, num_in_steps, {(name, i) for name, i in shared}, progress)


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with write_atomically(path) as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a list, without an incomplete last line; raises ValueError that names any other."""
    *lines, _ = regular_file(path).read_text(errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            _ = row["step"] is None or row["step"] < 0
            _ = "evaluation" in row and (row["evaluation"] + "", row["id"] < 0)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path}, line {number}, names no bad sample: {error!r}") from None
        rows.append(row)
    return rows
