"""The commands of docs/many_devices.md and examples/launch, as they stand: by mpirun, a Slurm script and torchrun."""

import contextlib
import functools
import importlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from jvarlen.cli import main
from tests.support.processes import COMPILE_FAST, ROOT
from tests.support.run_fit import leave_pictures_empty
from tests.support.settings import changed

NUM_STEPS = 60
SECONDS = 120
# What jax.distributed derives of the number of a Slurm job.
FIRST_PORT, NUM_PORTS = 61440, 4096
AS_ANY_USER = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # on one core as well
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # the same for Open MPI 5
}
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: Debian has it in openmpi-bin")

SRUN = """#!/bin/bash
# Two tasks on this host, with the variables that Slurm sets; exits with the highest of their exit codes.
[ "$1" = --wait=60 ] && shift
export SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2
for id in 0 1; do
  SLURM_PROCID=$id SLURM_LOCALID=$id "$@" &
done
code=0
for task in 0 1; do
  wait -n
  ended=$?
  if [ $ended -gt $code ]; then code=$ended; fi
done
exit $code
"""


def block(language: str, containing: str, page: str = "docs/many_devices.md") -> str:
    """The one block of a page that is in a language and contains a text."""
    text = (ROOT / page).read_text()
    (found,) = (each for each in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if containing in each)
    return found


def launch_file(name: str) -> str:
    """One of the files that start a run."""
    return (ROOT / "examples" / "launch" / name).read_text()


def small_settings(data: Path, num_steps: int = NUM_STEPS) -> list[str]:
    """What makes a command of the page one of a few seconds; the rate is the same for any number of steps."""
    return [
        "--data", str(data), "--held-out-fraction", "0.1", "--max-steps", str(num_steps), "--num-epochs", "99",
        "--optimizer.warmup-fraction", "0", "--optimizer.final-fraction", "0.999999",
        "--no-progress", "--compile.cache-dir", str(data.parent / "compiled"),
        "--max-tokens", "64", "--max-shapes", "1", "--max-length", "16",
        "--decoder.num-layers", "1", "--decoder.width", "8", "--decoder.num-heads", "1",
    ]  # fmt: skip


JVARLEN = """
from jvarlen.cli import run
from tests.support.run_fit import leave_pictures_empty
leave_pictures_empty()
run()
"""
# In place of `python -m jvarlen.experimental.elastic`.
ELASTIC = """
import runpy, sys
from tests.support.run_fit import leave_pictures_empty
leave_pictures_empty()
sys.argv = sys.argv[2:]
runpy.run_module("jvarlen.experimental.elastic", run_name="__main__")
"""


class Place:
    """A folder to start commands in, where `jvarlen` is a small run that says which processes it has."""

    def __init__(self, folder: Path, data: Path, num_steps: int = NUM_STEPS):
        self.folder = folder
        (folder / "bin").mkdir()
        self._settings = shlex.join(small_settings(data, num_steps))
        self.write_training("jvarlen", JVARLEN)

    def write_training(self, name: str, program: str) -> None:
        """Puts a program of Python first on the path, which trains with small settings."""
        python = shlex.join([sys.executable, "-c", program])
        self.write_program(name, f'#!/bin/sh\necho $$ >> tasks\nexec {python} "$@" {self._settings}\n')

    def write_program(self, name: str, text: str) -> None:
        """Puts a program first on the path."""
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    @contextlib.contextmanager
    def started(self, script: str, **env: str) -> Iterator[subprocess.Popen]:
        """A script of bash that runs while the block does, with what it starts."""
        (self.folder / "tasks").write_text("")
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": COMPILE_FAST,
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "true",  # all compile the same few programs
        }
        with (self.folder / "output").open("w") as output:
            process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.folder,
                env=environment | {"OMP_NUM_THREADS": "1"} | env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                if process.poll() is None:
                    self.signal_tasks(signal.SIGKILL)
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait(20)

    def run(self, script: str, **env: str) -> int:
        """The exit code of a script of bash."""
        with self.started(script, **env) as process:
            return process.wait(SECONDS)

    def run_struck(self, script: str, *strikes: Callable[[], None], **env: str) -> int:
        """The same, where something happens after its first steps, and something else after its next ones."""
        with self.started(script, **env) as process:
            deadline = time.monotonic() + SECONDS
            for strike in strikes:
                num_before = len(self.losses())
                while len(self.losses()) <= num_before:
                    assert process.poll() is None, self.output
                    assert time.monotonic() < deadline, self.output
                    time.sleep(0.01)
                strike()
            return process.wait(SECONDS)

    def pids(self) -> list[int]:
        """The processes of `jvarlen` that were started."""
        return [int(pid) for pid in (self.folder / "tasks").read_text().split()]

    def kill_first(self, variable: str) -> None:
        """Kills process 0, which has 0 in a variable of its environment."""
        (first,) = (
            pid
            for pid in self.pids()
            if f"{variable}=0".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        )
        os.kill(first, signal.SIGKILL)

    def signal_tasks(self, signal_number: int) -> None:
        """Sends a signal to all that run of them."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)

    @property
    def output(self) -> str:
        """What the latest script has printed."""
        return (self.folder / "output").read_text()

    def losses(self) -> list[float]:
        """Those in the log of the one run here, step by step."""
        return losses_below(self.folder / "runs")


def losses_below(runs: Path) -> list[float]:
    logs = [path for path in runs.glob("*/metrics.jsonl") if "latest" not in path.parts]
    assert len(logs) <= 1
    lines = logs[0].read_text().splitlines(keepends=True) if logs else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    rows = [row for row in rows if "loss" in row]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["loss"] for row in rows]


def free_port(ports: range) -> int:
    for port in random.SystemRandom().sample(ports, len(ports)):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port
    raise OSError(f"no port of {ports} is free")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of short lines."""
    path = tmp_path_factory.mktemp("data") / "lines.txt"
    rng = random.Random(0)
    path.write_text("".join("".join(rng.choices("abcdef", k=rng.randint(3, 15))) + "\n" for _ in range(400)))
    return path


