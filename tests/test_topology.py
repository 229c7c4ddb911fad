"""Links, the seconds of collectives by hand, presets, detection, and what is said of bad topologies."""

import collections
import dataclasses
import types

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from muon_shard import presets
from muon_shard.presets import detect, machine, preset, resolve
from muon_shard.topology import KINDS, PER_PEER, SHAPES, Link, Topology, collective_seconds, si

GIB = 2**30
NVIDIA = ("h100", "h200", "b200")
Device = collections.namedtuple("Device", "device_kind")  # what an abstract mesh may know
MESHES = [
    (("fsdp", 8),),
    (("x", 1),),
    (("replica", 4), ("fsdp", 64)),
    (("data", 2), ("fsdp", 16), ("tensor", 8)),
    (("replica", 2), ("expert", 3), ("fsdp", 7), ("tensor", 1)),
    (("replica", 16), ("fsdp", 1024)),
    (("fsdp", 8192),),
    (),
]


def machine_of(**axes):
    """A topology of these links whose kernels reach the peak, so that times can be worked out by hand."""
    return Topology(axes, flops=1e12, hbm_bytes=1e9, hbm_bandwidth=1e12, achieved=1.0)


def seconds(kind, result, sizes, **links):
    return collective_seconds(kind, tuple(links), sizes, result, machine_of(**links))


def mesh_of(kind, axes, platform="gpu", **numbers):
    """What `detect` reads of a mesh; `numbers` give attributes of the n-th device."""
    sizes = [size for _, size in axes]
    devices = np.empty(int(np.prod(sizes)), dtype=object)
    for n in range(len(devices)):
        own = {name: number(n) for name, number in numbers.items()}
        devices[n] = types.SimpleNamespace(platform=platform, device_kind=kind, **own)
    return types.SimpleNamespace(devices=devices.reshape(sizes))


# Seconds of one axis: 8 devices, 800 bytes of result, 100 bytes/s, 1 s of latency.


@pytest.mark.parametrize(
    ("shape", "kind", "wire", "latency"),
    [
        ("switch", "all-gather", 7, 3),
        ("mesh", "all-gather", 7, 1),
        ("ring", "all-gather", 7, 4),
        ("line", "all-gather", 14, 7),
        ("switch", "all-to-all", 7, 1 + 7 * PER_PEER),
        ("mesh", "all-to-all", 7, 1 + 7 * PER_PEER),
        ("ring", "all-to-all", 16, 4),  # 100 bytes to each: 1+2+3+4+3+2+1 hops of them over 100 bytes/s
        ("line", "all-to-all", 32, 7),  # 4 × 4 messages of 100 bytes cross the middle at 50 bytes/s
        ("switch", "reduce-scatter", 56, 3),
        ("mesh", "reduce-scatter", 56, 1),
        ("ring", "reduce-scatter", 56, 4),
        ("line", "reduce-scatter", 112, 7),
        ("switch", "all-reduce", 14, 6),
        ("mesh", "all-reduce", 14, 2),
        ("ring", "all-reduce", 14, 8),
        ("line", "all-reduce", 28, 14),
        ("switch", "collective-permute", 8, 1),
        ("mesh", "collective-permute", 56, 1),  # one of seven links
        ("ring", "collective-permute", 16 * 16 / 7, 16 / 7),  # 16/7 hops on average, over one of two links
        ("line", "collective-permute", 16 * 16 / 7, 8 - 16 / 7),
    ],
)
def test_one_axis_by_hand(shape, kind, wire, latency):
    got = seconds(kind, 800, {"x": 8}, x=Link(100.0, 1.0, shape))
    assert got == pytest.approx(wire + latency)


def test_every_kind_is_worked_out_by_hand_for_every_shape():
    marks = test_one_axis_by_hand.pytestmark[0].args[1]
    assert {(shape, kind) for shape, kind, *_ in marks} == {(s, k) for s in SHAPES for k in KINDS}


@pytest.mark.parametrize("shape", ["ring", "line"])
@pytest.mark.parametrize("ways", [2, 3, 5, 8])
def test_all_to_all_on_a_ring_loads_the_busiest_link_as_counted_hop_by_hop(shape, ways):
    right, left = np.zeros(ways), np.zeros(ways)  # right[i]: bytes from i to i+1, left[i]: back
    for source in range(ways):
        for target in range(ways):
            ahead = (target - source) % ways if shape == "ring" else target - source
            if shape == "ring" and 2 * ahead == ways:  # halfway around: half of it each way
                for step in range(ahead):
                    right[(source + step) % ways] += 0.5
                    left[(source - step - 1) % ways] += 0.5
            elif shape == "ring" and 2 * ahead < ways or shape == "line" and ahead > 0:
                right[[(source + step) % ways for step in range(ahead)]] += 1
            else:
                back = (source - target) % ways
                left[[(source - step - 1) % ways for step in range(back)]] += 1
    busiest = max(right.max(), left.max()) / 50  # bytes/s of one link in one direction
    got = seconds("all-to-all", float(ways), {"x": ways}, x=Link(100.0, 0.0, shape))
    assert got == pytest.approx(busiest)


