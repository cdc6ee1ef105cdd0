"""A script that supervises processes that end in many ways; prints as JSON what came of each. Argument: a folder."""

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jvarlen.experimental.elastic import keep_training, supervisor, surviving_layout
from jvarlen.parallel import Layout

MISSES_OTHERS = 2  # the exit code of a process that misses another one
FOR_EVER_S = 600


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A training whose processes append to a file when they start, and when they have saved something."""

    folder: Path
    how: Callable[..., Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
    devices: str | None = None

    def supervise(self):
        """Forks a supervisor; its process."""
        self.folder.mkdir()
        pid = os.fork()
        if pid == 0:
            for name, value in ({"_OTHERS_S": 4.0} | self.constants).items():
                setattr(supervisor, name, value)
            if self.devices is not None:
                os.environ["JAX_LOCAL_DEVICE_IDS"] = self.devices
            options = {"survivors": survivors} | self.options
            try:
                code = keep_training(self.run, 4, progress=self.progress, **options)
            except ValueError as error:
                code = str(error)
            (self.folder / "code").write_text(json.dumps(code))
            os._exit(0)
        return pid

    def run(self, start):
        with (self.folder / "starts").open("a") as file:
            file.write(f"{start.coordinator} {start.process_id} {os.environ['JAX_LOCAL_DEVICE_IDS']} {os.getpid()}\n")
        return self.how(self, start)

    def groups(self):
        """Worker and identifier of each process, by the coordinator that its start has named."""
        groups = {}
        for line in (self.folder / "starts").read_text().splitlines():
            coordinator, *numbers = line.split()
            groups.setdefault(coordinator, []).append(tuple(map(int, numbers)))
        return groups

    def wait_for_all(self, start):
        """The identifiers of all processes of a start, once all run."""
        while len(group := self.groups()[start.coordinator]) < start.num_processes:
            time.sleep(0.01)
        return [pid for *_, pid in sorted(group)]

    def die_when_all_run(self, start, number=signal.SIGKILL):
        self.wait_for_all(start)
        os.kill(os.getpid(), number)

    def save(self):
        (self.folder / f"saved-{time.monotonic_ns()}").touch()

    def progress(self):
        return sorted(path.name for path in self.folder.glob("saved-*"))

    def wait_for_saved(self, number):
        while len(self.progress()) < number:
            time.sleep(0.01)

    def outcome(self):
        """The exit code or the error; the workers of the processes, by start; those that still run."""
        code = self.folder / "code"
        groups = [sorted(group) for group in self.groups().values()]
        deadline = time.monotonic() + 10
        while (running := [pid for group in groups for *_, pid in group if runs(pid)]) and time.monotonic() < deadline:
            time.sleep(0.01)
        return {
            "code": json.loads(code.read_text()) if code.exists() else "killed",
            "workers": [[worker for _, worker, _ in group] for group in groups],
            "running": running,
        }


def survivors(alive):
    return surviving_layout(Layout(data=4), alive, 8).data


def runs(pid):
    return state_of(pid) not in "Z"


def state_of(pid):
    """As in /proc: R, S, T if it is stopped, Z if it has ended; nothing if nobody remembers it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


class CountedSigterm:
    """Counts the times that this process gets SIGTERM, which does nothing else."""

    def __init__(self):
        self.times = 0
        signal.signal(signal.SIGTERM, self)

    def __call__(self, number, frame):
        self.times += 1

    def wait(self):
        while not self.times:
            time.sleep(0.01)


def returns(value):
    return lambda case, start: value


def dies_once(process_id, number=signal.SIGKILL):
    """One of four dies. The others wait for it if it is killed, and miss it otherwise; fewer train to the end."""

    def how(case, start):
        if start.num_processes < 4:
            return 0
        if start.process_id == process_id:
            case.die_when_all_run(start, number)
        dead = case.wait_for_all(start)[process_id]
        while number == signal.SIGKILL or state_of(dead) not in "ZT":
            time.sleep(0.01)
        time.sleep(0.3)
        return MISSES_OTHERS

    return how


def stalls_once(case, start):
    """All end with an error, once something is saved."""
    if start.is_again:
        return 0
    if start.process_id == 0:
        case.save()
    case.wait_for_saved(1)
    return 2


def comes_back(case, start):
    """Process 3 dies once; the others save, and stop at SIGTERM; then all train to the end."""
    if start.is_again and start.num_processes == 4:
        return 0
    if start.process_id == 3:
        case.die_when_all_run(start)
    sigterm = CountedSigterm()
    if start.num_processes == 4:
        time.sleep(FOR_EVER_S)
    if start.process_id == 0:
        case.save()
        sigterm.wait()
        case.save()
        return 143
    case.wait_for_saved(2)  # before it stops itself, it misses process 0
    return MISSES_OTHERS


def stops_when_told(case, start):
    """All save and stop at SIGTERM, which the supervisor gets."""
    sigterm = CountedSigterm()
    case.save()
    if start.process_id == 0:
        case.wait_for_saved(4)
        os.kill(os.getppid(), signal.SIGTERM)
    sigterm.wait()
    return 143


def stops_but_one(case, start):
    """As `stops_when_told`, while one is stopped and does nothing."""
    if start.process_id == 1:
        case.save()
        os.kill(os.getpid(), signal.SIGSTOP)
    return stops_when_told(case, start)


def stops_at_the_second(case, start):
    """The supervisor gets SIGTERM twice."""
    sigterm = CountedSigterm()
    case.save()
    if start.process_id == 0:
        case.wait_for_saved(4)
        os.kill(os.getppid(), signal.SIGTERM)
        sigterm.wait()
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(FOR_EVER_S)


def kills_its_supervisor(case, start):
    if start.process_id == 0:
        case.wait_for_all(start)
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOR_EVER_S)


def always_crashes(case, start):
    if start.process_id == 0:
        raise LookupError("of the test")
    time.sleep(FOR_EVER_S)


def none_left(case, start):
    """Every process but one dies."""
    if start.process_id > 0:
        case.die_when_all_run(start)
    time.sleep(FOR_EVER_S)


def main():
    folder = Path(sys.argv[1])

    def case(name, how, **settings):
        return name, Case(folder=folder / name.replace(" ", "-"), how=how, **settings)

    at_once = {"_RETURN_S": 0.1}
    few = {"survivors": lambda alive: surviving_layout(Layout(data=2, tensor=2), alive, 8).num_devices}
    cases = dict(
        [
            case("ends", returns(0)),
            case("is given GPUs", returns(0), devices="9,7,5,3"),
            case("is wrong", returns(2)),
            case("returns nothing", returns(None)),
            case("loses one", dies_once(2)),
            case("is aborted", dies_once(1, signal.SIGABRT)),
            case("stalls", stalls_once),
            case("stands still", dies_once(1, signal.SIGSTOP)),
            case("comes back", comes_back, constants=at_once),
            case("is stopped", stops_when_told),
            case("is stopped while one stands still", stops_but_one),
            case("is stopped twice", stops_at_the_second),
            case("is killed", kills_its_supervisor),
            case("crashes", always_crashes),
            case("too few", none_left, options=few, constants={"_AT_ONCE_S": 2.0}),
        ]
    )
    for pid in [case.supervise() for case in cases.values()]:
        os.waitpid(pid, 0)
    print(json.dumps({name: case.outcome() for name, case in cases.items()}))


if __name__ == "__main__":
    main()
