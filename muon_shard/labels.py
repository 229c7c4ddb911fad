"""Which leaf is what: 'muon' or 'adam', from path and GLOBAL shape only, never from the mesh.

Three ways to say it, all through `muon_weight_dimension_numbers`, as in optax:

* None (the default): optax's rule, every rank-2 leaf is a matrix. A leaf that this rule probably gets wrong (a rank-2
  embedding, a rank-3 stack of matrices) is flagged in the plan.
* `by_path`: rules on names and shapes, for trees with embeddings, norms, scanned stacks, experts, convolutions.
* a tree of `optax.contrib.MuonDimensionNumbers` (None: Adam), a prefix of one, or a callable that returns one.
"""

import dataclasses
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from muon_shard.errors import Offence, raise_for_leaves
from muon_shard.trees import flatten_with_paths, is_dimension_numbers, spread

DimensionNumbers = MuonDimensionNumbers | Any | Callable[[Any], Any] | None

NOT_MATRICES = (
    (r"embed|wte\b|wpe\b|token_emb|vocab", "an embedding table by name"),
    (r"lm_?head|\bhead\b|unembed|logits|classifier", "an output head by name"),
    (r"norm|\bln_?\w*\b|layernorm", "a norm by name"),
    (r"bias\b|\bb\b", "a bias by name"),
    (r"\bscale\b|gamma|beta\b", "a scale by name"),
    (r"router|\bgate_logits\b|gating", "a router by name"),
    (r"pos_?emb|positional|\brope\b|\bpos\b", "a positional table by name"),
)


@dataclasses.dataclass(frozen=True)
class Route:
    """Where one leaf goes and the rule that sent it there.

    `rows` and `cols` are the reduction and output axes (non-negative, in the order they merge); both are empty for
    'adam'. `doubt` is a sentence when the rule that fired is probably not what the user wants.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    label: str
    rule: str
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()
    doubt: str = ""

    @property
    def batch(self) -> tuple[int, ...]:
        """Axes that are neither rows nor cols: problems along them are independent."""
        return tuple(d for d in range(len(self.shape)) if d not in self.rows + self.cols)


def route(tree: Any, dimension_numbers: DimensionNumbers = None, where: str = "muon") -> list[Route]:
    """Routes of the leaves of `tree` (arrays or `ShapeDtypeStruct`s), in flattening order.

    Raises:
        ValueError: naming every leaf that is declared Muon and cannot be a matrix.
    """
    named, _ = flatten_with_paths(tree)
    raise_for_leaves(
        where,
        "not an array",
        [Offence(path, f"a {type(leaf).__name__}") for path, leaf in named if not hasattr(leaf, "dtype")],
        "Consider jnp.asarray, or a tree of arrays only.",
    )
    if dimension_numbers is None:
        return [_two_dimensional_rule(path, leaf) for path, leaf in named]
    rule = "dimension numbers given"
    if callable(dimension_numbers):
        rule = getattr(dimension_numbers, "__name__", "callable")
        dimension_numbers = dimension_numbers(tree)
    entries = spread(dimension_numbers, tree, is_dimension_numbers, "muon_weight_dimension_numbers")
    routes, offences = [], []
    for (path, leaf), entry in zip(named, entries, strict=True):
        if entry is None:
            reason = name_rule(path, leaf.shape) or "no matrix declared" if rule == "by_path" else "None given"
            routes.append(_record(path, leaf, "adam", f"{rule}: {reason}"))
            continue
        reason = _why_not_a_matrix(leaf, entry)
        if reason:
            offences.append(Offence(path, reason, leaf.shape, _short(leaf.dtype)))
            continue
        rows, cols = _axes(leaf.ndim, entry.reduction_axis), _axes(leaf.ndim, entry.output_axis)
        routes.append(_record(path, leaf, "muon", rule, rows=rows, cols=cols))
    raise_for_leaves(
        where,
        "cannot be viewed as matrices",
        offences,
        "Consider passing other muon_weight_dimension_numbers= for these leaves, or None to send them to Adam.",
    )
    return routes


def require_matrices(routes: Sequence[Route], where: str = "muon") -> None:
    """Raises ValueError when there are leaves and none is Muon's, or a Muon leaf has no real or complex dtype."""
    bad = [
        Offence(
            r.path,
            f"dtype {r.dtype} is not a float or complex type, it has no momentum",
            r.shape,
            _short(r.dtype),
        )
        for r in routes
        if r.label == "muon" and not jnp.issubdtype(jnp.dtype(r.dtype), jnp.inexact)
    ]
    raise_for_leaves(
        where,
        "cannot be optimized by Muon",
        bad,
        "Consider labelling them 'adam', or masking them with optax.masked.",
    )
    if routes and all(r.label == "adam" for r in routes):
        raise_for_leaves(
            where,
            "and not one is a Muon leaf, all would be optimized by Adam",
            [Offence(r.path, r.rule, r.shape, _short(r.dtype)) for r in routes],
            "Consider passing muon_weight_dimension_numbers=muon_shard.labels.by_path, or optax.adamw.",
        )


