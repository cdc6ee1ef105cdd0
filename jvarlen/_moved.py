"""Old module names, most from before the packages existed. They can be imported for one more release."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["install", "is_module"]

_PACKAGES = (
    "_common", "attention", "batches", "clusters", "compiling", "data", "distributed", "loading", "models", "parallel",
    "planning", "reports", "runs", "sorting", "testing", "training",
)  # fmt: skip
# What an old module held is in modules of other names; the rest kept theirs, in a package.
_RENAMED = """
    buckets=planning.buckets,planning.packing.row_lengths collate=loading.collate,batches.batches
    collectives=compiling.hlo
    compile_log=compiling.jax_log compiled_file=compiling.program_store costs=planning.cost_model course=runs.epochs
    curriculum=planning.order data_config=runs.config data_files=data.open
    datasets=data.tokens,data.split,data.stdlib_corpus,data.measure emission=planning.step_order
    evaluation=runs.loop,runs.summary executables=compiling.program_store html_page=reports.page
    html_report=reports.plan_page kernels=planning._kernels
    leaves=_common.pytree lr=training.learning_rate,training.rates lr_table=training.rates
    joint_packing=planning.packing.pack,planning.packing.placing packing=planning.packing.pack
    row_lengths=planning.packing.row_lengths planning.row_lengths=planning.packing.row_lengths
    planning.placing=planning.packing.placing
    measure=compiling.measure_buckets,runs.measure_command measure_samples=data.measure pairs=planning.pair_buckets
    partition_checks=testing.partition plan_checks=testing.plans plan_table=planning.steps
    planned_steps=planning.steps report=reports.histogram,reports.run_records,reports.run_figures
    reports.report=reports.histogram,reports.run_records run_lines=reports.figures
    svg_figures=reports.figures portable_errors=_common.worker_errors progress=_common.progress,runs.step_display
    recipe=compiling.lowering run_dir=runs.directory run_report=reports.run_page setting_checks=_common.checks
    sort=sorting.sample_sort sort_figures=sorting.balance source_texts=data.stdlib_corpus
    threads=planning._kernels
    train=training.step,training.train_state,training.losses,training.step_sums training_data=runs.data
    training_loop=runs.loop unplanned=compiling.mismatch
"""
_NOW = {old: new.split(",") for old, new in (entry.split("=") for entry in _RENAMED.split())}


def _modules_now(name: str) -> list[str]:
    """Where what an old module held is now; nothing for a name that none had."""
    root = Path(__file__).parent
    kept = [f"{package}.{name}" for package in _PACKAGES if (root / package / f"{name}.py").exists()]
    return _NOW.get(name, kept[:1])


class _Old(ModuleType):
    """An old module: what is asked of it is looked up where it is now."""

    def __getattr__(self, name: str) -> Any:
        now = _modules_now(self.__name__.removeprefix("jvarlen."))
        modules = (importlib.import_module(f"jvarlen.{module}") for module in now)
        if name == "__all__":
            return [each for module in modules for each in module.__all__]
        if not name.startswith("__"):
            for module in modules:
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __call__(self, *args: Any, **arguments: Any) -> Any:  # importing jvarlen.fit hides the function of that name
        return getattr(self, self.__name__.removeprefix("jvarlen."))(*args, **arguments)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.partition(".")
        is_old = package == "jvarlen" and _modules_now(name)
        return importlib.util.spec_from_loader(fullname, self) if is_old else None

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
    return name in _PACKAGES or bool(_modules_now(name))
