"""Pages by tables: run by run, by a switch, or by a gather, they are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from muon_shard import pages
from muon_shard.packing import ANY
from muon_shard.pages import Table, pack_pages, take_pages

PAGE = 3
SIZES = {"a": 2, "b": 4}
LENGTHS = (1, 7, 4)
POOL = np.arange(sum(LENGTHS) * PAGE, dtype=np.float32).reshape(-1, PAGE) + 1


def parts():
    return jnp.split(jnp.asarray(POOL), np.cumsum(LENGTHS)[:-1])


def packed(table):
    """On each of 8 devices, in the order of coordinates."""
    mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 2)
    run = jax.jit(
        jax.shard_map(
            lambda: pack_pages(parts(), table), mesh=mesh, in_specs=(), out_specs=P(("a", "b")), check_vma=False
        )
    )
    return np.asarray(run()).reshape(8, -1, PAGE), run.lower().as_text()


TABLES = {
    "in order": np.arange(12),
    "backwards": np.arange(12)[::-1],
    "runs across parts": np.array([3, 4, 5, 6, 7, 8, 9, 0, 1, 2]),
    "with filler": np.array([ANY, 5, 6, ANY, ANY, 0]),
    "nothing but filler": np.array([ANY, ANY]),
    "one page": np.array([11]),
    "the same page twice": np.array([4, 4, 5]),
}


@pytest.mark.parametrize("name", TABLES)
def test_one_table_is_copied_run_by_run(name):
    numbers = TABLES[name]
    got = np.asarray(pack_pages(parts(), Table(numbers[None])))
    np.testing.assert_array_equal(got[numbers != ANY], POOL[numbers[numbers != ANY]])
    assert got.shape == (len(numbers), PAGE)


@pytest.mark.parametrize("bound", ["MOST_TABLES", "MOST_RUNS", None])
def test_tables_of_devices_by_a_switch_or_by_a_gather(bound, monkeypatch):
    if bound:
        monkeypatch.setattr(pages, bound, 1)
    numbers = np.random.default_rng(0).integers(0, 12, (4, 5))
    table = Table.make(np.tile(numbers, (2, 1)), ("a", "b"), SIZES)
    assert table.axes == ("b",)
    got, text = packed(table)
    np.testing.assert_array_equal(got, np.tile(POOL[numbers], (2, 1, 1)))
    assert ("stablehlo.case" in text) == (bound is None)
    assert ("stablehlo.gather" in text) == (bound == "MOST_RUNS" or bound == "MOST_TABLES")


def test_axes_along_which_tables_agree_are_left_out():
    same = np.tile([2, 1], (8, 1))
    table = Table.make(same, ("a", "b"), SIZES)
    assert table.axes == () and isinstance(table.here, np.ndarray)
    by_a = np.repeat([[2, 1], [1, 2]], 4, axis=0)
    assert Table.make(by_a, ("a", "b"), SIZES).axes == ("a",)
    assert Table.make(by_a[::4], ("a",), SIZES).numbers.tolist() == [[2, 1], [1, 2]]
    assert Table.make(same[:1], (), SIZES).axes == ()


def test_neighbours_are_one_slice():
    text = jax.jit(lambda x: take_pages(x, np.array([[2, 3], [4, 5]]))).lower(POOL).as_text()
    assert "stablehlo.slice" in text and "gather" not in text
