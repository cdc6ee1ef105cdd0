"""Writes an offline run of Weights & Biases, in a process of its own, from JSON lines on standard input.

A program, started by `WandbTracker`: in the training process, wandb 0.31 would replace `sys.exit` and
`sys.excepthook`, make training wait for a service that hangs, and lose the last record of a run that is killed.
"""

from __future__ import annotations

import json
import os
import sys

__all__: list[str] = []

_END = "end"  # the last line of a run that was closed


def _main(directory: str, run_id: str) -> None:
    """Reads a line of settings, then a line of each record, {"step": …, "scalars": {…}}."""
    # What the service inherits must not hold the ends of these pipes open when this process is gone.
    messages, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    import wandb

    run = wandb.init(
        project="jvarlen",
        dir=directory,
        mode="offline",
        id=run_id,
        config=json.loads(messages.readline()),
        settings=wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=1.0,  # seconds; what was not flushed is lost with the service
        ),
    )
    print("ready", file=answers, flush=True)
    for line in messages:
        message = json.loads(line)
        if message == _END:
            run.finish()
            return
        run.log(message["scalars"], step=message["step"])
    run.finish(exit_code=1)  # training was killed


if __name__ == "__main__":
    _main(*sys.argv[1:])
