"""Distributed sort in torch_ref: every process has its share of NumPy's order, as devices have in jvarlen."""

import json
import re
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import distributed

import torch_ref
from tests.support import processes
from tests.support.sort_inputs import KINDS, keys_of_kind, order_of
from torch_ref.parallel.sort import _exchange, _Place

from . import run_sort

# Four take their time to start where cores are few.
PROCESSES = (2, pytest.param(4, marks=pytest.mark.slow))
PROGRAM = Path(run_sort.__file__)
NUM_ROWS = 3001
SHARES = ("even", "growing from none", "all on the last")
RESULTS = ("interleaved", "block")
NAN = np.nan


class Problem(NamedTuple):
    """Keys of all processes together, and how they are sorted."""

    keys: NDArray[Any]
    case: run_sort.Case


def split_rows(num_rows, num_processes, shares):
    powers = {"even": 1, "growing from none": 3, "all on the last": 60}
    ends = (np.arange(num_processes + 1) / num_processes) ** powers[shares]
    return np.diff((ends * num_rows).astype(np.int64)).tolist()


def wide_keys(dtype, num_rows=300):
    """Return keys of a dtype with its limits among them, many twice, and integers that no float tells apart."""
    rng = np.random.default_rng(2)
    if np.issubdtype(dtype, np.floating):
        limits = np.finfo(dtype)
        special = [np.inf, -np.inf, 0.0, -0.0, limits.max, limits.min, limits.smallest_subnormal, -limits.tiny]
        return rng.choice(np.array([*special, *rng.normal(size=20)], dtype), num_rows)
    limits = np.iinfo(dtype)
    near = [limits.max, limits.max - 1, limits.max - 2, limits.max // 2 + 1, limits.min, limits.min + 1, 0, 1, 2]
    return rng.choice(np.array(near, dtype), num_rows)


@cache
def solvable(num_processes):
    """Return problems that have a solution, by name."""
    rng = np.random.default_rng(num_processes)
    problems = {}

    def add(name, keys, shares="even", **case):
        sizes = split_rows(len(keys), num_processes, shares)
        problems[name] = Problem(keys, run_sort.Case(sizes=sizes, **case))

    for kind in KINDS:
        for shares in SHARES:
            result = RESULTS[len(problems) % 2]
            add(f"{kind}, {shares}", keys_of_kind(kind, NUM_ROWS, rng), shares, options={"result": result})
    for oversampling in (1, 50):
        add(f"oversampling {oversampling}", keys_of_kind("zipf", 900, rng), options={"oversampling": oversampling})
    for num_rows in (0, 1, num_processes - 1, num_processes, 2 * num_processes + 1, 97):
        for result in RESULTS:
            few = rng.integers(-3, 4, num_rows, np.int32)
            add(f"{num_rows} rows, {result}", few, options={"result": result}, payload=True)
            add(f"{num_rows} rows, {result}, {SHARES[2]}", few, "all on the last", options={"result": result})
    for dtype in (np.int8, np.int16, np.int64, np.uint8, np.uint16, np.uint32, np.uint64):
        add(np.dtype(dtype).name, wide_keys(dtype))
    for dtype in (np.float16, np.float32, np.float64):
        add(np.dtype(dtype).name, wide_keys(dtype))
        with_nan = np.where(rng.random(300) < 0.3, NAN, wide_keys(dtype)).astype(dtype)
        add(f"{np.dtype(dtype).name} with NaN", with_nan, options={"nan": "last"})
    add("beyond 2**53", rng.integers(2**60, 2**60 + 40, 500))
    add("payload", rng.integers(0, 30, 700, np.int32), "growing from none", options={"result": "block"}, payload=True)
    # Half the bits of a float32 are a bfloat16.
    halved = (wide_keys(np.float32).view(np.uint32) & 0xFF800000).view(np.float32)
    add("bfloat16", np.where(np.isfinite(halved), halved, 1).astype(np.float32), dtype="bfloat16")
    return problems


def groups(num_processes):
    keys = keys_of_kind("zipf", 201, np.random.default_rng(0))
    members = list(range(1, num_processes, 2))
    sizes = [0] * num_processes
    for rank, size in zip(members, split_rows(201, len(members), "even"), strict=True):
        sizes[rank] = size
    return {"odd ranks": Problem(keys, run_sort.Case(sizes=sizes, group=members))}


@cache
def refused(num_processes):
    """Return problems that are an error on all processes, and the pattern of what it must say."""
    last = num_processes - 1
    sizes = split_rows(200, num_processes, "even")
    others = rf"{list(range(last))}".replace("[", r"\[").replace("]", r"\]")
    keys = np.arange(200.0)[::-1].copy()
    gaps = np.where(np.isin(np.arange(200), [3, 60, 120, 199]), NAN, keys)
    many = np.where(np.arange(200) >= 180, NAN, keys)
    differing = {
        "dtype": ({"dtype": "float32"}, rf"dtype: torch.float64 on ranks {others}; torch.float32 on ranks \[{last}\]"),
        "result": ({"options": {"result": "block"}}, rf"result: interleaved on ranks {others}; block .* \[{last}\]"),
        "oversampling": ({"options": {"oversampling": 5}}, rf"oversampling: 4 on ranks {others}; 5 .* \[{last}\]"),
        "nan": ({"options": {"nan": "last"}}, rf"nan: raise on ranks {others}; last on ranks \[{last}\]"),
        "payload": ({"payload": True}, rf"payload: no payload on ranks {others}; .*'pair'.* on ranks \[{last}\]"),
        "no result": ({"options": {"result": "blocks"}}, rf"^rank {last}: result must be .* 'blocks'$"),
        "no number": ({"options": {"oversampling": 0}}, rf"^rank {last}: oversampling must be .* 0$"),
        "no rule": ({"options": {"nan": "first"}}, rf"^rank {last}: nan must be .* 'first'$"),
        "matrix": ({"dimensions": 2}, rf"^rank {last}: keys must be a dense 1-D tensor, got shape \({sizes[-1]}, 1\)$"),
        "bools": ({"dtype": "bool"}, rf"^rank {last}: keys must be integers or floats .* torch.bool$"),
    }
    problems = {
        name: (Problem(keys, run_sort.Case(sizes=sizes, last=case)), pattern)
        for name, (case, pattern) in differing.items()
    }
    problems["wrong everywhere"] = (
        Problem(keys, run_sort.Case(sizes=sizes, dtype="complex64")),
        "\n".join(rf"rank {rank}: keys must be .* torch.complex64" for rank in range(num_processes)),
    )
    problems["some NaN"] = (Problem(gaps, run_sort.Case(sizes=sizes)), r"ids \[3, 60, 120, 199\], 4 in all")
    problems["many NaN"] = (Problem(many, run_sort.Case(sizes=sizes)), r"ids \[180, 181, 182, 183, 184\], 20 in all")
    return problems


def named(problems):
    """Return parameters: numbers of processes, and the names of their problems."""
    two = [pytest.param(2, name) for name in problems(2)]
    return two + [pytest.param(4, name, marks=pytest.mark.slow) for name in problems(4)]


class Sorted(NamedTuple):
    """What the processes wrote, by rank."""

    shares: list[dict[str, NDArray[Any]]]
    reports: list[dict[str, Any]]

    def share(self, name, rank):
        prefix = f"{name}/"
        return {key.removeprefix(prefix): array for key, array in self.shares[rank].items() if key.startswith(prefix)}


def write_cases(folder, problems, **settings):
    np.savez(folder / "cases.npz", **{name: problem.keys for name, problem in problems.items()})
    cases = {name: problem.case for name, problem in problems.items()}
    settings = {"timeout_s": 60, "absent_rank": None, "absent_s": 0, "cases": cases} | settings
    (folder / "cases.json").write_text(json.dumps(settings))


def read_sorted(folder, num_processes):
    shares = [dict(np.load(folder / f"{rank}.npz")) for rank in range(num_processes)]
    return Sorted(shares, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)])


