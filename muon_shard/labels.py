"""Which leaf is what: 'muon' or 'adam', from path and GLOBAL shape only, never from the mesh.

Three ways to say it, all through `muon_weight_dimension_numbers`, as in optax:

* None (the default): optax's rule, every rank-2 leaf is a matrix. A leaf that this rule probably gets wrong (a rank-2
  embedding, a rank-3 stack of matrices) is flagged in the plan.
* rules on names and shapes, first match wins: `by_path` for most trees, `flax_modules`, `maxtext`, `hugging_face` for
  theirs, and `from_rules` for one's own.
* a tree of `optax.contrib.MuonDimensionNumbers` (None: Adam), a prefix of one, or a callable that returns one.

Where these have `MuonDimensionNumbers`, `Blocks` says that a leaf holds several matrices.
"""

import dataclasses
import math
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

from muon_shard.errors import Offence, raise_for_leaves
from muon_shard.logical import Blocks as Blocks
from muon_shard.logical import Cut
from muon_shard.trees import flatten_with_paths, is_dimension_numbers, leaf_path, spread

Dims = MuonDimensionNumbers | Blocks
DimensionNumbers = Dims | Any | Callable[[Any], Any] | None
Shape = tuple[int, ...]
GUESSED = "guessed"
OWN = "from_rules"


