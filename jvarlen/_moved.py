"""Old module names from before the packages existed. They can be imported for one more release."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["install", "is_module"]

_PACKAGES = (
    "attention", "batches", "compiling", "data", "distributed", "loading", "models", "parallel", "planning", "reports",
    "runs", "sorting", "testing", "training",
)  # fmt: skip
# Where what an old module held is now, by its old name.
_MOVED: dict[str, tuple[str, ...]] = {
    "arrow_files": ("data.arrow_files",),
    "batching": ("planning.batching",),
    "buckets": (
        "planning.buckets",
        "planning.row_lengths",
    ),
    "budget": ("planning.budget",),
    "charts": ("runs.charts",),
    "checkpoint": ("training.checkpoint",),
    "checks": ("_common.checks",),
    "collate": (
        "loading.collate",
        "batches.batches",
    ),
    "collectives": ("compiling.hlo",),
    "compare": ("planning.compare",),
    "compilation_cache": ("compiling.compilation_cache",),
    "compile": ("compiling.compile",),
    "compile_log": ("compiling.jax_log",),
    "compile_options": ("compiling.compile_options",),
    "compiled_buckets": ("compiling.compiled_buckets",),
    "compiled_file": ("compiling.program_store",),
    "config": ("runs.config",),
    "content_key": ("data.content_key",),
    "costs": ("planning.cost_model",),
    "course": ("runs.epochs",),
    "curriculum": ("planning.order",),
    "data_config": ("runs.config",),
    "data_files": ("data.open",),
    "datasets": (
        "data.tokens",
        "data.split",
        "data.stdlib_corpus",
        "data.measure",
    ),
    "distributed_plan": ("sorting.distributed_plan",),
    "edges": ("planning.edges",),
    "emission": ("planning.step_order",),
    "evaluation": ("runs.evaluation",),
    "executables": ("compiling.program_store",),
    "files": ("_common.files",),
    "grouping": ("planning.grouping",),
    "html_page": ("reports.page",),
    "html_report": ("reports.plan_page",),
    "ids_digest": ("loading.ids_digest",),
    "interrupts": ("_common.interrupts",),
    "kernels": ("planning._kernels",),
    "leaves": ("_common.pytree",),
    "ledger": ("compiling.ledger",),
    "length_cache": ("data.length_cache",),
    "lengths": ("planning.lengths",),
    "line_files": ("data.line_files",),
    "loader": ("loading.loader",),
    "losses": ("training.losses",),
    "lr": (
        "training.learning_rate",
        "training.rates",
    ),
    "lr_table": ("training.rates",),
    "manifest": ("training.manifest",),
    "masks": ("attention.masks",),
    "measure": (
        "compiling.measure_buckets",
        "runs.measure_costs",
    ),
    "measure_samples": ("data.measure",),
    "mixtures": ("data.mixtures",),
    "ordered_file": ("sorting.ordered_file",),
    "pacing": ("planning.pacing",),
    "packing": ("planning.packing",),
    "pairs": ("planning.pair_buckets",),
    "partition_checks": ("testing.partition",),
    "pipeline": ("parallel.pipeline",),
    "plan": ("planning.plan",),
    "plan_checks": ("testing.plans",),
    "plan_config": ("runs.plan_config",),
    "plan_figures": ("reports.plan_figures",),
    "plan_file": ("planning.plan_file",),
    "plan_places": ("sorting.plan_places",),
    "plan_source": ("loading.plan_source",),
    "plan_table": ("planning.steps",),
    "planned_steps": ("planning.steps",),
    "portable_errors": ("_common.worker_errors",),
    "processes": ("distributed.processes",),
    "profiling": ("runs.profiling",),
    "progress": (
        "_common.progress",
        "runs.step_display",
    ),
    "read_ahead": ("loading.read_ahead",),
    "recipe": ("compiling.lowering",),
    "recompiles": ("compiling.recompiles",),
    "report": ("reports.report",),
    "row_lengths": ("planning.row_lengths",),
    "row_search": ("compiling.row_search",),
    "run_dir": ("runs.directory",),
    "run_figures": ("reports.run_figures",),
    "run_lines": ("reports.run_lines",),
    "run_records": ("reports.run_records",),
    "run_report": ("reports.run_page",),
    "sample_workers": ("data.sample_workers",),
    "setting_checks": ("_common.checks",),
    "shard_files": ("data.shard_files",),
    "shard_sort": ("sorting.shard_sort",),
    "sharded_rows": ("sorting.sharded_rows",),
    "shared_memory": ("loading.shared_memory",),
    "sort": ("sorting.sample_sort",),
    "sort_figures": ("sorting.balance",),
    "sort_file": ("sorting.sort_file",),
    "sortable_words": ("sorting.sortable_words",),
    "source_texts": ("data.stdlib_corpus",),
    "step_clock": ("compiling.step_clock",),
    "step_sums": ("training.step_sums",),
    "stream_state": ("planning.stream_state",),
    "streams": ("planning.streams",),
    "summary": ("runs.summary",),
    "svg_figures": ("reports.svg_figures",),
    "task": ("runs.task",),
    "threads": ("planning._kernels",),
    "tokenized": ("data.tokenized",),
    "trackers": ("runs.trackers",),
    "train": (
        "training.step",
        "training.train_state",
        "training.losses",
        "training.step_sums",
    ),
    "train_state": ("training.train_state",),
    "training_data": ("runs.data",),
    "training_loop": ("runs.loop",),
    "unplanned": ("compiling.mismatch",),
    "wandb_process": ("runs.wandb_process",),
    "watchdog": ("distributed.watchdog",),
}


class _Old(ModuleType):
    """An old module: what is asked of it is looked up where it is now."""

    def __getattr__(self, name: str) -> Any:
        moved_to = _MOVED[self.__name__.removeprefix("jvarlen.")]
        modules = (importlib.import_module(f"jvarlen.{module}") for module in moved_to)
        if name == "__all__":
            return [each for module in modules for each in module.__all__]
        if not name.startswith("__"):
            for module in modules:
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return importlib.util.spec_from_loader(fullname, self) if package == "jvarlen" and name in _MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Old(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return


def install() -> None:
    """Lets the old names be imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def is_module(name: str) -> bool:
    """Whether `jvarlen` has a package, or had a module, of this name."""
    return name in _PACKAGES or name in _MOVED
