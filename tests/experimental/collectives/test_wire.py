"""What collectives send: the figures of the textbooks, and every message of a schedule accounted for."""

import math

import pytest

from jvarlen import UserError
from jvarlen.experimental.collectives.wire import ALGORITHMS, collective_seconds, tree_rounds, wire_bytes
from jvarlen.targets.cluster import Link

EVERY = [(kind, algorithm) for kind, algorithms in ALGORITHMS.items() for algorithm in algorithms]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 64])
def test_each_device_of_a_ring_sends_all_but_one_part_twice(n):
    num_bytes = 4 * n * 1000
    found = wire_bytes("all_reduce", num_bytes, n, "ring")
    assert set(found.sent) == set(found.received) == {2 * (n - 1) * num_bytes // n}
    assert len(found.sent) == len(found.received) == n
    assert found.rounds == 2 * (n - 1)
    assert found == wire_bytes("all_reduce", num_bytes, n, "xla") == wire_bytes("all_reduce", num_bytes, n, "rs_ag")
    halves = [wire_bytes(kind, num_bytes, n, "ring") for kind in ("reduce_scatter", "all_gather")]
    assert found.sent == tuple(map(sum, zip(*(half.sent for half in halves), strict=True)))
    assert found.rounds == sum(half.rounds for half in halves)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 64])
def test_the_root_of_a_star_receives_and_sends_what_all_others_have(n):
    found = wire_bytes("all_reduce", 1000, n, "star")
    assert (found.sent[0], found.received[0], found.busiest) == ((n - 1) * 1000,) * 3
    assert set(found.sent[1:]) | set(found.received[1:]) <= {1000}
    assert found.rounds == 2 * (n - 1)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 100])
def test_a_tree_reaches_every_device_once_in_the_fewest_rounds(n):
    rounds = tree_rounds(n)
    assert len(rounds) == math.ceil(math.log2(n))
    reached = {0}
    for pairs in rounds:
        targets = {target for _, target in pairs}
        assert {source for source, _ in pairs} <= reached
        assert len(targets) == len(pairs) == len({source for source, _ in pairs})
        assert not targets & reached
        reached |= targets
    assert reached == set(range(n))
    assert wire_bytes("all_reduce", 10, n, "tree").rounds == 2 * len(rounds)


@pytest.mark.parametrize(("kind", "algorithm"), EVERY)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_what_is_sent_is_received(kind, algorithm, n):
    found = wire_bytes(kind, 1001, n, algorithm, itemsize=7)
    assert sum(found.sent) == sum(found.received)
    assert found.busiest == max(found.sent + found.received)
    part = 7 * math.ceil(143 / n)
    messages = {"broadcast": n - 1, "reduce": n - 1, "scatter": n - 1, "gather": n - 1}.get(kind, n * (n - 1))
    size = 1001 if kind in ("broadcast", "reduce") else part
    if kind == "all_reduce":
        messages, size = (2 * (n - 1), 1001) if algorithm in ("tree", "star") else (2 * n * (n - 1), part)
    assert sum(found.sent) == messages * size


def test_reducing_is_broadcasting_backwards_and_gathering_is_scattering_backwards():
    for away, back, algorithm in (("broadcast", "reduce", "tree"), ("scatter", "gather", "star")):
        found, reverse = wire_bytes(away, 960, 6, algorithm), wire_bytes(back, 960, 6, algorithm)
        assert (found.sent, found.received) == (reverse.received, reverse.sent)
        assert found.sent != found.received


def test_chunks_are_padded_to_whole_elements():
    assert wire_bytes("reduce_scatter", 7 * 4, 3, "ring", itemsize=4).sent == (2 * 3 * 4,) * 3
    assert wire_bytes("reduce_scatter", 7 * 4, 3, "ring").sent == (2 * 10,) * 3
    assert wire_bytes("all_reduce", 0, 3, "ring").busiest == 0


def test_seven_copies_take_seven_turns_or_three_rounds_of_a_tree():
    link = Link(bytes_per_second=1e6)
    assert collective_seconds("broadcast", 5_000_000, 8, "star", link) == 35
    assert collective_seconds("broadcast", 5_000_000, 8, "tree", link) == 15


@pytest.mark.parametrize("n", [1, 2, 4, 10])
def test_a_ring_takes_bandwidth_for_its_bytes_and_latency_for_its_rounds(n):
    link = Link(2e9, 1e-3)
    expected = 2 * (n - 1) * 1e6 / (n * 2e9) + 2 * (n - 1) * 1e-3
    assert collective_seconds("all_reduce", 1_000_000, n, "ring", link) == pytest.approx(expected, rel=1e-12)


def test_counts_of_large_machines_do_not_overflow():
    assert wire_bytes("all_reduce", 2**60, 1000, "star").busiest == 999 * 2**60


def test_bad_input_is_named():
    with pytest.raises(UserError, match=r"kind \('gossip'\) must be one of 'broadcast', .*'all_reduce'"):
        wire_bytes("gossip", 1, 1, "ring")
    with pytest.raises(UserError, match=r"algorithm \('ring'\) of broadcast must be one of 'tree', 'star'"):
        wire_bytes("broadcast", 1, 1, "ring")
    with pytest.raises(UserError, match=r"at least 1 .*: n \(0\)"):
        wire_bytes("all_reduce", 1, 0, "ring")
    with pytest.raises(UserError, match=r"at least 1 .*: n \(0\)"):
        tree_rounds(0)
    with pytest.raises(UserError, match=r"at least 1 .*: itemsize \(0\)"):
        wire_bytes("all_reduce", 1, 1, "ring", itemsize=0)
    with pytest.raises(UserError, match=r"at least 0 .*: num_bytes \(-1\)"):
        collective_seconds("all_reduce", -1, 1, "ring", Link(1))
    with pytest.raises(UserError, match=r"num_bytes \(6\) must be a multiple of itemsize \(4\)"):
        wire_bytes("all_reduce", 6, 1, "ring", itemsize=4)
    with pytest.raises(UserError, match=r"finite and above 0: bytes_per_second \(0\)"):
        Link(0)
    with pytest.raises(UserError, match=r"finite and at least 0: latency_s \(-1\)"):
        Link(1, -1)