def test_a_ring_gathers_like_a_switch_and_exchanges_slower():
    def ratio(kind, ways):
        ring, switch = (seconds(kind, GIB, {"x": ways}, x=Link(1e9, 0.0, shape)) for shape in ("ring", "switch"))
        return ring / switch

    assert ratio("all-gather", 16) == pytest.approx(1)
    assert ratio("all-to-all", 16) == pytest.approx(64 / 15)
    assert ratio("all-to-all", 4) == pytest.approx(4 / 3)


@pytest.mark.parametrize("shape", ["ring", "line", "mesh", "switch"])
def test_shifts_send_as_much_as_one_all_to_all(shape):
    """By one way around a ring, so twice its time; a mesh uses one link at a time, a line both ways anyway."""
    link = Link(100.0, 0.0, shape)
    shifts = 7 * seconds("collective-permute", 100, {"x": 8}, x=link)
    slower = {"ring": 2, "line": 1, "mesh": 7, "switch": 1}[shape]
    assert shifts == pytest.approx(slower * seconds("all-to-all", 800, {"x": 8}, x=link))


def test_latency_is_not_helped_by_what_kernels_reach():
    whole = machine_of(x=Link(100.0, 1.0))
    half = dataclasses.replace(whole, achieved=0.5)
    assert collective_seconds("all-gather", ("x",), {"x": 8}, 800, whole) == pytest.approx(10)
    assert collective_seconds("all-gather", ("x",), {"x": 8}, 800, half) == pytest.approx(17)


def test_axes_of_one_device_cost_nothing_and_need_no_link():
    topology = machine_of(x=Link(100.0, 1.0))
    for kind in KINDS:
        assert collective_seconds(kind, ("y",), {"y": 1, "x": 8}, 800, topology) == 0
        alone = collective_seconds(kind, ("x",), {"x": 8}, 800, topology)
        assert collective_seconds(kind, ("y", "x"), {"y": 1, "x": 8}, 800, topology) == alone > 0


# Several axes.


def test_a_joint_gather_crosses_the_slow_axis_with_small_pieces():
    slow, fast = Link(1.0, 1.0), Link(100.0, 0.1)
    sizes = {"r": 4, "f": 8}
    # 3200 bytes from pieces of 100: 300 over the slow axis, then 2800 over the fast one at the same time.
    assert seconds("all-gather", 3200, sizes, r=slow, f=fast) == pytest.approx(300 + 2 * 1.0 + 3 * 0.1)
    assert seconds("all-gather", 3200, sizes, f=fast, r=slow) == pytest.approx(300 + 2 * 1.0 + 3 * 0.1)
    assert seconds("reduce-scatter", 100, sizes, r=slow, f=fast) == pytest.approx(300 + 2 * 1.0 + 3 * 0.1)
    # 3/4 of an all-to-all crosses the slow axis; 24 peers lie across it and 28 across the fast one.
    wanted = 2400 + 1.0 * (1 + 24 * PER_PEER) + 0.1 * (1 + 28 * PER_PEER)
    assert seconds("all-to-all", 3200, sizes, r=slow, f=fast) == pytest.approx(wanted)


