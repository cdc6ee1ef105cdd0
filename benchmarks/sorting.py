"""What does the distributed sort cost, against what it replaces: seconds, balance, growth, messages and memory?

Run `python benchmarks/sorting.py [--num-keys 8000000] [--quick]`. It takes a few minutes on an otherwise idle machine,
prints tables, and writes them with versions, hardware and a plot to `benchmarks/results/`. Every number of devices has
a process of its own, in `support/`; `sort_peers.py` does not use JAX. Needs the extras `torch` and `dev`.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from support import sort_tables
from support.sort_tables import KINDS, Sizes
from support.timing import COMPILE_FAST, RESULTS, report, table, versions_and_hardware
from tqdm import tqdm

from tests.support import processes

FOLDER = Path(__file__).parent
DEADLINE_S = 900


class Job(NamedTuple):
    """A question to a program, what that takes, and on how many devices or processes it is answered."""

    question: str
    settings: dict[str, Any]
    num_devices: int = 1
    num_processes: int = 1
    program: str = "sort_worker.py"


def default_sizes(num_keys: int) -> Sizes:
    """Sizes up to N, all of them multiples of all numbers of devices."""
    num_keys = max(num_keys, 12_800) // 16 * 16
    fourth = num_keys // 4 // 16 * 16
    return Sizes(
        num_keys=num_keys,
        num_devices=8,
        growth=tuple(num_keys // part // 16 * 16 for part in (800, 250, 80, 25, 8, 3, 1)),
        shards=(1, 2, 4, 8, 16),
        shard_keys=fourth,
        memory=(fourth // 4 // 16 * 16, fourth),
        balance_shards=(2, 4, 8),
        kinds=KINDS,
        balance_keys=200_003,
        process_keys=1_000_000,
        process_repeats=10,
        num_samples=1_000_000,
        gpu_keys=100_000_000,
    )


QUICK = Sizes(
    num_keys=3_200,
    num_devices=2,
    growth=(1_600, 3_200),
    shards=(1, 2),
    shard_keys=1_600,
    memory=(1_600,),
    balance_shards=(2,),
    kinds=KINDS[1:3],
    balance_keys=2_003,
    process_keys=1_000,
    process_repeats=1,
    num_samples=2_000,
    gpu_keys=3_200,
)


def make_jobs(sizes: Sizes, is_quick: bool) -> dict[str, Job]:
    def keys(dtype: str, *, with_payload: bool = False, with_peers: bool = False) -> Job:
        settings = {"num_rows": sizes.num_keys, "dtype": dtype, "with_payload": with_payload, "with_peers": with_peers}
        return Job("keys", settings, sizes.num_devices)

    rows = {"num_rows": sizes.process_keys, "repeats": sizes.process_repeats}
    few = rows | {"repeats": -(-sizes.process_repeats // 3)}  # of what takes seconds
    two_processes = [
        Job("processes", rows, num_processes=2),
        Job("torch_ref", rows, num_processes=2, program="sort_peers.py"),
        *(Job(name, few, num_processes=2, program="sort_peers.py") for name in ("gather", "pickled")),
    ]
    shards = {"num_rows": sizes.shard_keys, "memory_rows": sizes.memory}
    balance = {"num_rows": sizes.balance_keys, "kinds": sizes.kinds}
    variants = {
        "int32 keys": keys("int32", with_peers=True),
        "int32 keys and a payload": keys("int32", with_payload=True),
    }
    if not is_quick:
        variants |= {"int64 keys": keys("int64"), "float32 keys": keys("float32")}
    return {
        **variants,
        # Twice, so that the machine is as busy for all of them.
        **{
            f"2 processes, {job.question}, {time}": job
            for time in (("first",) if is_quick else ("first", "again"))
            for job in two_processes
        },
        "growth": Job("growth", {"sizes": sizes.growth}, sizes.num_devices),
        **{f"{p} shards": Job("shards", shards, p) for p in sizes.shards},
        **{f"balance of {p}": Job("balance", balance, p) for p in sizes.balance_shards},
        "plans": Job("plans", {"num_samples": sizes.num_samples}, sizes.num_devices),
        "GPU": Job("one device", {"num_rows": sizes.gpu_keys, "platform": "gpu"}),
    }


def in_groups(jobs: dict[str, Job], is_quick: bool) -> list[dict[str, Job]]:
    """Jobs that run in one process, or in the same few: each has its own, but for quick ones of the same kind."""
    if not is_quick:
        return [{name: job} for name, job in jobs.items()]
    groups: dict[Any, dict[str, Job]] = {}
    for name, job in jobs.items():
        is_elsewhere = job.settings.get("platform")  # a process of another platform is no good for the others
        kind = (job.program, job.num_devices, job.num_processes, is_elsewhere)
        groups.setdefault(kind, {})[name] = job
    return list(groups.values())


def run(jobs: dict[str, Job], is_quick: bool) -> dict[str, Any]:
    """What the process of some jobs has to say, or a list of what each of several has, by job."""
    one = next(iter(jobs.values()))
    questions = {name: [job.question, job.settings] for name, job in jobs.items()}
    with tempfile.TemporaryDirectory() as folder:
        processes.run(
            FOLDER / "support" / one.program,
            one.num_processes,
            json.dumps(questions),
            folder,
            COMPILE_FAST if is_quick else "",
            num_devices=one.num_devices,
            seconds=DEADLINE_S,
        )
        answers = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(one.num_processes)]
    return {name: [each[name] for each in answers] if len(answers) > 1 else answers[0][name] for name in jobs}


def busy_seconds() -> float | None:
    """Seconds that the cores of the machine have worked for others than this process and those it waited for."""
    try:
        counts = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts = map(int, counts[1:8])
    busy = (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])


def run_all(jobs: dict[str, Job], is_quick: bool) -> tuple[dict[str, Any], list[list[str]]]:
    """Answers by job, and for each group its jobs, its seconds and how many cores others used meanwhile."""
    answers: dict[str, Any] = {}
    rows = []
    with tqdm(in_groups(jobs, is_quick)) as bar:
        for group in bar:
            name = "; ".join(group)
            bar.set_description(name)
            start, busy_before = time.perf_counter(), busy_seconds()
            answers |= run(group, is_quick)
            seconds, busy_after = time.perf_counter() - start, busy_seconds()
            is_known = busy_before is not None and busy_after is not None
            cores = f"{max(0.0, busy_after - busy_before) / seconds:.1f}" if is_known else ""
            rows.append([name, f"{seconds:.0f}", cores])
    return answers, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--num-keys", type=int, default=8_000_000, help="of the largest sort; a multiple of 16 is taken"
    )
    parser.add_argument("--quick", action="store_true", help="few keys and devices, and no report")
    options = parser.parse_args()
    sizes = QUICK if options.quick else default_sizes(options.num_keys)
    answers, times = run_all(make_jobs(sizes, options.quick), options.quick)
    plot = None if options.quick else f"{datetime.date.today()}-sorting.png"
    lines = [
        f"# Sorting, {datetime.date.today()}",
        "",
        "Seconds are those of the fastest call, after one that is not counted; calls that are compared take turns. "
        "Ratios are of seconds of one run. Devices are XLA devices of one CPU.",
        "",
        *sort_tables.list_goals(sizes, answers),
        "",
        *sort_tables.compare_keys(sizes, answers),
        *sort_tables.compare_processes(sizes, answers),
        *sort_tables.compare_balance(sizes, answers),
        *sort_tables.compare_growth(sizes, answers),
        *([f"![Seconds over N and over devices]({plot})", ""] if plot else []),
        *sort_tables.compare_shards(sizes, answers),
        *sort_tables.compare_memory(sizes, answers),
        *sort_tables.compare_plans(sizes, answers),
        *sort_tables.compare_gpu(sizes, answers),
        "## What ran",
        "",
        f"Cores of others: how many of the {os.cpu_count()} other work on the machine used meanwhile. What uses all "
        "cores is slower then, what uses one is not, and the ratio of the two is worse than on a machine of one's "
        "own.",
        "",
        *table("work|seconds in all|cores of others", times),
        "",
        versions_and_hardware("jax", "jaxlib", "torch"),
    ]
    sort_tables.draw(sizes, answers).savefig(RESULTS / plot if plot else io.BytesIO(), dpi=110, format="png")
    report("sorting", lines, write=not options.quick)


if __name__ == "__main__":
    main()
