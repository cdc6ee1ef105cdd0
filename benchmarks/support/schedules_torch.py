"""Steps of `torch.distributed.pipelining` on gloo, with stages that sleep forward and backward.

As a program it is one of several processes, one for each stage, started by `namespace.run`. Prints JSON on process 0:
for each schedule, the "seconds" of each step, from the first process that starts to the last one that ends.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import distributed
from torch.distributed import pipelining

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}


class Wait(torch.autograd.Function):
    """Sleeps, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, own: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        """Takes seconds of both."""
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x + own

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """The gradients of x and of the parameters."""
        time.sleep(ctx.backward_s)
        return grad.contiguous(), grad.sum(0), None, None


class Stage(torch.nn.Module):
    """A layer that waits."""

    def __init__(self, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.own = torch.nn.Parameter(torch.zeros(width))
        self.seconds = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Waits."""
        return Wait.apply(x, self.own, *self.seconds)


def main() -> None:
    (chunks, num_microbatches, width, forward_s, backward_s, num_timed), num_stages, rank = map(
        json.loads, sys.argv[1:]
    )
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", "tcp://127.0.0.1:12345", rank=rank, world_size=num_stages)
    found = {}
    for name, num_chunks in chunks.items():
        parts = [
            pipelining.PipelineStage(
                Stage(width, forward_s / num_chunks, backward_s / num_chunks),
                chunk * num_stages + rank,
                num_chunks * num_stages,
                torch.device("cpu"),
            )
            for chunk in range(num_chunks)
        ]
        is_interleaved = name == "interleaved"
        schedule = SCHEDULES[name](
            parts if is_interleaved else parts[0], num_microbatches, loss_fn=lambda y, target: (y - target).sum()
        )
        x = torch.ones(num_microbatches, width)
        given = {} if rank < num_stages - 1 else {"target": x}
        seconds = []
        for _ in range(num_timed + 1):
            distributed.barrier()
            begun = time.perf_counter()
            schedule.step(*([x] if rank == 0 else []), **given)
            distributed.barrier()
            seconds.append(time.perf_counter() - begun)
        found[name] = seconds[1:]
    distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