@pytest.mark.parametrize("shape", ["switch", "mesh"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_axes_of_one_switch_or_mesh_act_as_one_axis(kind, shape):
    def link(ways):  # 10 bytes/s for each pair of a mesh, 70 for each port of a switch
        return Link(10.0 * (ways - 1) if shape == "mesh" else 70.0, 1.0, shape, level="one")

    joint = seconds(kind, 800, {"a": 4, "b": 2}, a=link(4), b=link(2))
    assert joint == pytest.approx(seconds(kind, 800, {"c": 8}, c=link(8)))


def test_axes_of_a_torus_share_the_bytes_of_a_gather_but_not_the_hops_of_an_exchange():
    ring = Link(100.0, 0.0, "ring", level="ici")
    sizes = {"a": 4, "b": 4}
    assert seconds("all-gather", 1600, sizes, a=ring, b=ring) == pytest.approx(1500 / 200)
    assert seconds("all-to-all", 1600, sizes, a=ring, b=ring) == pytest.approx(400 * 4 / 100)
    line = dataclasses.replace(ring, shape="line")
    assert seconds("all-gather", 1600, sizes, a=ring, b=line) == pytest.approx(1500 / 150)


def test_axes_without_a_level_stay_apart():
    sizes = {"a": 2, "b": 4}
    apart = seconds("all-gather", 800, sizes, a=Link(100.0, 0.0), b=Link(100.0, 0.0))
    assert apart == pytest.approx(4)  # b first: 300 bytes, then 400 over a, at the same time
    one = Link(100.0, 0.0, level="one")
    assert seconds("all-gather", 800, sizes, a=one, b=one) == pytest.approx(7)


def test_an_axis_beyond_its_blocks_is_priced_as_two():
    fast = Link(450.0, 0.1, level="nvlink")
    slow = Link(50.0, 1.0, level="ib")
    both = dataclasses.replace(slow, within=(8, fast))
    for kind in KINDS:
        one_axis = seconds(kind, 6400, {"x": 64}, x=both)
        assert one_axis == pytest.approx(seconds(kind, 6400, {"a": 8, "b": 8}, a=slow, b=fast))
    assert both.parts(64) == ((both, 8), (fast, 8))
    assert both.parts(4) == ((both, 1), (fast, 4))
    assert both.parts(12) == ((both, 3), (fast, 4))
    # The blocks of another axis join: 4 × 8 nodes are 32 ways of one slow switch.
    joint = machine_of(r=slow, x=both).over(("x", "r"), {"r": 4, "x": 64})
    assert [[(link.level, ways) for link, ways in group] for group in joint] == [
        [("ib", 8), ("ib", 4)],
        [("nvlink", 8)],
    ]


def test_hops_axis_by_axis_post_fewer_messages():
    link = Link(1e12, 1.0)
    one = seconds("all-to-all", 0, {"a": 64, "b": 128}, a=link, b=link)
    two = sum(seconds("all-to-all", 0, {x: n}, **{x: link}) for x, n in (("a", 64), ("b", 128)))
    assert two == pytest.approx(2 + (63 + 127) * PER_PEER)
    assert one > 50 * two


def test_unknown_kinds_and_axes():
    topology = machine_of(x=Link(1.0))
    with pytest.raises(
        ValueError, match="unknown kind 'broadcast'. Known are: all-to-all, all-gather, reduce-scatter,"
    ):
        collective_seconds("broadcast", ("x",), {"x": 8}, 1, topology)
    with pytest.raises(ValueError, match="'custom' has no link for axis 'y', only 'x'; add 'y': Link"):
        collective_seconds("all-gather", ("y",), {"x": 8, "y": 8}, 1, topology)
    with pytest.raises(ValueError, match="no link for axis 'y', only none; add"):
        machine_of().link("y")


# Records.


def test_topologies_hash_compare_and_keep_the_order_of_axes():
    links = {"b": Link(1.0), "a": Link(2.0)}
    one = Topology(links, 1e12, 1e9, 1e12)
    two = Topology(tuple(links.items()), 1e12, 1e9, 1e12, assumed=[])
    assert one == two and hash(one) == hash(two) and len({one, two}) == 1
    assert list(one.links) == ["b", "a"] and one.link("a") == Link(2.0)
    links["c"] = Link(3.0)
    assert "c" not in one.links
    assert one != dataclasses.replace(one, axes={"b": Link(1.0), "a": Link(2.5)})
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.flops = 2.0


@pytest.mark.parametrize("name", presets.names())
def test_by_hand_or_by_name_prints_alike(name):
    known = preset(name, (("replica", 2), ("fsdp", 64)))
    fields = {field.name: getattr(known, field.name) for field in dataclasses.fields(known)}
    by_hand = Topology(**fields | {"axes": dict(known.links)})
    assert by_hand == known and hash(by_hand) == hash(known)
    assert str(by_hand) == by_hand.describe() == str(known)


def test_the_table_marks_what_is_assumed():
    assert str(preset("h100", (("replica", 2), ("fsdp", 16)))).splitlines() == [
        "Topology h100 (gpu)",
        "compute  990 TFLOP/s per device",
        "memory   80 GB at 3.35 TB/s per device",
        "reached  70% (assumed) of all rates; the host launches an operation in 5 µs (assumed)",
        "axis           level   bandwidth  latency         shape   peers",
        "replica        ib      50 GB/s    8 µs (assumed)  switch  any",
        "fsdp           ib      50 GB/s    8 µs (assumed)  switch  any",
        "  blocks of 8  nvlink  450 GB/s   3 µs (assumed)  switch  any",
    ]


def test_the_table_of_links_without_a_level_and_with_peers():
    topology = Topology(
        {"x": Link(2.5e8, 0.0, "ring", peers=4096), "y": Link(1e3, 2.0)},
        5e10,
        1.5e10,
        1e10,
        platform="cpu",
        assumed=("x.bandwidth", "hbm_bytes", "launch"),
    )
    assert str(topology).splitlines() == [
        "Topology custom (cpu)",
        "compute  50 GFLOP/s per device",
        "memory   15 GB (assumed) at 10 GB/s per device",
        "reached  70% of all rates; the host launches an operation in 5 µs (assumed)",
        "axis  level  bandwidth           latency  shape   peers",
        "x     –      250 MB/s (assumed)  0 s      ring    4,096",
        "y     –      1 kB/s              2 s      switch  any",
    ]


def test_wide_tables_stay_within_100_columns():
    axes = {f"a_rather_long_name_of_an_axis_{i}" * 3: Link(1 / 3, 1 / 3e6, level="network") for i in range(3)}
    topology = Topology(axes, 1e12, 1e9, 1e12, assumed=("network.bandwidth", "network.latency"))
    assert max(map(len, str(topology).splitlines())) <= 100
    assert str(topology).count("333.3 mB/s (assumed)") == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4.5e11, "450 GB"),
        (1e3, "1 kB"),
        (999.0, "999 B"),
        (3e-6, "3 µB"),
        (2.5e-4, "250 µB"),
        (0, "0 B"),
        (1e30, "1e+12 EB"),
    ],
)
def test_numbers_with_units(value, text):
    assert si(value, "B") == text