@pytest.fixture(scope="module")
def losses_alone(data: Path, compilation_cache: Path) -> list[float]:
    """Those of one process that nothing starts or stops."""
    runs = data.parent / "runs"
    with pytest.MonkeyPatch.context() as patch:
        leave_pictures_empty(patch.setattr)
        assert main(["train", *small_settings(data), "--num-microbatches", "8", "--runs-dir", str(runs)]) == 0
    return losses_below(runs)


@pytest.fixture
def place(tmp_path: Path, data: Path) -> Place:
    return Place(tmp_path, data)


@pytest.fixture
def configs(monkeypatch):
    """The settings of each call of `fit`, which trains nothing."""
    configs = []

    def fit(config):
        configs.append(config)
        return SimpleNamespace(summary=SimpleNamespace(interrupted=False))

    monkeypatch.setattr(importlib.import_module("jvarlen.runs.fit"), "fit", fit)
    return configs


@pytest.fixture
def parse(configs):
    """Gives the settings that a command would train with."""

    def parsed(command):
        assert main(shlex.split(command)[1:]) == 0
        return configs.pop()

    return parsed


def test_the_commands_given_by_hand_make_one_run_of_two_processes(parse):
    first, second = configs = [parse(command) for command in block("bash", "--process-id 0").splitlines()]
    assert first.hardware.process_id == 0
    assert first.has_processes
    assert second == changed(first, process_id=1)
    assert first.hardware.num_processes == len(configs)
    assert first.plan.num_microbatches % first.hardware.num_processes == 0