def warn_of_doubts(routes: Sequence[Route]) -> None:
    """One warning that names the leaves which the rank-2 rule probably sends the wrong way."""
    doubtful = [r for r in routes if r.doubt]
    if not doubtful:
        return
    shown = "; ".join(f"{r.path} to {r.label.capitalize()} ({r.doubt})" for r in doubtful[:3])
    more = f"; and {len(doubtful) - 3} more" if len(doubtful) > 3 else ""
    warnings.warn(
        f"muon_shard: the rank-2 rule of optax sends {shown}{more}. If that is not meant, pass "
        "muon_weight_dimension_numbers=muon_shard.labels.by_path or a tree of your own.",
        stacklevel=4,
    )


def by_path(tree: Any) -> Any:
    """Dimension numbers by name and global shape, for `muon_weight_dimension_numbers=`.

    Rules, first match wins: rank 0 and 1 go to Adam, and so do names of embeddings, heads, norms, biases, scales,
    routers and positional tables, and depthwise convolutions (one input channel). Rank 2 is a matrix. A higher rank is
    a convolution `[h, w, in, out]` when its name says so, else a stack of matrices along all but its last two axes
    (scanned layers, experts).
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return jax.tree.unflatten(treedef, [_by_name(jax.tree_util.keystr(path), leaf.shape) for path, leaf in flat])


def name_rule(path: str, shape: tuple[int, ...]) -> str:
    """The rule that keeps a leaf from Muon, or ''."""
    if len(shape) < 2:
        return f"rank {len(shape)}"
    words = re.sub(r"[^A-Za-z0-9_]+", " ", path).lower()
    for pattern, reason in NOT_MATRICES:
        if re.search(pattern, words):
            return reason
    if _is_conv(path, shape) and shape[-2] == 1:
        return "a depthwise convolution"
    return ""


def _by_name(path: str, shape: tuple[int, ...]) -> MuonDimensionNumbers | None:
    if name_rule(path, shape):
        return None
    if _is_conv(path, shape):
        return MuonDimensionNumbers(tuple(range(len(shape) - 1)), len(shape) - 1)
    return MuonDimensionNumbers(len(shape) - 2, len(shape) - 1)


def _is_conv(path: str, shape: tuple[int, ...]) -> bool:
    return len(shape) >= 3 and "conv" in path.lower()


def _two_dimensional_rule(path: str, leaf: Any) -> Route:
    rank = len(leaf.shape)
    if rank == 2:
        name = name_rule(path, leaf.shape)
        doubt = f"{name}, yet a matrix by the rank-2 rule" if name else ""
        return _record(path, leaf, "muon", "rank 2", rows=(0,), cols=(1,), doubt=doubt)
    doubt = "may be a stack of matrices, sent to Adam by the rank-2 rule" if rank > 2 else ""
    return _record(path, leaf, "adam", f"rank {rank}", doubt=doubt)


def _record(path: str, leaf: Any, label: str, rule: str, **more: Any) -> Route:
    return Route(path, tuple(leaf.shape), str(leaf.dtype), label, rule, **more)


def _axes(rank: int, axes: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(a % rank for a in _as_tuple(axes))


def _as_tuple(axes: int | Sequence[int]) -> tuple[int, ...]:
    """Axes as Python ints; numpy's are welcome."""
    try:
        return (operator.index(axes),)  # type: ignore[arg-type]
    except TypeError:
        return tuple(operator.index(a) for a in axes)  # type: ignore[union-attr]


def _why_not_a_matrix(leaf: Any, numbers: MuonDimensionNumbers) -> str:
    rank = len(leaf.shape)
    if rank < 2:
        return f"rank {rank}, a matrix needs rank 2 or more"
    given = [_as_tuple(axes) for axes in (numbers.reduction_axis, numbers.output_axis)]
    if not all(given):
        return f"{numbers} names no reduction or no output axis"
    outside = [a for a in given[0] + given[1] if not -rank <= a < rank]
    if outside:
        return f"{numbers} names axes {outside} of a leaf of rank {rank}"
    used = _axes(rank, given[0]) + _axes(rank, given[1])
    if len(set(used)) < len(used):
        return f"reduction axes {given[0]} and output axes {given[1]} overlap"
    return ""


def _short(dtype: Any) -> str:
    """`f32` for float32, as JAX prints it."""
    name = str(dtype)
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name[len(long) :]
    return name