# Presets.


def test_every_machine_of_the_issue_is_there():
    wanted = "tpu-v4 tpu-v5e tpu-v5p tpu-v6e tpu-7x h100 h200 b200 gb200-nvl72 ascend-a2 ascend-a3 cpu generic"
    assert sorted(presets.names()) == sorted(wanted.split())


@pytest.mark.parametrize("mesh_axes", MESHES, ids=str)
@pytest.mark.parametrize("name", presets.names())
def test_every_preset_serves_every_mesh(name, mesh_axes):
    topology = preset(name, mesh_axes)
    assert list(topology.links) == [axis for axis, _ in mesh_axes]
    assert resolve(topology, None, mesh_axes) is topology  # no fault in it
    assert topology.name == name and hash(topology) == hash(preset(name, mesh_axes))
    sizes = dict(mesh_axes)
    for axis, size in mesh_axes:
        assert np.prod([ways for _, ways in topology.link(axis).parts(size)]) == size
    times = [collective_seconds(kind, tuple(sizes), sizes, GIB, topology) for kind in KINDS]
    assert all(0 < t < 1e5 for t in times) == (np.prod(list(sizes.values())) > 1)


@pytest.mark.parametrize("name", presets.names())
def test_every_machine_has_sources_and_names_its_weak_figures(name):
    known = machine(name)
    fields = {field.name for field in dataclasses.fields(Topology)}
    fields |= {f"{level.name}.{f}" for level in known.levels for f in ("bandwidth", "latency")}
    assert known.sources and all(len(source) > 10 for source in known.sources)
    assert set(known.assumed) <= fields and len(set(known.assumed)) == len(known.assumed)
    assert {"launch", "achieved"} <= set(known.assumed)
    assert 1 <= len(known.levels) <= 2 and known.levels[-1].domain is None
    assert known.title and known.platform in presets.PLATFORMS


def test_only_the_latencies_of_tpu_links_have_a_source():
    sourced = {
        level.name
        for name in presets.names()
        for level in machine(name).levels
        if f"{level.name}.latency" not in machine(name).assumed
    }
    assert sourced == {"ici"}