def unboxed_path(path: str) -> str:
    """A path without the `.value` of flax's boxes, which are around arrays at some places and not at others."""
    return path.removesuffix(".value")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Leaves of which a part of the path matches `pattern`, in lower or upper case, and the shape passes `where`.

    `to` holds their dimension numbers, or a function of the shape, or None for Adam; `why` says so in a few words.
    """

    pattern: str
    to: Dims | Callable[[Shape], Dims | None] | None
    why: str = ""
    where: Callable[[Shape], bool] = lambda shape: True
    guess: bool = False

    def matches(self, path: str, shape: Shape) -> bool:
        return self.where(shape) and re.search(self.pattern, path, re.IGNORECASE) is not None


@dataclasses.dataclass(frozen=True)
class Rules:
    """A callable for `muon_weight_dimension_numbers=`: the first rule that matches a leaf says what it is."""

    name: str
    rules: tuple[Rule, ...]
    otherwise: "Rules | None" = None

    def __call__(self, tree: Any) -> Any:
        """A tree of dimension numbers like `tree`, None for Adam.

        Raises:
            ValueError: called with a number, as `optax.inject_hyperparams` calls what it takes for a schedule.
        """
        if getattr(tree, "shape", None) == ():
            raise ValueError(
                f"labels.{self.name} was called with a number, not with parameters. Under optax.inject_hyperparams "
                "pass static_args=muon_shard.STATIC_ARGS, or it is taken for a schedule."
            )
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        return jax.tree.unflatten(treedef, [self.of(leaf_path(path), leaf.shape)[0] for path, leaf in flat])

    def of(self, path: str, shape: Shape) -> tuple[Dims | None, str, bool]:
        """Dimension numbers of a leaf, the rule that said so, and whether it is a guess."""
        for rule in self.rules:
            if rule.matches(slashed(path), shape):
                to = rule.to(shape) if callable(rule.to) else rule.to
                return to, f"{self.name}: {rule.why or repr(rule.pattern)}", rule.guess
        return self.otherwise.of(path, shape) if self.otherwise else (None, f"{self.name}: no rule", False)


def slashed(path: str) -> str:
    """`blocks/0/wq/kernel` for `params['blocks'][0].wq['kernel'].value`: what the patterns of rules see."""
    return "/".join(re.findall(r"\w[^\[\]'\".]*", unboxed_path(path).removeprefix("params")))


def from_rules(rules: Sequence[tuple[str, Dims | str | None]], otherwise: Rules | None = None) -> Rules:
    """Rules of one's own: `from_rules([("experts/up", Dims(1, 2)), ("gate$", "adam")])`.

    Args:
        rules: (pattern, dims) pairs: a regular expression searched in paths like `blocks/0/wq/kernel`, and
            `optax.contrib.MuonDimensionNumbers`, whose axes may be negative, `Blocks`, or 'adam'.
        otherwise: what decides about leaves that no pattern matches; None: `by_path`.

    Raises:
        ValueError: listing all entries that are no rules.
    """
    faults = [f"* entry {i}, {entry!r}: {fault}" for i, entry in enumerate(rules) if (fault := _why_no_rule(entry))]
    if faults:
        raise ValueError(
            "\n".join(["from_rules: expected pairs (pattern, MuonDimensionNumbers, Blocks or 'adam').", *faults])
        )
    own = tuple(Rule(pattern, None if isinstance(to, str) else to) for pattern, to in rules)
    return Rules(OWN, own, otherwise or by_path)


def _why_no_rule(entry: Any) -> str:
    if not isinstance(entry, tuple | list) or len(entry) != 2 or not isinstance(entry[0], str):
        return "not a pair that begins with a pattern"
    try:
        re.compile(entry[0])
    except re.error as error:
        return f"not a regular expression, {error}"
    known = entry[1] == "adam" or is_dimension_numbers(entry[1])
    return "" if known else f"{entry[1]!r} is neither MuonDimensionNumbers nor Blocks nor 'adam'"


def _rank(*ranks: int) -> Callable[[Shape], bool]:
    return lambda shape: len(shape) in ranks


def _stacked(shape: Shape) -> MuonDimensionNumbers:
    return MuonDimensionNumbers(len(shape) - 2, len(shape) - 1)


def _convolution(shape: Shape) -> MuonDimensionNumbers:
    return MuonDimensionNumbers(tuple(range(len(shape) - 1)), len(shape) - 1)


NOT_MATRICES = (
    Rule("", None, "rank 0", _rank(0)),
    Rule("", None, "rank 1", _rank(1)),
    Rule(r"embed|wte\b|wpe\b|token_emb|vocab", None, "an embedding table by name"),
    Rule(r"lm_?head|\bhead\b|unembed|logits|classifier", None, "an output head by name"),
    Rule(r"norm|\bln_?\w*\b|layernorm", None, "a norm by name"),
    Rule(r"bias\b|\bb\b", None, "a bias by name"),
    Rule(r"\bscale\b|gamma|beta\b", None, "a scale by name"),
    Rule(r"router|\bgate_logits\b|gating", None, "a router by name"),
    Rule(r"pos_?emb|positional|\brope\b|\bpos\b", None, "a positional table by name"),
    Rule("conv", None, "a depthwise convolution", lambda shape: len(shape) > 2 and shape[-2] == 1),
    Rule("", None, "a stack of vectors", lambda shape: len(shape) > 2 and 1 in shape[-2:]),
)
"""What stays with Adam in every tree. Vectors have no singular values to even out."""

SCANNED = r"((layer|block)s?+(?![/_]?\d)|stack|scan)"
"""Layers in one leaf; `layers/0` and `layers_0` are one layer."""

by_path = Rules(
    "by_path",
    (
        *NOT_MATRICES,
        Rule("conv", _convolution, "a convolution by name", lambda shape: len(shape) > 2),
        Rule("", _stacked, "rank 2", _rank(2)),
        Rule(r"expert|moe", _stacked, "experts by name", _rank(3)),
        Rule(SCANNED, _stacked, "a stack of layers by name", _rank(3)),
        Rule(rf"{SCANNED}.*(expert|moe)", _stacked, "stacked experts by name", _rank(4)),
        Rule("", _stacked, "stacked along all but the last two axes", guess=True),
    ),
)
"""Dimension numbers by name and global shape, for `muon_weight_dimension_numbers=`.

Rules, first match wins: rank 0 and 1 go to Adam, and so do names of embeddings, heads, norms, biases, scales, routers
and positional tables, depthwise convolutions (one input channel) and stacks of vectors. Rank 2 is a matrix. A higher
rank is a convolution `[h, w, in, out]` when its name says so, else a stack of matrices along all but its last two axes
(scanned layers, experts), a guess when no name says so.
"""

flax_modules = Rules(
    "flax_modules",
    (
        *NOT_MATRICES,
        Rule(r"(query|key|value)/kernel$", MuonDimensionNumbers(-3, (-2, -1)), "to heads", _rank(3, 4)),
        Rule(r"out/kernel$", MuonDimensionNumbers((-3, -2), -1), "from heads", _rank(3, 4)),
    ),
    by_path,
)
"""`by_path`, and attention as the modules of flax lay it out: `[in, heads, head_dim]` and `[heads, head_dim, out]`, for
NNX and linen, one layer or a stack of layers along the first axis."""

maxtext = Rules(
    "maxtext",
    (
        *NOT_MATRICES,
        Rule(r"moe\w*/gate/", None, "a router by name"),
        Rule(r"(moe|expert).*/w[io]\w*(/kernel)?$", MuonDimensionNumbers(-2, -1), "experts", _rank(3, 4)),
        Rule(r"(query|key|value|wq_b|wkv_b)/kernel$", MuonDimensionNumbers(0, (-2, -1)), "to heads", _rank(3, 4)),
        Rule(r"attention\w*/out/kernel$", MuonDimensionNumbers((0, -2), -1), "from heads", _rank(3, 4)),
        Rule(r"kernel$", MuonDimensionNumbers(0, -1), "stacked along the second axis", _rank(2, 3)),
    ),
    by_path,
)
"""Trees like MaxText's, one layer or scanned: layers along the second axis, `[in, layers, heads, head_dim]`."""

