"""`jvarlen compile`: the train step of every bucket, compiled for devices that need not be here."""

from __future__ import annotations

import dataclasses

from jvarlen._common.files import check_outputs
from jvarlen.runs.commands.plan import PlannedData
from jvarlen.runs.config import FLAT, DataConfig, HardwareConfig, ProgramConfig

__all__ = ["CompileCommand"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileCommand(ProgramConfig):
    """Compile the train step of every bucket for devices that need not be here, and print which fit."""

    target: str = dataclasses.field()  # hides the default
    """The devices: 8xh100 or 2x8xh100, hosts × devices, of a100, h100 or h200; v5e:2x4, of v5e, v5p or v6e; or
    here. Their compilers come with the extras target-gpu and target-tpu."""
    data: PlannedData = dataclasses.field(default_factory=PlannedData, metadata=FLAT)
    """The data to plan."""
    parallel: str | None = None
    """As for train, on all devices of target; auto needs cluster."""
    cluster: str | None = None
    """With parallel auto, the devices and links to choose for: a known machine such as dgx-h100, or a file of one."""

    def run(self) -> int:
        """Plans, compiles, prints the compiler's figures, and saves them; returns 1 where a bucket does not fit."""
        from jvarlen.runs.fit import dry_run  # here: it imports JAX

        check_outputs({"out": self.out, "html": self.html}, *self.data.inputs)
        hardware, lengths = HardwareConfig(parallel=self.parallel, cluster=self.cluster), self.data.read_lengths()
        data = self.data if lengths is None else DataConfig()
        report = dry_run(self.run_config(data=data, hardware=hardware, dry_run=True), lengths)
        return int(report is not None and report.fits is False)