@pytest.mark.parametrize(
    ("name", "flops", "memory", "fast", "slow"),
    [
        ("tpu-v4", 275e12, 32e9, 90e9, 6.25e9),
        ("tpu-v5e", 197e12, 16e9, 90e9, 3.125e9),
        ("tpu-v5p", 459e12, 95 * GIB, 180e9, 6.25e9),
        ("tpu-v6e", 918e12, 32e9, 180e9, 12.5e9),
        ("tpu-7x", 2307e12 / 2, 96 * GIB, 100e9, 6.25e9),
        ("h100", 990e12, 80e9, 450e9, 50e9),
        ("h200", 990e12, 141e9, 450e9, 50e9),
        ("b200", 2.3e15, 192e9, 900e9, 50e9),
        ("gb200-nvl72", 2.3e15, 192e9, 900e9, 50e9),
        ("ascend-a2", 320e12, 64 * GIB, 28e9, 25e9),
        ("ascend-a3", 376e12, 64e9, 196e9, 25e9),
        ("cpu", 5e10, 16e9, 5e9, 5e9),
        ("generic", 5e14, 80e9, 50e9, 50e9),
    ],
)
def test_figures_are_per_device(name, flops, memory, fast, slow):
    known = machine(name)
    assert (known.flops, known.hbm_bytes) == (flops, memory)
    assert (known.levels[0].bandwidth, known.levels[-1].bandwidth) == (fast, slow)


def levels(topology, axis, size):
    """Level and ways of each part of an axis, outermost first, without those of one device."""
    return [(link.level, ways) for link, ways in topology.link(axis).parts(size) if ways > 1]


@pytest.mark.parametrize(
    ("name", "mesh_axes", "axis", "wanted"),
    [
        ("h100", (("replica", 4), ("fsdp", 8)), "fsdp", [("nvlink", 8)]),
        ("h100", (("replica", 4), ("fsdp", 8)), "replica", [("ib", 4)]),
        ("h100", (("fsdp", 64),), "fsdp", [("ib", 8), ("nvlink", 8)]),
        ("h100", (("fsdp", 64), ("tensor", 2)), "fsdp", [("ib", 16), ("nvlink", 4)]),
        ("h100", (("fsdp", 12), ("tensor", 2)), "fsdp", [("ib", 3), ("nvlink", 4)]),
        ("h100", (("fsdp", 8), ("tensor", 3)), "fsdp", [("ib", 8)]),  # 3 does not nest with 8
        ("h100", (("fsdp", 8), ("tensor", 3)), "tensor", [("ib", 3)]),
        ("h100", (("fsdp", 2), ("tensor", 2)), "fsdp", [("nvlink", 2)]),
        ("gb200-nvl72", (("replica", 4), ("fsdp", 64)), "fsdp", [("nvlink", 64)]),
        ("gb200-nvl72", (("replica", 4), ("fsdp", 64)), "replica", [("ib", 4)]),
        ("gb200-nvl72", (("replica", 2), ("fsdp", 72)), "fsdp", [("nvlink", 72)]),
        ("ascend-a3", (("replica", 8), ("fsdp", 64)), "replica", [("ub", 8)]),
        ("ascend-a3", (("replica", 2), ("fsdp", 768)), "replica", [("rdma", 2)]),
        ("ascend-a2", (("replica", 2), ("fsdp", 16)), "fsdp", [("roce", 2), ("hccs", 8)]),
        ("tpu-v5e", (("replica", 2), ("fsdp", 256)), "replica", [("dcn", 2)]),
        ("tpu-v5e", (("replica", 2), ("fsdp", 256)), "fsdp", [("ici", 16), ("ici", 16)]),
        ("tpu-v5p", (("fsdp", 8192),), "fsdp", [("dcn", 2), ("ici", 16), ("ici", 16), ("ici", 16)]),
        ("cpu", (("replica", 64), ("fsdp", 64)), "replica", [("memory", 64)]),
        ("generic", (("replica", 64), ("fsdp", 64)), "fsdp", [("network", 64)]),
    ],
)
def test_last_axes_fill_the_fast_level(name, mesh_axes, axis, wanted):
    assert levels(preset(name, mesh_axes), axis, dict(mesh_axes)[axis]) == wanted


def test_an_axis_beyond_the_nodes_gathers_with_both_networks():
    """64 GPUs in nodes of 8: the nodes receive 7/64 each over InfiniBand, of 8 GPUs' ports, and 7/8 over NVLink."""
    topology = dataclasses.replace(preset("h100", (("fsdp", 64),)), achieved=1.0)
    got = collective_seconds("all-gather", ("fsdp",), {"fsdp": 64}, 64e9, topology)
    assert got == pytest.approx(max(7e9 / 50e9, 56e9 / 450e9), rel=1e-3)
    exchange = collective_seconds("all-to-all", ("fsdp",), {"fsdp": 64}, 64e9, topology)
    assert exchange == pytest.approx(56e9 / 50e9, rel=1e-3)