hugging_face = Rules(
    "hugging_face",
    (
        *NOT_MATRICES,
        Rule(r"predictions/decoder/|qa_outputs/|\bscore/|proj_out/", None, "an output head by name"),
        Rule(r"(c_attn|q_attn|c_fc|c_proj)/kernel$", MuonDimensionNumbers(1, 0), "a Conv1D, [out, in]", _rank(2)),
    ),
    by_path,
)
"""Flax models of Hugging Face transformers: their heads, and GPT-2's `Conv1D`, whose kernels are `[out, in]`."""


@dataclasses.dataclass(frozen=True)
class Route:
    """Where one leaf goes and the rule that sent it there.

    `rows` and `cols` are the reduction and output axes (non-negative, in the order they merge); both are empty for
    'adam'. `doubt` is a sentence when the rule that fired is probably not what the user wants. `cut`: its
    blocks, if it has several.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    label: str
    rule: str
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()
    doubt: str = ""
    cut: Cut | None = None

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
    routes, offences = [], []
    for (path, leaf), (entry, rule, guess) in zip(named, _entries(tree, dimension_numbers), strict=True):
        if entry is None:
            routes.append(_record(path, leaf, "adam", rule))
            continue
        reason = _why_not_a_matrix(leaf, entry)
        if reason:
            offences.append(Offence(path, reason, leaf.shape, _short(leaf.dtype)))
            continue
        rank = len(leaf.shape)
        rows, cols = _axes(rank, entry.reduction_axis), _axes(rank, entry.output_axis)
        doubt = f"{GUESSED}: matrices {_product(leaf, rows)} × {_product(leaf, cols)}" if guess else ""
        cut = entry.cut(leaf.shape) if isinstance(entry, Blocks) else None
        routes.append(_record(path, leaf, "muon", rule, rows=rows, cols=cols, doubt=doubt, cut=cut))
    raise_for_leaves(
        where,
        "cannot be viewed as matrices",
        offences,
        "Consider passing other muon_weight_dimension_numbers= for these leaves, or None to send them to Adam.",
    )
    return routes


def _entries(tree: Any, dimension_numbers: DimensionNumbers) -> list[tuple[Any, str, bool]]:
    """Dimension numbers of each leaf, the rule that gave them, and whether it is a guess."""
    if isinstance(dimension_numbers, Rules):
        return [dimension_numbers.of(path, leaf.shape) for path, leaf in flatten_with_paths(tree)[0]]
    rule = "dimension numbers given"
    if callable(dimension_numbers):
        rule = getattr(dimension_numbers, "__name__", "callable")
        dimension_numbers = dimension_numbers(tree)
    entries = spread(dimension_numbers, tree, is_dimension_numbers, "muon_weight_dimension_numbers")
    return [(entry, rule if entry is not None else f"{rule}: None given", False) for entry in entries]


def require_matrices(routes: Sequence[Route], where: str = "muon") -> None:
    """Raises ValueError when there are leaves and none is Muon's, or a Muon leaf has no real or complex dtype."""
    _require_inexact([r for r in routes if r.label == "muon"], "Muon", where)
    if routes and all(r.label == "adam" for r in routes):
        raise_for_leaves(
            where,
            "and not one is a Muon leaf, all would be optimized by Adam",
            [Offence(r.path, r.rule, r.shape, _short(r.dtype)) for r in routes],
            "Consider passing muon_weight_dimension_numbers=muon_shard.labels.by_path, or optax.adamw.",
        )


def require_moments(routes: Sequence[Route], where: str = "muon") -> None:
    """Raises ValueError when a leaf of Adam's has no real or complex dtype: its update would be NaN."""
    _require_inexact([r for r in routes if r.label == "adam"], "Adam", where)


