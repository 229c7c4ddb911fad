"""Collectives read from modules compiled here, and from lines in the forms that TPU and GPU print."""

import itertools
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from muon_shard import hlo
from muon_shard.replica_groups import axes_crossed, axes_of, parse_groups

ALL = ("a", "b", "c")
CUBE = tuple((axis, 2) for axis in ALL)
SUBSETS = [axes for size in (1, 2, 3) for axes in itertools.combinations(ALL, size)]
ROWS, COLS = 16, 4
LOCAL = ROWS * COLS * 4


def cube():
    return jax.make_mesh((2, 2, 2), ALL, axis_types=(AxisType.Auto,) * 3)


def compiled_text(body):
    fn = jax.jit(jax.shard_map(body, mesh=cube(), in_specs=P(ALL), out_specs=P(ALL), check_vma=False))
    return fn.lower(jax.ShapeDtypeStruct((8 * ROWS, COLS), jnp.float32)).compile().as_text()


def only(text):
    (found,) = hlo.collectives(textwrap.dedent(text))
    return found


def facts(text):
    return [(f.kind, f.bytes, f.count, f.certain) for f in hlo.collectives(textwrap.dedent(text))]


def ring(peers):
    return [(p, (p + 1) % peers) for p in range(peers)]


# Modules compiled here