def test_an_hccs_mesh_gives_few_devices_few_links():
    topology = preset("ascend-a2", (("fsdp", 4), ("tensor", 2)))
    assert topology.link("tensor").bandwidth == 28e9
    assert topology.link("fsdp").bandwidth == 3 * 28e9
    assert topology.link("fsdp").shape == "mesh"
    # Jointly all seven links are in use.
    got = collective_seconds("all-gather", ("fsdp", "tensor"), {"fsdp": 4, "tensor": 2}, 8 * 28e9, topology)
    assert got == pytest.approx(1 / topology.achieved, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "mesh_axes", "axis", "wanted"),
    [
        # 4×4 is too small to be closed on v5e; 16×16 is closed; sides of 4 are on v5p, from a cube on.
        ("tpu-v5e", (("x", 4), ("y", 4)), "y", [("line", 4, 90e9)]),
        ("tpu-v5e", (("x", 16), ("y", 16)), "x", [("ring", 16, 90e9)]),
        ("tpu-v5e", (("x", 8), ("y", 16)), "x", [("line", 8, 90e9)]),
        ("tpu-v5e", (("x", 16),), "x", [("line", 4, 90e9), ("line", 4, 90e9)]),
        ("tpu-v5p", (("x", 4), ("y", 4), ("z", 4)), "z", [("ring", 4, 180e9)]),
        ("tpu-v5p", (("x", 2), ("y", 4), ("z", 4)), "z", [("line", 4, 180e9)]),
        ("tpu-v5p", (("x", 64),), "x", [("ring", 4, 180e9)] * 3),
        ("tpu-v5p", (("x", 4), ("y", 16)), "y", [("ring", 4, 180e9)] * 2),
        # Two mesh axes on one torus axis: the inner one does not reach around, the outer one hops over it.
        ("tpu-v5p", (("x", 32), ("y", 2)), "y", [("line", 2, 180e9)]),
        ("tpu-v5p", (("x", 2), ("y", 2), ("z", 16)), "x", [("ring", 2, 90e9)]),
        ("tpu-v5p", (("x", 2), ("y", 2), ("z", 16)), "y", [("line", 2, 180e9)]),
        # 4×4×4: z and y share an axis, so that x has two to itself. 4×4×8: y has one to itself, not what z left over.
        ("tpu-v5p", (("x", 16), ("y", 2), ("z", 2)), "x", [("ring", 4, 180e9)] * 2),
        ("tpu-v5p", (("x", 16), ("y", 4), ("z", 2)), "y", [("ring", 4, 180e9)]),
    ],
)
def test_mesh_axes_on_a_torus(name, mesh_axes, axis, wanted):
    parts = preset(name, mesh_axes).link(axis).parts(dict(mesh_axes)[axis])
    assert sorted((link.shape, ways, link.bandwidth) for link, ways in parts if ways > 1) == sorted(wanted)


def test_hops_over_other_axes_of_a_torus_take_longer():
    topology = preset("tpu-v5p", (("x", 2), ("y", 2), ("z", 16)))
    assert topology.link("x").latency == 2 * topology.link("y").latency == 2e-6


def test_a_whole_slice_gathers_with_all_its_links():
    topology = dataclasses.replace(preset("tpu-v5p", (("x", 64),)), achieved=1.0)
    got = collective_seconds("all-gather", ("x",), {"x": 64}, 64e9, topology)
    assert got == pytest.approx(63e9 / (6 * 90e9), rel=1e-3)


# Detection.


@pytest.mark.parametrize(
    ("kind", "platform", "name"),
    [
        ("TPU v4", "tpu", "tpu-v4"),
        ("TPU v5 lite", "tpu", "tpu-v5e"),
        ("TPU v5e", "tpu", "tpu-v5e"),
        ("TPU v5", "tpu", "tpu-v5p"),
        ("TPU v5p", "tpu", "tpu-v5p"),
        ("TPU v6 lite", "tpu", "tpu-v6e"),
        ("TPU7x", "tpu", "tpu-7x"),
        ("NVIDIA H100 80GB HBM3", "gpu", "h100"),
        ("NVIDIA H200", "gpu", "h200"),
        ("NVIDIA B200", "gpu", "b200"),
        ("NVIDIA GB200", "gpu", "gb200-nvl72"),
        ("cpu", "cpu", "cpu"),
        ("NVIDIA GH200 480GB", "gpu", "generic"),
        ("NVIDIA H100 PCIe", "gpu", "generic"),
        ("TPU v3", "tpu", "generic"),
        ("something", "npu", "generic"),
    ],
)
def test_device_kinds(kind, platform, name):
    mesh_axes = (("replica", 2), ("fsdp", 4))
    topology = detect(mesh_of(kind, mesh_axes, platform, process_index=lambda n: 0), mesh_axes)
    assert topology.name == name
    assert topology.platform == (platform if platform in presets.PLATFORMS else "gpu")
    assert list(topology.links) == ["replica", "fsdp"]


