"""Trains in several processes on this host, and goes on with those that survive."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import cast

import jvarlen.runs.fit  # noqa: F401  # once, for all processes, which are forks of this one
from jvarlen._common.checks import UserError
from jvarlen.distributed.elastic import Start, keep_training
from jvarlen.distributed.layout import Layout, surviving_layout
from jvarlen.runs.config import AUTO, FitConfig

__all__ = ["train_elastically"]


def train_elastically(config: FitConfig, train: Callable[[FitConfig], int]) -> int:
    """Supervises processes that train on what is left of the layout.

    Args:
      config: the settings, with `elastic`.
      train: trains with the settings of one process, and returns its exit code.

    Returns:
      The exit code of the training, as of `keep_training`.

    Raises:
      ValueError: a layout that the processes do not fill or the microbatches of a step do not spread over; or as
        `keep_training`.
    """
    if config.parallel == AUTO:
        raise UserError(
            f"parallel auto would choose anew for the survivors: name a layout with elastic ({config.elastic}); "
            "`jvarlen plan --cluster --model` shows the choice"
        )
    num_processes, devices = cast(int, config.elastic), config.devices or 1
    run_dir = cast(Path, config.run_dir or config.resume).resolve()  # once: the link `latest` may come to mean another
    layout = config.layout or Layout(data=num_processes * devices)
    if layout.num_devices != num_processes * devices:
        raise UserError(
            f"the layout {layout} takes {layout.num_devices} devices, and {num_processes} processes of {devices} have "
            f"{num_processes * devices}"
        )

    def layout_on(num_devices: int) -> Layout:
        return surviving_layout(layout, num_devices, config.plan.microbatches_per_step)

    if layout_on(layout.num_devices) != layout:
        raise UserError(
            f"{config.plan.microbatches_per_step} microbatches a step do not spread over the shards of {layout}: they "
            "must divide plan.microbatches_per_step"
        )

    def survivors(alive: int) -> int:
        """The most processes whose devices a layout takes all."""
        for size in range(alive, 0, -1):
            if layout_on(size * devices).num_devices == size * devices:
                return size
        raise UserError(f"no part of the layout {layout} takes all devices of at most {alive} processes of {devices}")

    def run(start: Start) -> int:
        own = dataclasses.replace(
            config,
            elastic=None,
            run_dir=config.run_dir and run_dir,
            resume=config.resume and run_dir,
            # The latest, once a process has gone back to the best, which removes later ones, or has gone on from there.
            resume_from="latest" if checkpoints() != found else config.resume_from,
            coordinator=start.coordinator,
            num_processes=start.num_processes,
            process_id=start.process_id,
        )
        if config.layout is not None:
            own = dataclasses.replace(own, parallel=str(layout_on(start.num_processes * devices)))
        return train(own)

    def checkpoints() -> dict[str, float]:
        """Their times, by name."""
        times = {}
        for path in (run_dir / "checkpoints").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                times[path.name] = path.stat().st_mtime
        return times

    found = checkpoints()
    return keep_training(
        run,
        num_processes,
        progress=lambda: sorted(checkpoints()),
        survivors=survivors,
        devices_per_process=devices,
    )