KINDS = {
    # The CPU compiler splits an all-to-all into a tuple of blocks: their sum is the local array again.
    "all-to-all": (lambda x, axes: lax.all_to_all(x, axes, 0, 0, tiled=True), lambda ways: LOCAL),
    "all-gather": (lambda x, axes: lax.all_gather(x, axes, tiled=True), lambda ways: ways * LOCAL),
    "all-reduce": (lambda x, axes: lax.psum(x, axes), lambda ways: LOCAL),
    "reduce-scatter": (lambda x, axes: lax.psum_scatter(x, axes, tiled=True), lambda ways: LOCAL // ways),
    "collective-permute": (lambda x, axes: lax.ppermute(x, axes, ring(2 ** len(axes))), lambda ways: LOCAL),
}


@pytest.mark.parametrize("axes", SUBSETS, ids="+".join)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_over_each_set_of_axes(kind, axes):
    body, size = KINDS[kind]
    text = compiled_text(lambda x: body(x, axes))
    found = only(text)
    assert (found.kind, found.bytes, found.count, found.certain) == (kind, size(2 ** len(axes)), 1, True)
    assert found.axes(CUBE) == axes
    assert hlo.device_count(text) == 8


@pytest.mark.parametrize("axes", [*SUBSETS, ("c", "a"), ("c", "b", "a")], ids="+".join)
def test_what_the_partitioner_adds(axes):
    """GSPMD writes groups as axes of a mesh of its own, whose devices may be reordered."""
    mesh = cube()
    fn = jax.jit(
        lambda x: jnp.sin(x).sum(0),
        in_shardings=NamedSharding(mesh, P(axes)),
        out_shardings=NamedSharding(mesh, P()),
    )
    found = only(fn.lower(jax.ShapeDtypeStruct((64, 8), jnp.float32)).compile().as_text())
    assert (found.kind, found.bytes) == ("all-reduce", 32) and found.axes(CUBE) == tuple(sorted(axes))


def test_several_collectives_and_none():
    both = hlo.collectives(compiled_text(lambda x: lax.psum(lax.all_to_all(jnp.sin(x), ALL, 0, 0, tiled=True), "b")))
    assert [(f.kind, f.axes(CUBE)) for f in both] == [("all-to-all", ALL), ("all-reduce", ("b",))]
    assert hlo.collectives(compiled_text(jnp.sin)) == ()


def test_loops_multiply():
    def body(x):
        def inner(_, y):
            return jnp.sin(lax.psum(y, "a"))

        def outer(_, y):
            return lax.fori_loop(0, 5, inner, y) + lax.ppermute(y, "b", ring(2))

        return lax.fori_loop(0, 3, outer, lax.psum(x, ALL))

    runs = {(f.kind, f.axes(CUBE)): (f.count, f.certain) for f in hlo.collectives(compiled_text(body))}
    assert runs == {
        ("all-reduce", ALL): (1, True),
        ("all-reduce", ("a",)): (15, True),
        ("collective-permute", ("b",)): (3, True),
    }


def five_sums(x):
    return lax.fori_loop(0, 5, lambda _, y: jnp.sin(lax.psum(y, "b")), x)


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    def body(x):
        return lax.while_loop(lambda y: y.sum() < 100.0, lambda y: y + lax.psum(y, "a"), x)

    found = only(compiled_text(body))
    assert (found.count, found.certain) == (1, False)
    within = only(compiled_text(lambda x: lax.fori_loop(0, 5, lambda _, y: jnp.sin(body(y)), x)))
    assert (within.count, within.certain) == (5, False)
    around = only(compiled_text(lambda x: lax.while_loop(lambda y: y.sum() < 100.0, five_sums, x)))
    assert (around.count, around.certain) == (5, False)


# Lines as CPU, GPU and TPU print them

LINES = {
    "tuple with index comments": (
        "%x.3 = (f32[1,4]{1,0}, f32[1,4]{1,0}, /*index=2*/f32[1,4]{1,0}) all-to-all(%a, %b, /*index=2*/%c)",
        ("all-to-all", 48),
    ),
    "combined": (
        "%g = (f32[16]{0}, bf16[8,4]{1,0}) all-gather(%p, %q), channel_id=1, dimensions={0}",
        ("all-gather", 128),
    ),
    "tiled layout": (
        "ROOT %g = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} all-gather(bf16[1,128]{1,0} %p), dimensions={0}",
        ("all-gather", 2048),
    ),
    "no percent signs": (
        "g = bf16[8,128]{1,0} reduce-scatter(p), replica_groups={{0,1}}",
        ("reduce-scatter", 2048),
    ),
    "gather start": (
        "%s = (f32[2,4]{1,0}, f32[16,4]{1,0}) all-gather-start(f32[2,4]{1,0} %p), dimensions={0}",
        ("all-gather", 256),
    ),
    "gather start of two": (
        "%s = ((f32[2]{0}, bf16[4]{0}), (f32[16]{0}, bf16[32]{0})) all-gather-start(%p, %q), channel_id=1",
        ("all-gather", 128),
    ),
    "permute start with contexts on TPU": (
        "%s = (bf16[64,512]{1,0:T(8,128)(2,1)}, bf16[64,512]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) "
        "collective-permute-start(%p), channel_id=1, source_target_pairs={{0,1},{1,0}}",
        ("collective-permute", 65536),
    ),
    "reduce start keeps its result's type": (
        "%s = (f32[8]{0}, f32[4]{0}) all-reduce-start(%p, %q), to_apply=%add",
        ("all-reduce", 48),
    ),
    "reduce start of one": ("%s = bf16[65536]{0} all-reduce-start(%p), to_apply=%add", ("all-reduce", 131072)),
    "all-to-all start on TPU": (
        "%s = ((bf16[8,8,512]{2,1,0:T(8,128)(2,1)}), bf16[8,8,512]{2,1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}, "
        "u32[]{:S(2)}) all-to-all-start(%bitcast.6), channel_id=1, dimensions={0}",
        ("all-to-all", 65536),
    ),
    "reduce-scatter start on GPU": (
        "%s = ((bf16[64,512]{1,0}), bf16[8,512]{1,0}) reduce-scatter-start(%p), dimensions={0}, to_apply=%add",
        ("reduce-scatter", 8192),
    ),
    "all-reduce as a short async-start": (
        "%s = ((f32[8]{0}, f32[4]{0}), (f32[8]{0}, f32[4]{0}), u32[]) all-reduce-start(%p, %q), to_apply=%add",
        ("all-reduce", 48),
    ),
    "ragged": ("%r = f32[16]{0} ragged-all-to-all(%a, %b, %c, %d, %e, %f)", ("ragged-all-to-all", 64)),
    "broadcast": ("%r = f32[16]{0} collective-broadcast(%a), replica_groups={{0,1}}", ("collective-broadcast", 64)),
}


@pytest.mark.parametrize("name", LINES)
def test_forms_of_an_instruction(name):
    line, (kind, size) = LINES[name]
    assert facts(line) == [(kind, size, 1, True)]
    assert only(f"ENTRY %main (p: f32[2]) -> f32[2] {{\n  {line}\n}}").bytes == size


@pytest.mark.parametrize(
    "line",
    [
        "%all-gather-done.1 = f32[16]{0} all-gather-done(%s)",
        '%f = f32[4]{0} fusion(%all-gather.1), kind=kLoop, metadata={op_name="jit(f) = x all-gather(y"}',
        "%gte = f32[4]{0} get-tuple-element(%all-to-all.3), index=0",
        "%all-gather.2 = f32[4]{0} copy(%all-gather-start)",
        "all-gather(%p) alone is no instruction",
        "%x = f32[4]{0}",
    ],
)
def test_lines_that_only_mention_a_collective(line):
    assert facts(line) == []


def test_a_pair_counts_once_whether_wrapped_or_not():
    text = """\
        %wrapped (p: f32[4]) -> f32[16] {
          %p = f32[4]{0} parameter(0)
          ROOT %g = f32[16]{0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
        }

        ENTRY %main (x: f32[4]) -> f32[16] {
          %s = ((f32[4]{0}), f32[16]{0}) async-start(%x), calls=%wrapped
          %u = ((f32[4]{0}), f32[16]{0}) async-update(%s), calls=%wrapped
          %d = f32[16]{0} async-done(%u), calls=%wrapped
          %s.2 = ((f32[4]{0}), f32[4]{0}) all-to-all-start(%x), replica_groups={{0,1}}, dimensions={0}
          ROOT %d.2 = f32[4]{0} all-to-all-done(%s.2)
        }
        """
    assert facts(text) == [("all-gather", 64, 1, True), ("all-to-all", 16, 1, True)]


def test_a_computation_called_twice_and_branches():
    text = """\
        %add (a: f32[], b: f32[]) -> f32[] {
          ROOT %sum = f32[] add(%a, %b)
        }

        %f (p: f32[4]) -> f32[4] {
          ROOT %r = f32[4]{0} all-reduce(%p), replica_groups={}, to_apply=%add
        }

        %left (p: f32[4]) -> f32[4] {
          ROOT %t = f32[4]{0} all-to-all(%p), replica_groups={{0,1}}
        }

        %right (p: f32[4]) -> f32[4] {
          ROOT %c = f32[4]{0} call(%p), to_apply=%f
        }

        ENTRY %main (x: f32[4]) -> f32[4] {
          %c.1 = f32[4]{0} call(%x), to_apply=%f
          %c.2 = f32[4]{0} call(%c.1), to_apply=%f
          ROOT %b = f32[4]{0} conditional(%i, %c.2, %c.2), branch_computations={%left, %right}
        }
        """
    assert facts(text) == [("all-reduce", 16, 3, True), ("all-to-all", 16, 1, True)]


def test_computations_that_call_each_other_are_an_error():
    text = """\
        %f (p: f32[4]) -> f32[4] {
          ROOT %c = f32[4]{0} call(%p), to_apply=%g
        }
        %g (p: f32[4]) -> f32[4] {
          ROOT %c = f32[4]{0} call(%p), to_apply=%f
        }
        """
    with pytest.raises(ValueError, match="cycle"):
        hlo.collectives(textwrap.dedent(text))


# Loops as TPU prints them: without a trip count

LOOP = """\
    %body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
      %step = s32[]{:T(128)} constant(STEP)
      %p = (s32[]{:T(128)}, f32[4]{0}) parameter(0)
      %i = s32[]{:T(128)} get-tuple-element(%p), index=0
      %next = s32[]{:T(128)} add(%i, %step), backend_config={"flag_configs":[]}
      %x = f32[4]{0} get-tuple-element(%p), index=1
      %r = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
      ROOT %t = (s32[]{:T(128)}, f32[4]{0}) tuple(%next, %r)
    }

    %condition (p: (s32[], f32[4])) -> pred[] {
      %stop = s32[]{:T(128)} STOP
      %p = (s32[]{:T(128)}, f32[4]{0}) parameter(0)
      %i = s32[]{:T(128)} get-tuple-element(%p), index=0
      ROOT %lt = pred[]{:T(512)} compare(%i, %stop), direction=DIRECTION, metadata={op_name="direction=LT"}
    }

    ENTRY %main (x: f32[4]) -> f32[4] {
      %start = s32[]{:T(128)} constant(START)
      %copy = s32[]{:T(128)} copy(%start)
      %t = (s32[]{:T(128)}, f32[4]{0}) tuple(%copy, %x)
      %w = (s32[]{:T(128)}, f32[4]{0}) while(%t), condition=%condition, body=%body, metadata={op_name="while"}
      ROOT %y = f32[4]{0} get-tuple-element(%w), index=1
    }
    """


@pytest.mark.parametrize(
    ("start", "stop", "step", "direction", "expected"),
    [
        ("0", "constant(5)", "1", "LT", [(5, True)]),
        ("2", "constant(9)", "3", "LT", [(3, True)]),
        ("-1", "constant(2)", "1", "LT", [(3, True)]),
        ("7", "constant(5)", "1", "LT", []),
        ("0", "constant(5)", "1", "NE", [(1, False)]),
        ("0", "constant(5)", "0", "LT", [(1, False)]),
        ("0", "constant(5)", "-1", "LT", [(1, False)]),
        ("0", "get-tuple-element(%p), index=1", "1", "LT", [(1, False)]),
    ],
)
def test_a_loop_that_counts_by_constants(start, stop, step, direction, expected):
    text = LOOP.replace("START", start).replace("STOP", stop).replace("STEP", step).replace("DIRECTION", direction)
    assert [(count, certain) for *_, count, certain in facts(text)] == expected


def test_a_counter_that_something_else_advances_is_unknown():
    text = LOOP.replace("START", "0").replace("STOP", "constant(5)").replace("STEP", "1").replace("DIRECTION", "LT")
    assert facts(text.replace("add(%i, %step)", "add(%step, %i)"))[0][2:] == (5, True)
    assert facts(text.replace("add(%i, %step)", "add(%x, %step)"))[0][2:] == (1, False)
    assert facts(text.replace("add(%i, %step)", "multiply(%i, %step)"))[0][2:] == (1, False)


def test_a_told_trip_count_wins_and_the_condition_runs_once_more():
    text = LOOP.replace("START", "0").replace("STOP", "constant(5)").replace("STEP", "1").replace("DIRECTION", "LT")
    told = text.replace('op_name="while"}', 'op_name="while"}, backend_config={"known_trip_count":{"n":"40"}}')
    assert [f.count for f in hlo.collectives(textwrap.dedent(told))] == [40]
    quoted = text.replace(
        'op_name="while"}', 'op_name="while"}, backend_config="{\\"known_trip_count\\":{\\"n\\":\\"7\\"}}"'
    )
    assert [f.count for f in hlo.collectives(textwrap.dedent(quoted))] == [7]
    both = told.replace("%p = (s32[]{:T(128)}, f32[4]{0}) parameter(0)", "%g = f32[8]{0} all-gather(%c)")
    assert sorted((f.kind, f.count) for f in hlo.collectives(textwrap.dedent(both))) == [
        ("all-gather", 40),
        ("all-gather", 41),
        ("all-reduce", 40),
    ]


# Fusions on TPU


GATHER = """all-gather(%p), channel_id=1, dimensions={0}, frontend_attributes={chain_id="0"}, backend_config={}"""


def test_an_asynchronous_gather_in_a_chain_of_fusions_counts_once():
    text = f"""\
        %fused_computation.26 (p: bf16[64]) -> bf16[512] {{
          %all-gather.5 = bf16[512]{{0:T(512)}} {GATHER}
          ROOT %c.1 = bf16[512]{{0}} custom-call(%all-gather.5), custom_call_target="AsyncCollectiveStart"
        }}

        %async_collective_fusion.61 (p: bf16[64]) -> bf16[512] {{
          %all-gather.7 = bf16[512]{{0:T(512)S(1)}} {GATHER}
          ROOT %c.2 = bf16[512]{{0}} copy(%all-gather.7)
        }}

        %fused_computation.29 (p: bf16[64]) -> bf16[512] {{
          %all-gather.11 = bf16[512]{{0:T(512)}} {GATHER}
          ROOT %c.3 = bf16[512]{{0}} custom-call(%p, %all-gather.11), custom_call_target="AsyncCollectiveDone"
        }}

        ENTRY %main (x: bf16[64]) -> bf16[512] {{
          %async-collective-start = bf16[512]{{0}} fusion(%x), kind=kCustom, calls=%fused_computation.26
          %fusion.61 = bf16[512]{{0}} fusion(%async-collective-start), kind=kCustom, calls=%async_collective_fusion.61
          ROOT %async-collective-done = bf16[512]{{0}} fusion(%fusion.61), kind=kCustom, calls=%fused_computation.29
        }}
        """
    found = only(text)
    assert (found.kind, found.bytes, found.count, found.name) == ("all-gather", 1024, 1, "all-gather.5")


def test_a_fused_reduce_and_slice_is_a_reduce_scatter():
    text = """\
        %all-reduce-scatter.3 (input: bf16[8192,512]) -> bf16[2064,512] {
          %pad = bf16[8256,512]{1,0:T(8,128)(2,1)} pad(%input, %zero), padding=0_64x0_0
          %all-reduce.1 = bf16[8256,512]{1,0:T(8,128)(2,1)} all-reduce(%pad), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
          ROOT %slice = bf16[2064,512]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%all-reduce.1, %i, %j), dynamic_slice_sizes={2064,512}
        }

        ENTRY %main (x: bf16[8192,512]) -> bf16[2064,512] {
          ROOT %fusion = bf16[2064,512]{1,0:T(8,128)(2,1)S(1)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3
        }
        """  # noqa: E501
    assert facts(text) == [("reduce-scatter", 2064 * 512 * 2, 1, True)]
    assert only(text).axes((("a", 2), ("b", 4))) == ("b",)


# Groups


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}", ((0, 1), (2, 3))),
        ("replica_groups={{0, 1}, {2, 3}}", ((0, 1), (2, 3))),
        ("replica_groups={{0},{1}}", ((0,), (1,))),
        ("replica_groups={}, dimensions={0}", ()),
        ("dimensions={0}", ()),
        ("replica_groups=[2,4]<=[8], dimensions={0}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("channel_id=1, source_target_pairs={{0,1},{1,0}}, metadata={a=1}", ((0, 1), (1, 0))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, dimensions={0}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=2] {'a','c'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh[a=2,b=4] {a}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("replica_groups=mesh['a'=2] {}", ((0,), (1,))),
        ("replica_groups=mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'y'}", ((0, 2), (1, 3))),
        (
            "replica_groups=mesh['x'=2,'y'=1,'z'=4], device_ids=([2,2,2]T(1,0,2)) {'x'}",
            ((0, 2), (1, 3), (4, 6), (5, 7)),
        ),
    ],
)
def test_notations_of_groups(attributes, groups):
    assert parse_groups(attributes) == groups