def test_kinds_are_never_claimed_twice():
    kinds = [kind for name in presets.names() for kind in machine(name).device_kinds]
    assert len(kinds) == len(set(kinds))


def test_emulated_devices_are_cpu():
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"))
    mesh_axes = tuple(mesh.shape.items())
    assert detect(mesh, mesh_axes) == preset("cpu", mesh_axes)
    assert resolve("auto", mesh, mesh_axes) == preset("cpu", mesh_axes)
    assert detect(mesh.abstract_mesh, mesh_axes) == preset("cpu", mesh_axes)


def test_without_a_mesh_it_is_the_device_that_jax_uses():
    assert detect(None, ()) == resolve("auto", None, ()) == preset("cpu", ())


@pytest.mark.parametrize(
    ("kind", "name"), [(None, "generic"), ("TPU v5 lite", "tpu-v5e"), ("cpu", "cpu"), ("TPU v3", "generic")]
)
def test_an_abstract_mesh_is_what_it_knows_of_its_devices(kind, name):
    device = None if kind is None else Device(kind)
    mesh_axes = (("replica", 2), ("fsdp", 4))
    mesh = AbstractMesh((2, 4), ("replica", "fsdp"), abstract_device=device)
    assert detect(mesh, mesh_axes) == resolve("auto", mesh, mesh_axes) == preset(name, mesh_axes)