@pytest.fixture(scope="module")
def sorted_by(tmp_path_factory):
    """Return a function from a number of processes to what they wrote; each number is started once."""
    done = {}

    def sort(num_processes):
        if num_processes not in done:
            folder = tmp_path_factory.mktemp(f"sorted_by_{num_processes}")
            problems = solvable(num_processes) | groups(num_processes)
            problems |= {f"refused: {name}": problem for name, (problem, _) in refused(num_processes).items()}
            write_cases(folder, problems)
            processes.run(PROGRAM, num_processes, str(folder))
            done[num_processes] = read_sorted(folder, num_processes)
        return done[num_processes]

    return sort


def places(num_rows, num_processes, result, rank):
    per_process = -(-num_rows // num_processes)
    if result == "block":
        return slice(rank * per_process, (rank + 1) * per_process)
    return slice(rank, None, num_processes)


def assert_share(share, problem, num_processes, rank):
    """Hold a process's share to what NumPy makes of all keys on one."""
    result = problem.case.get("options", {}).get("result", "interleaved")
    indices = order_of(problem.keys)[places(len(problem.keys), num_processes, result, rank)]
    assert share["indices"].dtype == np.int64
    assert share["indices"].tolist() == indices.tolist()
    assert share["keys"].dtype == problem.keys.dtype
    assert share["keys"].tobytes() == problem.keys[indices].tobytes()  # with the sign of zeros
    payload = run_sort.make_payload(torch.from_numpy(indices)) if problem.case.get("payload") else {}
    assert set(share) == {"keys", "indices", *payload}
    for name, rows in payload.items():
        assert share[name].dtype == rows.numpy().dtype
        assert share[name].tolist() == rows.tolist()


# Several processes


@pytest.mark.multiprocess
@pytest.mark.parametrize(("num_processes", "name"), named(solvable))
def test_every_process_has_its_share_of_numpys_order(sorted_by, num_processes, name):
    """By key, ties by index, evenly spread, for any keys on any shards."""
    problem = solvable(num_processes)[name]
    for rank in range(num_processes):
        assert "error" not in sorted_by(num_processes).reports[rank][name]
        assert_share(sorted_by(num_processes).share(name, rank), problem, num_processes, rank)


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_processes", PROCESSES)
def test_a_group_sorts_alone(sorted_by, num_processes):
    """Ranks are those in the group; on others it is an error."""
    found = sorted_by(num_processes)
    problem = groups(num_processes)["odd ranks"]
    members = problem.case["group"]
    for rank in range(num_processes):
        if rank in members:
            share = found.share("odd ranks", rank)
            assert_share(share, problem, len(members), members.index(rank))
        else:
            assert f"process {rank} is not in the group" in found.reports[rank]["odd ranks"]["error"]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("num_processes", "name"), named(refused))