def _require_inexact(routes: Sequence[Route], who: str, where: str) -> None:
    reason = "dtype {} is not a float or complex type, it has no momentum"
    raise_for_leaves(
        where,
        f"cannot be optimized by {who}",
        [
            Offence(r.path, reason.format(r.dtype), r.shape, _short(r.dtype))
            for r in routes
            if not jnp.issubdtype(jnp.dtype(r.dtype), jnp.inexact)
        ],
        "Consider masking them with optax.masked.",
    )


def warn_of_unused(rules: DimensionNumbers, routes: Sequence[Route]) -> None:
    """One warning that names the patterns of `from_rules` that match no leaf: most often a misspelt one."""
    if not isinstance(rules, Rules) or rules.name != OWN:
        return
    unused = [rule.pattern for rule in rules.rules if not any(rule.matches(slashed(r.path), r.shape) for r in routes)]
    if unused and routes:
        warnings.warn(
            f"muon_shard: {', '.join(map(repr, unused))} of from_rules: no leaf matches. Paths look like "
            f"{slashed(routes[0].path)!r}.",
            stacklevel=4,
        )


def warn_of_doubts(routes: Sequence[Route]) -> None:
    """One warning that names the leaves which a rule probably sends the wrong way, and those it only guessed."""
    doubtful = [r for r in routes if r.doubt]
    if not doubtful:
        return
    shown = "; ".join(f"{r.path} to {r.label.capitalize()} ({r.doubt})" for r in doubtful[:3])
    more = f"; and {len(doubtful) - 3} more" if len(doubtful) > 3 else ""
    guessed = doubtful[0].doubt.startswith(GUESSED)
    rule, remedy = ("a guess", "from_rules([…])") if guessed else ("the rank-2 rule of optax", "by_path")
    warnings.warn(
        f"muon_shard: {rule} sends {shown}{more}. If that is not meant, pass "
        f"muon_weight_dimension_numbers=muon_shard.labels.{remedy} or a tree of your own.",
        stacklevel=4,
    )


def _two_dimensional_rule(path: str, leaf: Any) -> Route:
    rank = len(leaf.shape)
    if rank == 2:
        name = next((rule.why for rule in NOT_MATRICES if rule.matches(slashed(path), leaf.shape)), "")
        doubt = f"{name}, yet a matrix by the rank-2 rule" if name else ""
        return _record(path, leaf, "muon", "rank 2", rows=(0,), cols=(1,), doubt=doubt)
    doubt = "may be a stack of matrices, sent to Adam by the rank-2 rule" if rank > 2 else ""
    return _record(path, leaf, "adam", f"rank {rank}", doubt=doubt)


def _record(path: str, leaf: Any, label: str, rule: str, **more: Any) -> Route:
    return Route(path, tuple(leaf.shape), str(leaf.dtype), label, rule, **more)


def _product(leaf: Any, dims: Sequence[int]) -> int:
    return math.prod(leaf.shape[d] for d in dims)


def _axes(rank: int, axes: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(a % rank for a in _as_tuple(axes))


def _as_tuple(axes: int | Sequence[int]) -> tuple[int, ...]:
    """Axes as Python ints; numpy's are welcome."""
    try:
        return (operator.index(axes),)  # type: ignore[arg-type]
    except TypeError:
        return tuple(operator.index(a) for a in axes)  # type: ignore[union-attr]


def _why_not_a_matrix(leaf: Any, numbers: Any) -> str:
    rank = len(leaf.shape)
    if not is_dimension_numbers(numbers):
        what = f"; did you mean muon_shard.labels.{numbers}?" if isinstance(numbers, str) else ""
        return f"{numbers!r} is neither MuonDimensionNumbers nor Blocks nor None{what}"
    if rank < 2:
        return f"rank {rank}, a matrix needs rank 2 or more"
    try:
        given = [_as_tuple(axes) for axes in (numbers.reduction_axis, numbers.output_axis)]
    except TypeError:
        return f"{numbers} names axes that are no integers"
    if not all(given):
        return f"{numbers} names no reduction or no output axis"
    outside = [a for a in given[0] + given[1] if not -rank <= a < rank]
    if outside:
        return f"{numbers} names axes {outside} of a leaf of rank {rank}"
    used = _axes(rank, given[0]) + _axes(rank, given[1])
    if len(set(used)) < len(used):
        return f"reduction axes {given[0]} and output axes {given[1]} overlap"
    return numbers.why_not(leaf.shape, used) if isinstance(numbers, Blocks) else ""


def _short(dtype: Any) -> str:
    """`f32` for float32, as JAX prints it."""
    name = str(dtype)
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name[len(long) :]
    return name