@pytest.mark.parametrize("name", NVIDIA)
def test_processes_end_the_nodes_of_gpus(name):
    kind = machine(name).device_kinds[0]
    mesh_axes = (("replica", 2), ("fsdp", 8), ("tensor", 2))
    by_node = detect(mesh_of(kind, mesh_axes, process_index=lambda n: n // 8), mesh_axes)
    assert levels(by_node, "replica", 2) == [("ib", 2)]
    assert levels(by_node, "fsdp", 8) == [("ib", 2), ("nvlink", 4)]
    assert levels(by_node, "tensor", 2) == [("nvlink", 2)]
    # A node of 4, and a mesh whose first axis runs inside the nodes: counting could not tell either.
    of_four = detect(mesh_of(kind, mesh_axes, process_index=lambda n: n // 4), mesh_axes)
    assert levels(of_four, "fsdp", 8) == [("ib", 4), ("nvlink", 2)]
    across = detect(mesh_of(kind, (("a", 8), ("b", 4)), process_index=lambda n: n % 4), (("a", 8), ("b", 4)))
    assert (levels(across, "a", 8), levels(across, "b", 4)) == ([("nvlink", 8)], [("ib", 4)])


def test_an_axis_over_unequal_nodes_is_fast_in_the_blocks_that_no_border_cuts():
    mesh_axes = (("x", 6),)
    mesh = mesh_of("NVIDIA H200", mesh_axes, process_index=lambda n: [0, 0, 0, 0, 1, 1][n])
    assert levels(detect(mesh, mesh_axes), "x", 6) == [("ib", 3), ("nvlink", 2)]


def test_one_process_per_gpu_says_nothing_about_nodes():
    mesh_axes = (("replica", 2), ("fsdp", 8))
    alone = mesh_of("NVIDIA H200", mesh_axes, process_index=lambda n: n)
    assert detect(alone, mesh_axes) == preset("h200", mesh_axes)
    sliced = mesh_of("NVIDIA H200", mesh_axes, process_index=lambda n: n, slice_index=lambda n: n // 4)
    assert levels(detect(sliced, mesh_axes), "fsdp", 8) == [("ib", 2), ("nvlink", 4)]


def test_more_devices_in_one_process_than_a_node_holds_are_counted():
    mesh_axes = (("fsdp", 32),)
    one = mesh_of("NVIDIA H200", mesh_axes, process_index=lambda n: 0)
    assert levels(detect(one, mesh_axes), "fsdp", 32) == [("ib", 4), ("nvlink", 8)]


def test_links_of_a_tpu_slice_cross_hosts():
    mesh_axes = (("replica", 2), ("fsdp", 64))
    one_slice = mesh_of("TPU v5p", mesh_axes, "tpu", process_index=lambda n: n // 4, slice_index=lambda n: 0)
    assert detect(one_slice, mesh_axes) == preset("tpu-v5p", mesh_axes)
    assert levels(detect(one_slice, mesh_axes), "replica", 2) == [("ici", 2)]
    two = mesh_of("TPU v5p", mesh_axes, "tpu", process_index=lambda n: n // 4, slice_index=lambda n: n // 64)
    assert levels(detect(two, mesh_axes), "replica", 2) == [("dcn", 2)]
    assert levels(detect(two, mesh_axes), "fsdp", 64) == [("ici", 4)] * 3


def test_nvlink_of_72_crosses_hosts():
    mesh_axes = (("replica", 2), ("fsdp", 64))
    mesh = mesh_of("NVIDIA GB200", mesh_axes, process_index=lambda n: n // 4, slice_index=lambda n: n // 4)
    assert levels(detect(mesh, mesh_axes), "fsdp", 64) == [("nvlink", 64)]


# What users ask for.


def test_names_and_objects_resolve():
    mesh_axes = (("replica", 2), ("fsdp", 8))
    assert resolve("tpu-v5p", None, mesh_axes) == preset("tpu-v5p", mesh_axes)
    mine = machine_of(fsdp=Link(1e9), replica=Link(1e8, 0.0, "mesh", peers=2, within=(2, Link(1e9))))
    assert resolve(mine, None, (*mesh_axes, ("unused", 1))) is mine


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError) as error:
        resolve("h1000", None, ())
    assert str(error.value) == f"no topology is called 'h1000'. Known are: auto, {', '.join(presets.names())}."


def test_things_that_are_no_topology():
    with pytest.raises(ValueError, match=r"expected a Topology or one of auto, tpu-v4, .*, got 8\. Consider"):
        resolve(8, None, ())


def test_all_faults_come_in_one_error():
    bad = Topology(
        {
            "fsdp": Link(0, float("nan"), "star", peers=1),
            "tensor": Link(float("inf"), -1.0, within=(2, Link("fast"))),
            "expert": 50e9,
            "seq": Link(1e9, within=(1, Link(1e9))),
        },
        flops=float("nan"),
        hbm_bytes=-1,
        hbm_bandwidth=None,
        name="mine",
        platform="abacus",
        launch=-1e-6,
        achieved=1.5,
    )
    with pytest.raises(ValueError) as error:
        resolve(bad, None, (("replica", 2), ("fsdp", 8), ("one", 1)))
    inner = Link(1e9)
    assert str(error.value).splitlines() == [
        "topology 'mine': 16 faults.",
        "* axis 'replica' of 2 devices has no link, only 'fsdp', 'tensor', 'expert', 'seq'; "
        "add 'replica': Link(bandwidth=…) to axes.",
        "* flops is nan; give FLOP/s of one device, above 0 and finite.",
        "* hbm_bytes is -1; give bytes of one device, above 0 and finite.",
        "* hbm_bandwidth is None; give bytes/s of one device, above 0 and finite.",
        "* launch is -1e-06; give seconds per launched operation, at least 0 and finite.",
        "* achieved is 1.5; give a share of the peak, above 0 and at most 1.",
        "* platform is 'abacus'; known are: cpu, gpu, tpu.",
        "* axis 'fsdp': bandwidth is 0; give bytes/s that one device can send, above 0 and finite.",
        "* axis 'fsdp': latency is nan; give seconds per message, at least 0 and finite.",
        "* axis 'fsdp': shape is 'star'; known are: switch, ring, line, mesh.",
        "* axis 'fsdp': peers is 1; give the most devices of one all-to-all, at least 2, or None for any.",
        "* axis 'tensor': bandwidth is inf; give bytes/s that one device can send, above 0 and finite.",
        "* axis 'tensor': latency is -1.0; give seconds per message, at least 0 and finite.",
        "* axis 'tensor', within 2: bandwidth is 'fast'; give bytes/s that one device can send, above 0 and finite.",
        "* axis 'expert' is 50000000000.0; give a Link(bandwidth=…).",
        f"* axis 'seq': within is {(1, inner)!r}; give (devices of a block, at least 2, and their Link).",
    ]


def test_a_single_fault_is_one():
    with pytest.raises(ValueError, match=r"(?s)^topology 'custom': 1 fault\.\n\* axis 'fsdp' of 8 devices has no link"):
        resolve(machine_of(), None, (("fsdp", 8),))


@pytest.mark.parametrize("number", [True, "1e9", np.nan, 1j])
def test_figures_must_be_numbers(number):
    with pytest.raises(ValueError, match="1 fault.*\n.*bandwidth is"):
        resolve(machine_of(x=Link(number)), None, (("x", 2),))


def test_numpy_figures_are_welcome():
    mine = machine_of(x=Link(np.float32(1e9), np.int64(0), peers=np.int64(8)))
    assert resolve(mine, None, (("x", 2),)) is mine