def test_what_is_wrong_on_one_process_is_an_error_on_all(sorted_by, num_processes, name):
    """The same message everywhere, which names ranks or rows; sorting goes on afterwards."""
    errors = {report[f"refused: {name}"]["error"] for report in sorted_by(num_processes).reports}
    assert len(errors) == 1
    assert re.search(refused(num_processes)[name][1], errors.pop())


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_processes", PROCESSES)
def test_no_process_gets_more_rows_than_promised(sorted_by, num_processes):
    """N / p * (1 + (1 + 1/p) / k) + 1 while rows are on their way, whatever the keys and shards."""
    most = 0.0
    for name, problem in solvable(num_processes).items():
        num_rows = len(problem.keys)
        oversampling = problem.case.get("options", {}).get("oversampling", 4)
        bound = num_rows / num_processes * (1 + (1 + 1 / num_processes) / oversampling) + 1
        calls = [report[name]["calls"] for report in sorted_by(num_processes).reports]
        received = [call[3][2] if num_rows else 0 for call in calls]
        assert sum(received) == num_rows
        assert max(received) <= bound, name
        if num_rows == NUM_ROWS:
            most = max(most, max(received) / (num_rows / num_processes))
    # Otherwise there was nothing to bound.
    assert most > 1.02


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_processes", PROCESSES)
def test_collectives_and_bytes_are_those_documented(sorted_by, num_processes):
    """Two for samples and counts and two a column, after the arguments; rows travel twice."""
    for name, problem in solvable(num_processes).items():
        num_rows, case = len(problem.keys), problem.case
        for rank, report in enumerate(sorted_by(num_processes).reports):
            names, sent, received = zip(*report[name]["calls"], strict=True)
            assert names[0] == "all_gather_object"
            if not num_rows:
                assert len(names) == 1
                continue
            row_bytes = [2 if case.get("dtype") == "bfloat16" else problem.keys.itemsize, 8]
            row_bytes += [8, 8] if case.get("payload") else []
            assert names[1:] == ("all_to_all_single",) * (2 + 2 * len(row_bytes))
            held, brought = case["sizes"][rank], received[3]
            stride = -(-num_rows // (case.get("options", {}).get("oversampling", 4) * num_processes**2))
            assert sent[1] == num_processes * (held // stride) * row_bytes[0]
            assert sent[2] == 8 * num_processes**2
            assert sent[3:] == tuple(rows * width for rows in (held, brought) for width in row_bytes)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("absent_s", [0, 120])
def test_a_process_that_is_gone_or_stuck_does_not_hang_the_others(tmp_path, absent_s):
    """They end with an error, at the latest after the group's timeout."""
    write_cases(tmp_path, {"zipf": solvable(2)["zipf, even"]}, timeout_s=6, absent_rank=1, absent_s=absent_s)
    began = time.monotonic()
    with processes.started(PROGRAM, 2, str(tmp_path)) as pair:
        assert pair.processes[0].wait(30) > 0
        assert time.monotonic() - began < 30
        assert "RuntimeError" in pair.output(0)
        assert "sample_sort" in pair.output(0)
        assert not (tmp_path / "0.npz").exists()


# One process


@pytest.fixture(params=["no group", "gloo"])
def alone(request):
    """Be the only process, without a process group and in one."""
    if request.param == "gloo":
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    if request.param == "gloo":
        distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", solvable(1))
def test_one_process_has_all(name):
    """And sends nothing but, in a group, what its arguments are to itself."""
    problem = solvable(1)[name]
    keys = torch.from_numpy(problem.keys)
    index = torch.arange(len(keys))
    payload = run_sort.make_payload(index) if problem.case.get("payload") else None
    calls = []
    with run_sort.record_calls(calls):
        found = torch_ref.sample_sort(keys, payload=payload, **problem.case.get("options", {}))
    share = {"keys": found[0], "indices": found[1]} | (found[2] if len(found) == 3 else {})
    assert_share({column: tensor.numpy() for column, tensor in share.items()}, problem, 1, 0)
    assert not calls


def test_no_gradient_flows_through_a_sort():
    """Keys of a model's losses are values."""
    keys = torch.tensor([2.0, 1.0], requires_grad=True)
    found = torch_ref.sample_sort(keys, payload=keys)
    assert not any(tensor.requires_grad for tensor in found)


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        ([1, 2], {}, "keys must be a dense 1-D tensor, got list"),
        (torch.tensor(1), {}, r"got shape \(\)"),
        (torch.ones(2).to_sparse(), {}, "keys must be a dense 1-D tensor"),
        (torch.ones(2), {"payload": torch.ones(3)}, r"2 rows on cpu.*payload is torch.float32 \(3,\) on cpu$"),
        (torch.ones(2), {"payload": [torch.ones(2), None, "text"]}, r"payload\[1\] is NoneType, payload\[2\] is str$"),
        (torch.ones(2), {"payload": [0] * 8}, r"payload\[4\] is int and 3 more$"),
        (torch.ones(2), {"oversampling": True}, "oversampling must be an integer"),
        (torch.ones(2), {"group": object()}, "call init_process_group first"),
    ],
)
def test_bad_arguments_are_named(keys, options, message):
    """One by one, up to a few."""
    with pytest.raises(ValueError, match=message):
        torch_ref.sample_sort(keys, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_rows_may_be_on_a_gpu():
    """They stay there, and NCCL sends every dtype."""
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        for name, problem in solvable(1).items():
            keys = torch.from_numpy(problem.keys).cuda()
            index = torch.arange(len(keys), device="cuda")
            payload = run_sort.make_payload(index) if problem.case.get("payload") else None
            found = torch_ref.sample_sort(keys, payload=payload, **problem.case.get("options", {}))
            share = {"keys": found[0], "indices": found[1]} | (found[2] if len(found) == 3 else {})
            assert all(tensor.is_cuda for tensor in share.values()), name
            assert_share({column: tensor.cpu().numpy() for column, tensor in share.items()}, problem, 1, 0)
            columns = list(share.values())
            arrived = _exchange(columns, [len(keys)], [len(keys)], _Place(None, 0, 1))
            assert all(torch.equal(_bits(a), _bits(b)) for a, b in zip(arrived, columns, strict=True)), name
    finally:
        distributed.destroy_process_group()


def _bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)
