"""A script that supervises processes that end in many ways; prints as JSON what came of each. Argument: a folder."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from jvarlen.distributed import elastic
from jvarlen.distributed.elastic import keep_training
from jvarlen.parallel import Layout, surviving_layout

LOSES_OTHERS = 2  # the exit code of a process that misses another one


class Case:
    """A training whose processes append to a file when they start, and when they have saved something."""

    def __init__(self, folder, how):
        folder.mkdir()
        self._folder, self._how = folder, how

    def run(self, start):
        with (self._folder / "starts").open("a") as file:
            file.write(f"{start.coordinator} {start.process_id} {os.environ['JAX_LOCAL_DEVICE_IDS']} {os.getpid()}\n")
        return self._how(self, start)

    def groups(self):
        """Place and identifier of each process, by the coordinator that its start has named."""
        groups = {}
        for line in (self._folder / "starts").read_text().splitlines():
            coordinator, *numbers = line.split()
            groups.setdefault(coordinator, []).append(tuple(map(int, numbers)))
        return groups

    def die_when_all_run(self, start, number=signal.SIGKILL):
        while len(self.groups()[start.coordinator]) < start.num_processes:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    def save(self):
        (self._folder / f"saved-{time.monotonic_ns()}").touch()

    def progress(self):
        return sorted(path.name for path in self._folder.glob("saved-*"))

    def outcome(self, **options):
        """The exit code or the error; the places of the processes, by start; those that still run."""
        try:
            code = keep_training(self.run, 4, progress=self.progress, **{"survivors": survivors} | options)
        except ValueError as error:
            code = str(error)
        groups = [sorted(group) for group in self.groups().values()]
        return {
            "code": code,
            "places": [[place for _, place, _ in group] for group in groups],
            "running": [pid for group in groups for *_, pid in group if runs(pid)],
        }


def survivors(alive):
    return surviving_layout(Layout(data=4), alive, 8).data


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def dies_once(process_id, number=signal.SIGKILL):
    """All wait for ever where one of four dies; fewer train to the end."""

    def how(case, start):
        if start.num_processes < 4:
            return 0
        if start.process_id == process_id:
            case.die_when_all_run(start, number)
        time.sleep(1.0 if number != signal.SIGKILL else 600)
        return LOSES_OTHERS

    return how


def comes_back(case, start):
    """Process 3 dies once; the others save, and stop when they are told to; then all train to the end."""
    if start.is_again and start.num_processes == 4:
        return 0
    if start.process_id == 3:
        case.die_when_all_run(start)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    if start.num_processes == 4:
        time.sleep(600)
    if start.process_id == 0:
        case.save()
        stopped.wait(600)
        case.save()
        return 143
    while len(case.progress()) < 2:  # before it stops itself, it misses process 0
        time.sleep(0.01)
    return LOSES_OTHERS


def stops_when_told(case, start):
    """All save and stop at SIGTERM, which the supervisor gets."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    if start.process_id == 0:
        time.sleep(0.5)
        os.kill(os.getppid(), signal.SIGTERM)
    stopped.wait(600)
    return 143


def always_crashes(case, start):
    if start.process_id == 0:
        raise LookupError("of the test")
    time.sleep(600)


def none_left(case, start):
    """Every process but one dies."""
    if start.process_id > 0:
        case.die_when_all_run(start)
    time.sleep(600)


def main():
    folder = Path(sys.argv[1])
    elastic._OTHERS_S = 4.0
    outcomes = {
        "ends": Case(folder / "ends", lambda case, start: 0).outcome(),
        "is wrong": Case(folder / "wrong", lambda case, start: 2).outcome(),
        "loses one": Case(folder / "one", dies_once(2)).outcome(),
        "loses process 0": Case(folder / "zero", dies_once(0)).outcome(),
        "is aborted": Case(folder / "aborted", dies_once(1, signal.SIGABRT)).outcome(),
        "stands still": Case(folder / "still", dies_once(1, signal.SIGSTOP)).outcome(),
        "is stopped": Case(folder / "stopped", stops_when_told).outcome(),
        "crashes": Case(folder / "crashes", always_crashes).outcome(),
    }
    elastic._RETURN_S = 0.1
    outcomes["comes back"] = Case(folder / "back", comes_back).outcome()
    few = {"survivors": lambda alive: surviving_layout(Layout(data=2, tensor=2), alive, 8).num_devices}
    outcomes["too few"] = Case(folder / "few", none_left).outcome(**few)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