def groups_over(sizes, chosen):
    """Devices numbered row-major, grouped by their places on the axes not chosen."""
    grouped = {}
    for device, place in enumerate(itertools.product(*map(range, sizes))):
        grouped.setdefault(tuple(p for d, p in enumerate(place) if d not in chosen), []).append(device)
    return tuple(map(tuple, grouped.values()))


@pytest.mark.parametrize("size", range(1, 5))
def test_groups_are_found_over_every_set_of_axes(size):
    mesh_axes = (("a", 2), ("b", 3), ("c", 4), ("d", 2))
    for chosen in itertools.combinations(range(4), size):
        groups = groups_over([n for _, n in mesh_axes], chosen)
        expected = tuple(mesh_axes[d][0] for d in chosen)
        assert axes_of(groups, mesh_axes) == expected
        assert axes_of(tuple(group[::-1] for group in groups[::-1]), mesh_axes) == expected


@pytest.mark.parametrize(
    "groups",
    [
        ((0, 1), (2, 4), (3, 5), (6, 7)),  # mixed
        ((0, 1, 2), (3, 4, 5, 6, 7)),  # uneven
        ((0, 1), (2, 3)),  # half of the devices
        ((0, 1), (0, 1), (2, 3), (4, 5)),  # some twice
        ((0, 3), (1, 2), (4, 7), (5, 6)),  # a diagonal
        ((0, 8), (1, 9)),  # devices that are not there
        tuple((device,) for device in range(8)),  # each alone
    ],
)
def test_groups_that_fit_no_axes(groups):
    assert axes_of(groups, CUBE) == ()


