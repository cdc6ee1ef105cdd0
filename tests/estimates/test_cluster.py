"""Clusters: figures that are checked, files, and the bandwidth of groups of devices."""

import dataclasses
import json

import pytest

from jvarlen.estimates.cluster import PRESETS, Cluster

DGX = Cluster.named("dgx-h100:4")


@pytest.mark.parametrize("name", PRESETS)
def test_a_file_holds_the_cluster(name, tmp_path):
    Cluster.named(f"{name}:3").save(tmp_path / "c.json")
    assert Cluster.load(tmp_path / "c.json") == Cluster.named(f"{name}:3")
    assert "assum" in PRESETS[name].sources


def test_groups_inside_a_host_use_its_links_and_others_those_of_their_members():
    assert DGX.members_in_host([8, 4, 4, 16, 32], [1, 2, 8, 2, 1]).tolist() == [8, 4, 1, 4, 8]
    assert Cluster.named("tpu-v5e-256").members_in_host(256, 4) == 256
    assert DGX.members_in_host([3, 6, 12], [1, 1, 2]).tolist() == [1, 1, 4]  # devices 6, 7 and 8 are on two hosts

    def seconds(kind, size, in_host):
        return DGX.collective_seconds(kind, 8e9, size, in_host).item()

    assert seconds("all_gather", 8, 8) == pytest.approx(3 * 3e-6 + 7e9 / 450e9)
    assert seconds("all_reduce", 8, 8) == 2 * seconds("reduce_scatter", 8, 8)
    assert seconds("all_gather", 4, 1) == pytest.approx(2 * 8e-6 + 6e9 / 50e9)  # one member a host
    assert seconds("all_gather", 16, 4) == pytest.approx(4 * 8e-6 + 7.5e9 / 200e9)
    assert seconds("send", 4, 1) == pytest.approx(8e-6 + 8e9 / 50e9)
    assert [seconds(kind, 1, 1) for kind in ("all_reduce", "send")] == [0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwidth": 3}, "unknown keys: bandwidth"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"flops_per_second": -1.0}, "flops_per_second"),
        ({"flops_per_second": float("nan")}, "flops_per_second"),
        ({"efficiency": 1.5}, "shares of a cluster must be at most 1: efficiency 1.5"),
        ({"link": {"bytes_per_second": 0}}, "bytes_per_second"),
        ({"link": {"speed": 1}}, "speed"),
        ({"name": None}, "name"),
        ({"efficiency": "0.5"}, "efficiency"),
    ],
)
def test_what_is_no_cluster_is_refused(change, message, tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(dataclasses.asdict(DGX) | change))
    with pytest.raises(ValueError, match=message) as error:
        Cluster.load(path)
    assert str(path) in str(error.value)


def test_presets_and_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="and no preset; there are dgx-a100, dgx-h100"):
        Cluster.named("dgx")
    with pytest.raises(FileNotFoundError, match="there is no cluster"):
        Cluster.load(tmp_path / "none.json")
