"""The census against modules compiled here, and against lines in the forms other backends print."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks import census

ROWS, COLS = 16, 4


def compiled_text(body, out_spec):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    fn = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=out_spec, check_vma=False))
    return fn.lower(jax.ShapeDtypeStruct((8 * ROWS, COLS), jnp.float32)).compile().as_text()


LOCAL_BYTES = ROWS * COLS * 4
COMPILED = {
    # The CPU compiler splits an all-to-all into a tuple of 8 blocks: their sum is the local array again.
    "all-to-all": (lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True), P("x"), LOCAL_BYTES),
    "all-gather": (lambda x: lax.all_gather(x, "x", tiled=True), P(), 8 * LOCAL_BYTES),
    "all-reduce": (lambda x: lax.psum(x, "x"), P(), LOCAL_BYTES),
    "reduce-scatter": (lambda x: lax.psum_scatter(x, "x", tiled=True), P("x"), LOCAL_BYTES // 8),
    "collective-permute": (
        lambda x: lax.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)]),
        P("x"),
        LOCAL_BYTES,
    ),
}


@pytest.mark.parametrize("kind", COMPILED)
def test_one_collective_of_each_kind_is_counted_with_its_bytes(kind):
    body, out_spec, expected = COMPILED[kind]
    assert census.collectives(compiled_text(body, out_spec)) == {kind: {"count": 1, "bytes": expected}}


def test_several_collectives_add_up_and_a_module_without_any_is_empty():
    both = census.collectives(
        compiled_text(lambda x: lax.psum(lax.all_to_all(jnp.sin(x), "x", 0, 0, tiled=True), "x"), P())
    )
    assert {kind: entry["count"] for kind, entry in both.items()} == {"all-to-all": 1, "all-reduce": 1}
    assert census.total(both, "bytes") == 2 * LOCAL_BYTES
    assert census.collectives(compiled_text(jnp.sin, P("x"))) == {}


LINES = {
    "tuple with index comments": (
        "  %x.3 = (f32[1,4]{1,0}, f32[1,4]{1,0}, /*index=2*/f32[1,4]{1,0}) all-to-all(%a, %b), channel_id=1",
        ("all-to-all", 48),
    ),
    "tiled layout": (
        "  ROOT %g = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} all-gather(bf16[1,128]{1,0} %p), dimensions={0}",
        ("all-gather", 2048),
    ),
    "asynchronous gather": (
        "  %s = (f32[2,4]{1,0}, f32[16,4]{1,0}) all-gather-start(f32[2,4]{1,0} %p), dimensions={0}",
        ("all-gather", 256),
    ),
    "asynchronous gather of two": (
        "  %s = ((f32[2]{0}, bf16[4]{0}), (f32[16]{0}, bf16[32]{0})) all-gather-start(%p, %q), channel_id=1",
        ("all-gather", 128),
    ),
    "asynchronous permute with contexts": (
        "  %s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), channel_id=1",
        ("collective-permute", 32),
    ),
    "asynchronous reduce keeps its result's type": (
        "  %s = (f32[8]{0}, f32[4]{0}) all-reduce-start(%p, %q), to_apply=%add",
        ("all-reduce", 48),
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_forms_of_an_instruction(name):
    line, (kind, size) = LINES[name]
    assert census.collectives(line) == {kind: {"count": 1, "bytes": size}}


@pytest.mark.parametrize(
    "line",
    [
        "  %all-gather-done.1 = f32[16]{0} all-gather-done(%s)",
        '  %f = f32[4]{0} fusion(%all-gather.1), kind=kLoop, metadata={op_name="jit(f) = x all-gather(y"}',
        "  %gte = f32[4]{0} get-tuple-element(%all-to-all.3), index=0",
    ],
)
def test_lines_that_only_mention_a_collective_do_not_count(line):
    assert census.collectives(line) == {}


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
    ],
)
def test_type_bytes(text, size):
    assert census.type_bytes(text) == size
