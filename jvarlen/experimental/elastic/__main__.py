"""`python -m jvarlen.experimental.elastic 4 -- jvarlen train …`: trains, and goes on with the workers that survive."""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jvarlen.runs.fit  # noqa: F401  # once, for all workers, which are forks of this process
from jvarlen._common.checks import UserError, check_at_least_one
from jvarlen._common.options import parse
from jvarlen._common.terminal import say
from jvarlen.distributed.layout import Layout
from jvarlen.experimental.elastic.supervisor import Start, keep_training
from jvarlen.experimental.elastic.survivors import surviving_layout
from jvarlen.runs.config import AUTO, FitConfig
from jvarlen.runs.saved_config import default_settings

__all__ = ["main"]

_USER_ERROR = 2


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
      The exit code of the training; 2 for a user's mistake.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jvarlen.experimental.elastic",
        description="Train in several processes on this host, and go on with the survivors when some are lost.",
        usage="%(prog)s [-h] NUM_WORKERS -- jvarlen train --run-dir RUN_DIR ...",
    )
    parser.add_argument("num_workers", type=int, help="processes to start")
    parser.add_argument("command", nargs="+", help="jvarlen train with its settings, run_dir or resume among them")
    given = parser.parse_args(args)
    if given.command[:2] != ["jvarlen", "train"]:
        parser.error("the command must be jvarlen train; a script of your own calls keep_training")
    try:
        return _supervise(given.num_workers, given.command[2:])
    except (UserError, OSError) as error:
        say(f"jvarlen: {error}", error=True)
        return _USER_ERROR


def _supervise(num_workers: int, args: list[str]) -> int:
    check_at_least_one(num_workers=num_workers)
    settings = [arg for arg in args if arg != "--traceback"]
    config = parse(FitConfig, settings, "jvarlen train", default_settings(settings))
    given = config.directory.run_dir or config.directory.resume
    if given is None:
        raise UserError("elastic training needs run_dir, where later starts find the run")
    if config.has_processes:
        raise UserError("elastic training starts the processes itself, and tells them where to meet")
    if config.hardware.parallel == AUTO:
        raise UserError(
            "parallel auto would choose anew for the survivors: name a layout; `jvarlen plan --cluster --model` shows "
            "the choice"
        )
    devices = config.hardware.devices or 1
    run_dir = given.resolve()  # once: the link `latest` may change
    num_microbatches = config.plan.num_microbatches or 1
    layout = (config.hardware.layout or Layout()).for_devices(num_workers * devices)

    def layout_on(num_devices: int) -> Layout:
        return surviving_layout(layout, num_devices, num_microbatches)

    if layout_on(layout.num_devices) != layout:
        raise UserError(
            f"{num_microbatches} microbatches a step do not spread over the shards of {layout}: "
            "they must divide plan.num_microbatches"
        )

    def survivors(alive: int) -> int:
        """The most workers whose devices a layout takes all."""
        for size in range(alive, 0, -1):
            if layout_on(size * devices).num_devices == size * devices:
                return size
        raise UserError(f"no part of the layout {layout} takes all devices of at most {alive} processes of {devices}")

    def run(start: Start) -> int:
        own = ["--coordinator", start.coordinator, "--num-processes", str(start.num_processes)]
        own += ["--process-id", str(start.process_id)]
        if config.hardware.layout is not None:
            own += ["--parallel", str(layout_on(start.num_processes * devices))]
        # The latest, once a start has gone back to the best, which removes later ones, or has gone on from there.
        if _checkpoint_times(run_dir) != found:
            own += ["--from", "latest"]
        sys.argv = ["jvarlen", "train", *_name_run(run_dir, args), *own]  # the last value of a setting counts
        try:
            runpy.run_module("jvarlen", run_name="__main__")
        except SystemExit as ended:
            return cast(int, ended.code or 0)
        return 0

    found = _checkpoint_times(run_dir)
    return keep_training(
        run,
        num_workers,
        progress=lambda: sorted(_checkpoint_times(run_dir)),
        survivors=survivors,
        devices_per_process=devices,
    )


def _checkpoint_times(run_dir: Path) -> dict[str, float]:
    """When checkpoints were written, by name."""
    times = {}
    for path in (run_dir / "checkpoints").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            times[path.name] = path.stat().st_mtime
    return times


def _name_run(run_dir: Path, args: Sequence[str]) -> list[str]:
    """The arguments with this path of the run's directory."""
    own: list[str] = []
    for before, arg in zip(["", *args], args, strict=False):
        name, has_value, _ = arg.partition("=")
        if before in ("--run-dir", "--resume"):
            own.append(str(run_dir))
        elif has_value and name in ("--run-dir", "--resume"):
            own.append(f"{name}={run_dir}")
        else:
            own.append(arg)
    return own


if __name__ == "__main__":
    sys.exit(main())
