"""Trackers for TensorBoard and for offline runs of Weights & Biases.

Their packages are extras, imported when a tracker is made.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jvarlen._common.checks import UserError
from jvarlen._common.files import write_atomically
from jvarlen._common.interrupts import without_interrupts

__all__ = ["TensorBoardTracker", "WandbTracker", "scalars_of"]

# Where charts show what stands in a record; what is not listed goes to train/.
_GROUPED_NAMES = {
    "base_learning_rate": "rate/base",
    "learning_rate_scale": "rate/scale",
    "learning_rate": "rate/in_force",
    "num_tokens": "data/num_tokens",
    "num_positions": "data/num_positions",
    "num_sequences": "data/num_sequences",
    "padding": "data/padding",
    "bucket_rows": "data/bucket_rows",
    "bucket_length": "data/bucket_length",
    "data_wait_s": "data/wait_s",
    "host_memory_bytes": "memory/host_bytes",
    "device_memory_bytes": "memory/device_bytes",
}
_END_S = 60.0  # Weights & Biases has so long to write what it has


class TensorBoardTracker:
    """Scalars for TensorBoard, named in groups as `scalars_of` does.

    Args:
      directory: the directory of the event files; it is created.
      start_step: the first step that will be logged. Records of it and of later steps in earlier files are no longer
        shown.

    Raises:
      ValueError: tensorboardX is not installed.
      OSError: the files cannot be written.

    References:
      Event files and their session logs, by which a restart hides later steps: tensorflow/core/util/event.proto.
    """

    def __init__(self, directory: Path, *, start_step: int = 0):
        _require("tensorboardX", "tensorboard")
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        # Not its SummaryWriter: that takes an event for each scalar, and waits for ever where the disk is full.
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(directory / "events"), f".{os.getpid()}.{start_step:012d}")
        self._write(step=start_step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def log(self, record: Mapping[str, Any]) -> None:
        """Writes an event."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars_of(record).items()]
        self._write(step=record["step"], summary=self._summary(value=values))

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _write(self, **content: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), **content))
        self._writer.flush()


class WandbTracker:
    """An offline run of Weights & Biases, named in groups as `scalars_of` does, for `wandb sync` to upload.

    It needs no account and no network, and takes no settings from the environment. All its files except a socket are in
    `run_dir/wandb`, including the id of the run, `run_id`. A resumed run has the same id and each time one more
    directory `offline-run-…`; a step that was taken twice is in two of them.

    A process of its own writes them, through the service of wandb. Neither receives the Ctrl-C of a terminal, nor
    SIGTERM to the processes of the run; both end with the run, even if it is killed. A scheduler that sends SIGTERM to
    each process of a job ends the service; the tracker then counts as failed.

    Args:
      run_dir: the directory of the run.
      config: settings to show with the run, of values that JSON has.

    Raises:
      ValueError: wandb is not installed.
      OSError: the files cannot be written, or wandb did not start; its message is included.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any]):
        _require("wandb", "wandb")
        directory = run_dir.resolve() / "wandb"
        directory.mkdir(parents=True, exist_ok=True)
        run_id_path = directory / "run_id"
        if not run_id_path.exists():
            with write_atomically(run_id_path) as file:
                file.write(secrets.token_hex(4).encode())
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        environment |= {f"WANDB_{kind}_DIR": str(directory / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        environment["WANDB_ERROR_REPORTING"] = "false"  # it would reach for the network
        program = Path(__file__).with_name("wandb_process.py")
        log_path = directory / "process.log"
        with log_path.open("w") as log, without_interrupts():
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(program), str(run_dir.resolve()), run_id_path.read_text()],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        started = ""
        with contextlib.suppress(BrokenPipeError):
            self._send(config)
            if select.select([self._process.stdout], [], [], _END_S)[0]:
                started = self._process.stdout.readline()
        self._process.stdout.close()
        if not started:
            self._end()
            told = log_path.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            raise OSError(f"wandb did not start ({told[-1]}); {log_path} tells more")

    def log(self, record: Mapping[str, Any]) -> None:
        """Passes the record on; after about 1 s it is on disk."""
        self._send({"step": record["step"], "scalars": scalars_of(record)})

    def close(self) -> None:
        """Ends the process when it has written everything.

        Raises:
          OSError: it had failed, or was killed because it did not end within 60 s.
        """
        with contextlib.suppress(BrokenPipeError, TimeoutError):
            self._send("end")
        self._end()
        if self._process.returncode:
            raise OSError(f"the process of wandb ended with code {self._process.returncode}")

    def _send(self, message: object) -> None:
        # A process that hangs must not make training wait for it; what fits the pipe it may read later.
        if not select.select([], [self._stdin], [], _END_S)[1]:
            raise TimeoutError(f"its process has read nothing for {_END_S:.0f} s")
        self._stdin.write(json.dumps(message) + "\n")
        self._stdin.flush()

    def _end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a record, under names that charts group by.

    Args:
      record: of a training step or an evaluation. Values that are not numbers, and the step, are left out.

    Returns:
      `train/loss`, `rate/in_force`, `data/padding`, `memory/host_bytes` and the like of a step; `eval/NAME/…` of an
      evaluation.

    Example:
      >>> scalars_of({"step": 3, "loss": 2.5, "learning_rate": 0.1, "device_memory_bytes": None})
      {'train/loss': 2.5, 'rate/in_force': 0.1}
      >>> scalars_of({"step": 3, "evaluation": "held_out", "bits_per_token": 4.5})
      {'eval/held_out/bits_per_token': 4.5}
    """
    group = f"eval/{record['evaluation']}/" if "evaluation" in record else None
    scalars = {}
    for name, value in record.items():
        if name != "step" and isinstance(value, int | float):
            scalars[group + name if group else _GROUPED_NAMES.get(name, f"train/{name}")] = float(value)
    return scalars


def _require(package: str, extra: str) -> None:
    """Raises ValueError where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"the tracker {extra} needs {package}: pip install 'jvarlen[{extra}]'")
