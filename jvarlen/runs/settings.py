"""Resolves the settings of a run for its data, devices and model, once."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jaxtyping import Int64

from jvarlen.compiling.compile_options import CompileOptions, When
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.placement import Placement
from jvarlen.distributed.processes import is_main_process
from jvarlen.runs.config import AUTO, FitConfig, is_run_dir
from jvarlen.runs.model import RunModel, peak_rate
from jvarlen.runs.plan_config import PlanSettings, shards_of
from jvarlen.runs.saved_config import load_config

__all__ = ["RunSettings", "num_shards", "resolve"]

_DEMO_STEPS = 360  # enough to learn from the built-in corpus, in minutes on a CPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Resolved settings of a run."""

    config: FitConfig  # with what it leaves open filled in, as the directory of the run holds it
    plan: PlanSettings
    compile: CompileOptions
    progress: bool

    @property
    def max_epochs(self) -> float:
        """The most passes over the data; infinity where steps end training."""
        return self.config.num_epochs or (1 if self.config.max_steps is None else float("inf"))

    def num_epochs_over(self, lengths: Int64[np.ndarray, " N *2"]) -> float:
        """About how many epochs training takes: steps are nearly full, whatever the shapes."""
        budget = self.plan.budget
        most_tokens = (self.config.max_steps or np.inf) * budget.num_microbatches * budget.max_tokens
        return float(min(self.max_epochs, most_tokens / lengths.sum()))

    def on(self, layout: Layout | None) -> RunSettings:
        """The same with the layout that `parallel` comes to, with all its data shards."""
        parallel = None if layout is None else str(layout)
        hardware = dataclasses.replace(self.config.hardware, parallel=parallel, cluster=None)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, hardware=hardware))


def num_shards(config: FitConfig, placement: Placement | None) -> int:
    """Default number of microbatches of a step: that of the resumed run, or as the layout needs."""
    resumed = config.directory.resumed
    if config.plan.num_microbatches is None and resumed is not None and is_run_dir(resumed):
        return load_config(resumed / "config.json").plan.num_microbatches or 1
    if placement is None:
        return 1
    layout = placement.layout
    if config.hardware.parallel == AUTO:
        return layout.num_devices
    return shards_of(layout)


def resolve(
    config: FitConfig,
    plan: PlanSettings | None = None,
    model: RunModel | None = None,
    *,
    num_values: int | None = None,
    is_demo: bool = False,
) -> RunSettings:
    """Fills in what settings leave open.

    Args:
      config: the settings, as asked for.
      plan: resolved planning settings; None resolves them for one device and samples of `fit`.
      model: the decoder and the tokenizer; None takes those that the settings name.
      num_values: how many values a token of the data can have; None leaves the vocabulary as it is.
      is_demo: whether the data are the built-in corpus.
    """
    plan = plan or config.plan.resolve()
    decoder, tokenizer = model or RunModel(config.decoder, config.data.tokenizer)
    if num_values is not None:
        decoder = dataclasses.replace(decoder, vocab_size=num_values + decoder.begins_samples)
    max_steps = _DEMO_STEPS if is_demo and config.max_steps is config.num_epochs is None else config.max_steps
    options = config.compile
    # Compiling while steps run is faster; several processes compile before it by default.
    by_default: When = "background" if jax.process_count() == 1 else "ahead"
    when = "ahead" if config.dry_run else options.when or by_default
    config = dataclasses.replace(
        config,
        max_steps=max_steps,
        decoder=decoder,
        data=dataclasses.replace(config.data, tokenizer=tokenizer),
        optimizer=dataclasses.replace(config.optimizer, learning_rate=peak_rate(config, decoder)),
        plan=dataclasses.replace(
            config.plan,
            num_microbatches=plan.budget.num_microbatches,
            packing=plan.packing,
            overlong=plan.overlong,
        ),
    )
    return RunSettings(
        config=config,
        plan=plan,
        compile=dataclasses.replace(options, when=when, time_steps=options.time_steps is not False),
        progress=config.progress and is_main_process(),
    )
