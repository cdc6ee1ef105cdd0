"""Measured clusters: figures that hold together, fits that find a known link, hosts told apart, and the command."""

import dataclasses
import types

import numpy as np
import pytest

from jvarlen.cli import main
from jvarlen.targets import links
from jvarlen.targets.cluster import Cluster, Link
from jvarlen.targets.links import measure_cluster
from tests.meshes import data_mesh


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(links, "_ON_CPU", links._Sizes(128, 2**20, (2**12, 2**20)))
    monkeypatch.setattr(links, "_LEAST_S", 0.003)


def test_a_measured_cluster_has_the_figures_of_its_devices(small):
    cluster = measure_cluster(data_mesh(4), repeats=1, progress=False)
    assert (cluster.num_hosts, cluster.devices_per_host, cluster.efficiency) == (1, 4, 1.0)
    assert cluster.host_link == cluster.link
    assert 1e6 < cluster.flops_per_second < 1e13
    assert 1e6 < cluster.memory_bytes_per_second < 1e12
    assert 1e4 < cluster.link.bytes_per_second < 1e12
    assert 0 <= cluster.link.latency_s < 0.1
    assert 2**20 < cluster.memory_bytes < 2**50
    assert "off by" in cluster.sources


def test_a_program_does_its_work_as_often_as_it_is_told():
    mesh = links._mesh_of_hosts(data_mesh(2))
    calls = [links._program(lambda x: x @ x / 256, mesh, (256, 256), "float32")]
    seconds = [min(links._timed(calls[0], count) for _ in range(3)) for count in (2, 64)]
    assert 4 < seconds[1] / seconds[0] < 256


def test_the_fit_finds_the_link_of_a_cluster():
    cluster = dataclasses.replace(Cluster.preset("dgx-h100"), link=Link(3e9, 2e-5))

    def seconds_of(work, shape, dtype):
        kind = "send" if "ppermute" in work.__code__.co_names else "all_reduce"
        return float(cluster.collective_seconds(kind, 4 * shape[0], 8, 8))

    found, error = links._fit_link(links._collectives(seconds_of, "device", 8, links._ON_CPU))
    assert found.bytes_per_second == pytest.approx(3e9, rel=1e-6)
    assert found.latency_s == pytest.approx(2e-5, rel=1e-6)
    assert error < 1e-6


def test_times_that_do_not_grow_with_bytes_give_a_finite_bandwidth():
    found, error = links._fit_link([links._Measured(1, 1000, 2e-3), links._Measured(1, 4000, 1e-3)])
    assert found.bytes_per_second == 4000 / 1e-3
    assert error > 0


def test_hosts_are_told_by_their_names_and_have_as_many_devices():
    devices = [types.SimpleNamespace(id=i) for i in range(6)]
    found = links._by_host(devices, ["b", "a", "b", "a", "a", "b"])
    assert np.vectorize(lambda device: device.id)(found).tolist() == [[0, 2, 5], [1, 3, 4]]
    with pytest.raises(ValueError, match="these have: a 4, b 2"):
        links._by_host(devices, ["a", "b", "a", "a", "a", "b"])


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="take at least 2 devices"):
        measure_cluster(data_mesh(1))
    with pytest.raises(ValueError, match=r"dtype \('int8'\)"):
        measure_cluster(data_mesh(2), dtype="int8")
    with pytest.raises(ValueError, match=r"repeats \(0\)"):
        measure_cluster(data_mesh(2), repeats=0)


def test_the_command_writes_the_cluster(small, tmp_path, capsys):
    path = tmp_path / "cluster.json"
    assert main(["measure", "--links", "--devices", "2", "--out", str(path), "--no-progress"]) == 0
    cluster = Cluster.load(path)
    assert cluster.num_devices == 2
    printed = capsys.readouterr().out
    assert f"{path}: {cluster.name}, 1 × 2" in printed
    assert f"link: {cluster.link.bytes_per_second / 1e9:,.2f} GB/s" in printed


def test_the_command_refuses_devices_without_links(tmp_path, capsys):
    assert main(["measure", "--devices", "2"]) == 2
    assert "are for --links" in capsys.readouterr().err
    assert main(["measure", "--links", "--out", str(tmp_path / "none" / "c.json")]) == 2
    assert "no directory" in capsys.readouterr().err
