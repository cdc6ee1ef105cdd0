"""Packaging: the wheel that users install is whole, and stands without the checkout."""

import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import jvarlen

ROOT = Path(__file__).parents[1]
SOURCES = ["LICENSE", "README.md", "jvarlen", "pyproject.toml", "torch_ref"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheels of jvarlen and torch_ref, built from a copy of their sources, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        path = ROOT / name
        copy = shutil.copytree if path.is_dir() else shutil.copy2
        copy(path, folder / name)
    for project in (folder, folder / "torch_ref"):
        build = [sys.executable, "-m", "uv", "build", "--quiet", "--wheel", "--out-dir", folder / "dist", project]
        subprocess.run(build, check=True, capture_output=True, text=True)
    return sorted((folder / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    """A folder with the wheels alone; what they depend on comes from this environment."""
    folder = tmp_path_factory.mktemp("site")
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps"]
    command = [*uv, "--python", sys.executable, "--target", folder, *wheels]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder


def run(installed, folder, *args):
    """What a command prints in a folder that is not the checkout."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = subprocess.run(args, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert command.returncode == 0, command.stdout + command.stderr
    return command.stdout.strip()


@pytest.mark.slow
def test_each_wheel_holds_its_package_whole_and_typed(wheels):
    for package, wheel in zip(("jvarlen", "torch_ref"), wheels, strict=True):
        files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
        paths = [path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert files == {str(path.relative_to(ROOT)) for path in paths if path.name != "pyproject.toml"}
        assert f"{package}/py.typed" in files
        assert all(name.startswith(f"{package}/") for name in files)


@pytest.mark.slow
def test_torch_ref_needs_numpy_and_torch_alone(wheels, tmp_path):
    """As its wheel says, and as all of it runs beside them and what they need."""
    (wheel,) = (wheel for wheel in wheels if wheel.name.startswith("torch_ref-"))
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(files.read(name))
        files.extractall(tmp_path / "site")
    assert metadata["Name"] == "torch_ref"
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[\w-]+", line).group() for line in required} == {"numpy", "torch"}
    linked, needed = set(), ["numpy", "torch"]
    while needed:
        name = needed.pop()
        with suppress(importlib.metadata.PackageNotFoundError):  # of other platforms
            of_package = importlib.metadata.distribution(name)
            tops = {file.parts[0] for file in of_package.files if file.parts[0] not in ("..", "__pycache__")}
            for top in tops - linked:
                (tmp_path / "site" / top).symlink_to(of_package.locate_file(top))
            linked |= tops
            requires = [line for line in of_package.requires or () if "extra ==" not in line]
            needed += [re.match(r"[\w.-]+", line).group() for line in requires]
    program = [sys.executable, "-S", "-W", "error", ROOT / "tests" / "support" / "run_torch_alone.py"]
    (tmp_path / "empty").mkdir()
    assert re.search(r"^\d\d modules, \d\d+ lines of examples$", run(tmp_path / "site", tmp_path / "empty", *program))


@pytest.mark.slow
def test_outside_the_checkout_the_command_is_what_was_installed(installed, tmp_path):
    path = run(installed, tmp_path, sys.executable, "-c", "import jvarlen, torch_ref; print(jvarlen.__file__)")
    assert Path(path) == installed / "jvarlen" / "__init__.py"
    np.save(tmp_path / "lengths.npy", np.arange(1, 101))
    module = [sys.executable, "-m", "jvarlen"]
    for command in (module, [sys.executable, installed / "bin" / "jvarlen"]):
        assert run(installed, tmp_path, *command, "--version") == f"jvarlen {jvarlen.__version__}"
        printed = run(installed, tmp_path, *command, "plan", "lengths.npy", "--max-tokens", "400", "--max-shapes", "4")
        assert re.search(r"^digest [0-9a-f]{64}$", printed, re.MULTILINE)


def test_all_that_name_the_version_name_the_same():
    for name, pattern in (
        ("torch_ref/pyproject.toml", r'^version = "(.*)"$'),
        ("CITATION.cff", r"^version: (.*)$"),
        ("README.md", r"badge/version-(.*)-blue"),
        ("CHANGELOG.md", r"^## (\d\S*)"),
    ):
        assert re.findall(pattern, (ROOT / name).read_text(), re.MULTILINE)[0] == jvarlen.__version__, name


def test_every_lower_bound_is_stated_and_met_here():
    """Where the lowest versions themselves are installed, `make lowest` runs the tests."""
    from packaging.requirements import Requirement

    requirements = [Requirement(line) for line in importlib.metadata.requires("jvarlen")]
    others = [requirement for requirement in requirements if requirement.name != "jvarlen"]
    assert {requirement.name for requirement in others} >= {"jax", "flax", "optax", "numpy"}
    unbounded = [str(requirement) for requirement in others if ">=" not in str(requirement.specifier)]
    assert not unbounded
    wanting = [
        f"{requirement} but {importlib.metadata.version(requirement.name)}"
        for requirement in others
        if requirement.marker is None
        and not requirement.specifier.contains(importlib.metadata.version(requirement.name))
    ]
    assert not wanting
