"""Runs pytest with XLA's compilers for GPUs and TPUs, which are downloaded once and kept among the user's caches.

Usage: python -m tests.targets.compilers ARGUMENTS OF PYTEST. Where one cannot be had, it says why and does without.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import jax

from jvarlen._common.files import default_cache_dir

EXTRAS = {"target-gpu": "GPUs", "target-tpu": "TPUs"}
SECONDS = 240  # for both
FREE_BYTES = 6 * 10**9  # without which nothing is downloaded: other tests write as well


class CannotBeHadError(Exception):
    """A compiler is not here and could not be downloaded."""


def packages_of(extra: str, deadline: float) -> Path:
    """The directory of the packages that an extra adds to those installed here; raises CannotBeHadError."""
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    requirements = pyproject["project"]["optional-dependencies"][extra]
    what = repr((requirements, jax.__version__, sys.implementation.cache_tag))
    kept = default_cache_dir() / "compilers" / f"{extra}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"
    if kept.is_dir():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(kept.parent).free) < FREE_BYTES:
        raise CannotBeHadError(f"{free / 1e9:.1f} GB are free in {kept.parent}, and {FREE_BYTES / 1e9:.0f} GB needed")
    with tempfile.TemporaryDirectory(dir=kept.parent) as directory:
        made = Path(directory)
        _pip(made, deadline, "--dry-run", "--report", str(made / "report.json"), *requirements)
        missing = [each["metadata"] for each in json.loads((made / "report.json").read_text())["install"]]
        names = [f"{each['name']}=={each['version']}" for each in missing]
        _pip(made, deadline, "--no-deps", "--no-compile", "--target", str(made / "packages"), *names)
        if not kept.is_dir():  # another clone may have made it meanwhile
            (made / "packages").rename(kept)
    return kept


def _pip(made: Path, deadline: float, *args: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    try:
        subprocess.run(
            [*command, "--only-binary", ":all:", *args],
            env=os.environ | {"TMPDIR": str(made)},
            timeout=max(deadline - time.monotonic(), 0),
            capture_output=True,
            text=True,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotBeHadError(f"downloading took longer than {SECONDS} seconds") from error
    except subprocess.CalledProcessError as error:
        raise CannotBeHadError((error.stderr.strip().splitlines() or ["pip failed"])[-1]) from error


def main() -> int:
    deadline = time.monotonic() + SECONDS
    found = []
    for extra, devices in EXTRAS.items():
        try:
            found.append(str(packages_of(extra, deadline)))
        except (CannotBeHadError, OSError) as error:
            print(f"skipped: XLA's compiler for {devices} cannot be had: {error}", flush=True)
    if not found:
        return 0
    paths = os.pathsep.join([*found, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-m", "pytest", *sys.argv[1:]], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
