"""What importing costs. The layers of packages are a contract in `make lint`."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jvarlen

ROOT = Path(jvarlen.__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
HEAVY = {"jax", "flax", "optax", "orbax", "grain", "matplotlib", "torch", "numba"}


def loaded_by(program, *args):
    """The top-level packages that a program has imported at its end."""
    report = "\nimport json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    run = subprocess.run(
        [sys.executable, "-c", program + report, *args], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_the_package_is_a_table_of_contents():
    assert not loaded_by("import jvarlen; dir(jvarlen); jvarlen.__version__") & (HEAVY | {"numpy"})
    assert all(hasattr(jvarlen, name) for name in jvarlen.__all__)
    assert set(jvarlen.__all__) <= set(dir(jvarlen))
    undocumented = [name for name in jvarlen.__all__ if not getattr(jvarlen, name).__doc__]
    assert not undocumented
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        jvarlen.nothing  # noqa: B018


@pytest.mark.parametrize("path", sorted(ROOT.rglob("__init__.py")), ids=lambda path: path.parent.name)
def test_names_that_are_imported_when_used_are_those_that_editors_see(path):
    text = path.read_text()
    if "lazy_imports(__name__)" not in text:
        return
    seen = [
        alias.name
        for block in ast.parse(text).body
        if isinstance(block, ast.If)
        for node in block.body
        for alias in node.names
    ]
    package = importlib.import_module(".".join(path.parent.relative_to(ROOT.parent).parts))
    assert sorted(seen) == sorted(package.__all__)
    assert all(hasattr(package, name) for name in seen)


def test_the_table_of_contents_is_short():
    assert len(jvarlen.__all__) <= 48


def test_importing_the_table_of_contents_imports_little():
    """`import numpy` imports some 150 modules."""
    program = "import sys; before = len(sys.modules); import jvarlen; print(len(sys.modules) - before)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert int(run.stdout) < 100


@pytest.mark.parametrize("package", ["planning", "data"])
def test_planning_and_data_need_no_accelerator_library(package):
    modules = [f"jvarlen.{package}.{path.stem}" for path in (ROOT / package).glob("*.py")]
    assert not loaded_by(f"import {', '.join(modules)}") & HEAVY


def test_the_plan_command_imports_what_it_uses(tmp_path):
    np.save(tmp_path / "lengths.npy", np.arange(1, 1001))
    program = f"""
import sys
from jvarlen.cli import main
assert main(["plan", {str(tmp_path / "lengths.npy")!r}, "--max-tokens", "4096"]) == 0
"""
    assert not loaded_by(program) & HEAVY


def test_help_imports_settings_only():
    program = """
import contextlib
from jvarlen.cli import main
for command in ("train", "plan", "report", "sample", "export", "measure"):
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
"""
    assert not loaded_by(program) & HEAVY


def test_the_list_of_commands_is_printed_without_anything_else():
    assert not loaded_by("from jvarlen.cli import main; main(['--help'])") & (HEAVY | {"numpy", "jaxtyping"})


@pytest.mark.multiprocess
def test_workers_that_measure_import_no_accelerator_library(tmp_path):
    program = tmp_path / "measuring.py"
    program.write_text(
        """
import sys
from jvarlen.data.measure import measure_lengths

class Telling:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        heavy = {"jax", "flax", "optax", "orbax", "grain", "matplotlib", "torch", "numba"}
        return [0] * (1 + len(heavy & {name.split(".")[0] for name in sys.modules}))

if __name__ == "__main__":
    print(measure_lengths(Telling(), num_workers=1, progress=False).tolist())
"""
    )
    run = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert run.stdout.strip() == "[1, 1, 1, 1]"


def test_every_package_is_an_attribute():
    program = f"import jvarlen; print(*(getattr(jvarlen, name).__name__ for name in {PACKAGES}))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert run.stdout.split() == [f"jvarlen.{name}" for name in PACKAGES]


@pytest.mark.parametrize("directory", ["benchmarks", "examples"])
def test_what_users_read_takes_public_names_only(directory):
    private = [
        f"{path.name}: {node.module}"
        for path in (ROOT.parent / directory).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] in ("jvarlen", "torch_ref")
        and any(part.startswith("_") for part in [*node.module.split("."), *(alias.name for alias in node.names)])
    ]
    assert not private