@pytest.mark.multiprocess
@needs_mpirun
def test_mpirun_passes_the_rank_on_where_nothing_detects_it(place):
    place.write_program("jvarlen", '#!/bin/sh\necho "$@"\n')
    assert place.run(block("bash", "OMPI_COMM_WORLD_RANK"), **AS_ANY_USER) == 0, place.output
    coordinator = f"--coordinator {socket.gethostname()}:29400 --num-processes 2 --process-id"
    assert sorted(re.findall("--coordinator.*", place.output)) == [f"{coordinator} 0", f"{coordinator} 1"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_batch_script_trains_to_the_end_over_requeues(place, losses_alone):
    """Slurm's commands are stand-ins: process 0 is killed once, and the job starts again."""
    place.write_program("srun", SRUN)
    place.write_program("scontrol", '#!/bin/sh\necho "$@" >> requeued\n')
    script = launch_file("train.slurm")
    job = free_port(range(FIRST_PORT, FIRST_PORT + NUM_PORTS)) - FIRST_PORT + 7 * NUM_PORTS
    requeued = f"requeue {job}\n"
    kill = functools.partial(place.kill_first, "SLURM_PROCID")
    assert place.run_struck(script, kill, SLURM_JOB_ID=str(job)) == 128 + signal.SIGKILL, place.output
    assert 0 < len(place.losses()) < NUM_STEPS
    assert (place.folder / "requeued").read_text() == requeued

    own_port = {"SLURM_JOB_ID": str(job), "JAX_COORDINATOR_PORT": str(free_port(range(20000, 30000)))}
    assert place.run(script, **own_port) == 0, place.output
    assert "Resumed" in place.output
    assert (place.folder / "requeued").read_text() == requeued
    np.testing.assert_allclose(place.losses(), losses_alone, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_survivors_finish_the_run_of_lost_processes(place, losses_alone):
    """The first of two is killed; tests/experimental/elastic/test_supervisor loses others, of four."""

    def kill_first():
        (supervisor,) = place.pids()
        workers = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()  # as they were started
        os.kill(int(workers[0]), signal.SIGKILL)

    place.write_training("python", ELASTIC)
    command = block("bash", "elastic 4", "jvarlen/experimental/elastic/README.md").replace("elastic 4", "elastic 2")
    assert place.run_struck(command, kill_first) == 0, place.output
    said = "jvarlen: process 0 was killed by SIGKILL; goes on from the last checkpoint with 1 of 2 processes"
    assert said in place.output
    np.testing.assert_allclose(place.losses(), losses_alone, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.multiprocess
@needs_mpirun
def test_the_loop_around_mpirun_goes_on_without_a_host_that_is_lost_until_it_is_stopped(tmp_path, data, losses_alone):
    """Both are this one. Once process 0 is killed, the second does not answer any more."""
    place = Place(tmp_path, data, num_steps=100_000)
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    if "(Open MPI) 4." not in version:
        pytest.skip("JAX detects Open MPI 4 alone")
    place.write_program("ssh", '#!/bin/sh\n[ "$6" = first ] || [ ! -e lost ]\n')
    mpirun = f'#!/bin/sh\nshift 4\nexec {shutil.which("mpirun")} -n "$(wc -l < alive)" "$@"\n'
    place.write_program("mpirun", mpirun)
    place.write_program("python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (place.folder / "hosts").write_text("# all\nfirst slots=8\nsecond slots=8")

    def lose_host():
        (place.folder / "lost").touch()
        place.kill_first("OMPI_COMM_WORLD_RANK")

    terminate = functools.partial(place.signal_tasks, signal.SIGTERM)
    assert place.run_struck(launch_file("mpirun.sh"), lose_host, terminate, **AS_ANY_USER) == 143, place.output
    assert len(place.pids()) == 3
    assert "Resumed" in place.output
    losses = place.losses()
    assert f"{len(losses)} steps are saved" in place.output
    np.testing.assert_allclose(losses[:NUM_STEPS], losses_alone[: len(losses)], rtol=1e-5)


@pytest.mark.parametrize("saves", ["runs/7/checkpoints/0", ""])
def test_the_batch_script_is_requeued_after_an_error_only_where_something_was_saved(place, saves):
    place.write_program("srun", f"#!/bin/sh\nmkdir -p runs {saves}\nexit 2\n")
    place.write_program("scontrol", '#!/bin/sh\necho "$@" >> requeued\n')
    for _ in range(2):
        assert place.run(launch_file("train.slurm"), SLURM_JOB_ID="7") == 2
    requeued = place.folder / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == ("requeue 7\n" if saves else "")


def test_the_job_of_kubernetes_starts_as_many_processes_as_it_has_pods(parse):
    (service, job) = yaml.safe_load_all(launch_file("kubernetes.yaml"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    command = script.replace("$JOB_COMPLETION_INDEX", "3").removeprefix("exec ")
    config = parse(command.strip())
    assert config.hardware.num_processes == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert config.hardware.process_id == 3
    assert config.plan.num_microbatches % config.hardware.num_processes == 0
    names = {service["metadata"]["name"], job["metadata"]["name"], service["spec"]["selector"]["job-name"]}
    assert names == {job["spec"]["template"]["spec"]["subdomain"]}
    assert config.hardware.coordinator.partition(":")[0] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"


def test_the_command_for_supervisors_is_one_that_starts_and_continues_a_run(parse):
    (command,) = re.findall(r"ExecStart=(.*)", launch_file("train.service"))
    config = parse(command)
    assert config.directory.run_dir == Path("/srv/training/run")
    assert not config.progress


@pytest.mark.slow
@pytest.mark.multiprocess
def test_torchrun_starts_the_program_and_its_replicas_read_every_sample_once(tmp_path):
    program = tmp_path / "train_torch.py"
    program.write_text(launch_file("train_torch.py"))
    command = shlex.split(block("bash", "torchrun").splitlines()[0])
    assert command[0] == "torchrun"
    assert command[-1] == program.name
    # As the page has it, but beside other torchruns, by an interpreter that is not on the path, and recorded.
    own = ["--master-addr=127.0.0.1", f"--master-port={free_port(range(20000, 30000))}"]
    recorder = [str(ROOT / "tests" / "support" / "run_launched.py"), str(tmp_path), str(program)]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1:-1], *own, *recorder],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        timeout=SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"\d+ steps, loss \d\.\d", ended.stdout)
    read = [np.load(tmp_path / f"ids_{rank}.npy") for rank in range(2)]
    assert min(map(len, read)) > 0
    assert np.sort(np.concatenate(read)).tolist() == list(range(200))
