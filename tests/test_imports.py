"""The import graph: data flows one way, and each package stands without the other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jvarlen

ROOT = Path(jvarlen.__file__).parent

# In the order in which data flows; a module imports only modules above it.
LAYERS = [
    "files", "threads", "interrupts", "progress", "portable_errors", "checks", "lengths", "manifest",
    "sample_workers", "shard_files", "measure_samples", "curriculum", "pacing", "costs", "budget", "edges",
    "buckets", "stream_state", "streams", "pairs", "kernels", "batching", "packing", "row_lengths", "grouping",
    "emission", "plan_file", "plan_table", "planned_steps", "plan", "compare", "leaves", "distributed", "processes",
    "watchdog",
    "sortable_words", "shard_sort", "sharded_rows", "sort", "sort_figures", "ordered_file", "plan_places",
    "distributed_plan", "ids_digest", "sort_file", "collate", "masks", "attention", "plan_source", "shared_memory",
    "read_ahead", "loader", "collectives", "compile_log", "recompiles", "compilation_cache", "compile_options",
    "ledger", "step_clock", "unplanned", "row_search", "compiled_file", "recipe", "executables", "compiled_buckets",
    "compile", "lr_table", "lr", "train_state", "losses", "step_sums", "train", "pipeline", "checkpoint",
    "source_texts", "datasets", "mixtures",
    "content_key", "length_cache", "line_files", "tokenized", "arrow_files", "data_files", "models", "measure",
    "report", "wandb_process", "charts", "trackers", "setting_checks", "plan_config", "data_config", "config",
    "training_data", "course", "svg_figures", "html_page", "plan_figures", "html_report", "run_records",
    "run_lines", "run_figures", "run_report", "run_dir", "summary", "evaluation", "profiling", "task", "training_loop",
    "fit", "plan_checks", "partition_checks", "testing", "cli",
]  # fmt: skip
NUMPY_ONLY = LAYERS[: LAYERS.index("compare") + 1]
TORCH_LAYERS = [
    "checks", "lengths", "order", "rows", "costs", "edges", "buckets", "pacing", "packing", "row_lengths", "pairs",
    "batching", "streams", "mixtures", "plan_file", "plan_report", "assign", "emission", "plan", "lr", "loader",
    "model", "train", "unplanned", "graphs", "compile", "sort",
]  # fmt: skip


def imported(path):
    """Names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports of ours are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)  # a module, where it is one


def test_every_module_has_its_place():
    modules = {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"} | {"models"}
    assert modules == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_module_imports_only_modules_above_it(layer):
    paths = (ROOT / layer).glob("*.py") if (ROOT / layer).is_dir() else [ROOT / f"{layer}.py"]
    for path in paths:
        names = {name.split(".")[1] for name in imported(path) if name.startswith("jvarlen.")}
        assert names - {layer, "__version__"} <= set(LAYERS[: LAYERS.index(layer)])


def test_the_reference_has_layers_as_well():
    modules = {path.stem: path for path in (ROOT.parent / "torch_ref").glob("*.py") if path.stem != "__init__"}
    assert modules.keys() == set(TORCH_LAYERS)
    for layer, path in modules.items():
        names = {name.split(".")[1] for name in imported(path) if name.startswith("torch_ref.")}
        assert names <= set(TORCH_LAYERS[: TORCH_LAYERS.index(layer)]), layer


@pytest.mark.parametrize("directory", ["benchmarks", "examples"])
def test_what_users_read_takes_public_names_only(directory):
    ours = ("jvarlen", "torch_ref")
    private = [
        f"{path.name}: {name}"
        for path in (ROOT.parent / directory).rglob("*.py")
        for name in imported(path)
        if name.split(".")[0] in ours and any(part.startswith("_") for part in name.split("."))
    ]
    assert not private


@pytest.mark.parametrize("layer", NUMPY_ONLY)
def test_planning_is_numpy_only(layer):
    assert not {"jax", "flax", "optax", "torch", "grain", "orbax", "matplotlib"} & {
        name.split(".")[0] for name in imported(ROOT / f"{layer}.py")
    }


@pytest.mark.parametrize(("package", "other"), [("jvarlen", "torch"), ("torch_ref", "jax"), ("torch_ref", "jvarlen")])
@pytest.mark.slow
def test_each_package_stands_without_the_other(package, other):
    program = f"import sys, {package}; sys.exit({other!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_top_level_is_a_table_of_contents():
    assert len((ROOT / "__init__.py").read_text().splitlines()) < 60
    assert all(hasattr(jvarlen, name) for name in jvarlen.__all__)
    undocumented = [name for name in jvarlen.__all__ if not getattr(jvarlen, name).__doc__]
    assert not undocumented