def test_all_devices_are_all_axes_but_those_of_size_one():
    assert axes_of((), (("a", 2), ("b", 1), ("c", 4))) == ("a", "c")
    assert axes_of((), ()) == () and axes_of(((0, 1),), ()) == ()


def test_a_permute_spans_the_axes_it_crosses():
    pairs = {shift: tuple((p, (p + shift) % 4) for p in range(4)) for shift in (1, 2)}
    mesh_axes = (("a", 2), ("b", 2))
    assert axes_crossed(pairs[1], mesh_axes) == ("a", "b")
    assert axes_crossed(pairs[2], mesh_axes) == ("a",)  # two places further is one row further
    assert axes_crossed(((0, 1),), mesh_axes) == ("b",)
    assert axes_crossed(((0, 4),), mesh_axes) == () and axes_crossed(((0, 0),), mesh_axes) == ()


# Sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[]", 4),
        ("pred[3]", 3),
        ("f8e4m3fn[5]", 5),
        ("s4[3]", 2),
        ("c64[2]", 16),
        ("token[]", 0),
        ("f32[0,4]", 0),
        ("f32[<=8,4]", 128),
        ("(f32[2]{0}, (bf16[2]{0:T(256)}, u32[]{:S(2)}))", 16),
    ],
)
def test_type_bytes(text, size):
    assert hlo.type_bytes(text) == size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn", "bool", "complex64", "uint16"])
def test_type_bytes_are_those_of_compiled_arrays(dtype):
    text = jax.jit(lambda x: x.T).lower(jax.ShapeDtypeStruct((6, 5), dtype)).compile().as_text()
    layout = text.split("entry_computation_layout={(")[1].split(")->")[0]
    assert hlo.type_bytes(layout) == 30 * np.dtype(jnp.dtype(dtype)).itemsize


def test_device_count():
    assert hlo.device_count("HloModule jit_f, is_scheduled=true, num_partitions=8, frontend_attributes={}\n") == 8
    assert hlo.device_count("HloModule jit_f, replica_count=2, num_partitions=4") == 8
    assert hlo.device_count("HloModule jit_f") == 1
    for text in ("", "module @jit_f attributes {mhlo.num_partitions = 8 : i32} {"):
        with pytest.raises(ValueError, match="no line `HloModule"):
            hlo.device_count(text)
