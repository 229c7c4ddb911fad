"""Where the sharding of a leaf is known from: param_shardings, its type, its value, what init saw, or an assumption."""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from muon_shard.errors import Offence, raise_for_leaves
from muon_shard.labels import unboxed_path
from muon_shard.layout import MeshAxes, spec_entries, why_illegal
from muon_shard.trees import flatten_with_paths, spread

AnyMesh: TypeAlias = Mesh | AbstractMesh
Shardings: TypeAlias = Any
"""`param_shardings=`: a pytree, a prefix of one, or a callable of params."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh and spec of one leaf, and who said so. `mesh` is None for a leaf on a single device."""

    mesh: AnyMesh | None
    spec: tuple[tuple[str, ...], ...]
    source: str

    @property
    def mesh_axes(self) -> MeshAxes:
        return () if self.mesh is None else tuple(self.mesh.shape.items())

    @property
    def partition_spec(self) -> PartitionSpec:
        return partition_spec(self.spec)


def partition_spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """A `PartitionSpec` from one tuple of axis names per dimension, the inverse of `spec_entries`."""
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in entries))


class Memory:
    """Specs that an eager `init` was shown, by path and shape: a hint for Auto axes, where tracers hide theirs.

    Never a condition of correctness: `shard_map` reshards whatever arrives.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, tuple[int, ...]], NamedSharding] = {}
        self._warned = False

    def remember(self, params: Any) -> None:
        for (path, leaf), spec in zip(flatten_with_paths(params)[0], annotations(params), strict=True):
            sharding = concrete_sharding(leaf) or _annotated(leaf, spec)
            if sharding is not None:
                self._seen[unboxed_path(path), tuple(leaf.shape)] = sharding

    def recall(self, path: str, leaf: Any, mesh: AnyMesh) -> NamedSharding | None:
        seen = self._seen.get((unboxed_path(path), tuple(leaf.shape)))
        return seen if seen is not None and dict(seen.mesh.shape) == dict(mesh.shape) else None

    def warn_once(self, paths: Sequence[str]) -> None:
        """One warning, for the first trace that has to assume; the remedy is the same for all."""
        if self._warned:
            return
        self._warned = True
        shown = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
        unseen = (
            "Init has not shown them to this transformation (optax.inject_hyperparams makes a new one for every call, "
            "a restored state comes without init). "
        )
        warnings.warn(
            f"muon_shard: the shardings of {shown} are not visible under jit on Auto mesh axes; assuming each is "
            "sharded over all axes along its first dividing matrix dimension. Results are right, bytes may be wasted. "
            f"{'' if self._seen else unseen}Pass param_shardings= (the parameters themselves will do), call init "
            "outside jit on the same transformation, or use Explicit axes.",
            stacklevel=4,
        )


def concrete_sharding(leaf: Any) -> NamedSharding | None:
    """The `NamedSharding` of an array or `ShapeDtypeStruct`; None for tracers, numpy arrays and single devices."""
    if isinstance(leaf, Tracer):
        return None
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def mesh_of(leaf: Any) -> AnyMesh | None:
    """The mesh a leaf lives on, also for tracers; None without one."""
    sharding = concrete_sharding(leaf)
    if sharding is None and isinstance(leaf, jax.Array):
        sharding = jax.typeof(leaf).sharding
    mesh = getattr(sharding, "mesh", None)
    return None if mesh is None or not mesh.axis_names else mesh


def annotations(tree: Any) -> list[PartitionSpec | None]:
    """Per leaf, the spec that flax's metadata names: of an `nnx.Variable`, or a `linen.Partitioned` around it."""
    found: list[PartitionSpec | None] = []
    for node in jax.tree.leaves(tree, is_leaf=_is_box):
        found += [_annotation(node)] * len(jax.tree.leaves(node))
    return found


def _is_box(x: Any) -> bool:
    """Known by its methods: flax need not be installed."""
    return hasattr(x, "get_partition_spec") or hasattr(x, "get_metadata")


def _annotation(node: Any) -> PartitionSpec | None:
    if hasattr(node, "get_partition_spec"):
        return node.get_partition_spec()
    spec = node.get_metadata().get("out_sharding") if hasattr(node, "get_metadata") else None
    spec = getattr(spec, "spec", spec)
    return PartitionSpec(*spec) if isinstance(spec, tuple | PartitionSpec) else None


def _annotated(leaf: Any, spec: PartitionSpec | None) -> NamedSharding | None:
    """The sharding a spec means on the mesh of the leaf; None where it names other axes, as logical ones."""
    mesh = mesh_of(leaf)
    if mesh is None or spec is None or why_illegal(leaf.shape, spec, tuple(mesh.shape.items())):
        return None
    return NamedSharding(mesh, spec)


def _unboxed(tree: Any) -> Any:
    """Without boxes, which are around arrays at some places and not at others."""
    return jax.tree.map(
        lambda x: jax.tree.leaves(x)[0] if _is_box(x) else x, tree, is_leaf=lambda x: x is None or _is_box(x)
    )


def axis_types(mesh: AnyMesh) -> dict[str, AxisType]:
    """Auto, Explicit or Manual, by axis name."""
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def place_leaves(tree: Any, param_shardings: Shardings, memory: Memory, where: str) -> list[Placement]:
    """One placement per leaf of `tree`, with one warning, ever, when some had to be assumed.

    Raises:
        ValueError: listing every leaf whose given spec is illegal, or naming a tree that does not match.
    """
    placements = place_quietly(tree, param_shardings, memory, where)
    named, _ = flatten_with_paths(tree)
    unknown = [path for (path, _), placement in zip(named, placements, strict=True) if placement.source == ASSUMED]
    if unknown:
        memory.warn_once(unknown)
    return placements


def place_quietly(tree: Any, param_shardings: Shardings, memory: Memory, where: str) -> list[Placement]:
    """`place_leaves` without the warning: for `init`, which may be traced only for its shapes.

    Raises:
        ValueError: listing every leaf whose given spec is illegal, or naming a tree that does not match.
    """
    named, _ = flatten_with_paths(tree)
    given = _given(tree, param_shardings) or [None] * len(named)
    annotated = annotations(tree)
    raise_for_leaves(
        where,
        "seen from inside a shard_map",
        [_offence(path, leaf, "its axes are Manual here") for path, leaf in named if _is_shard(leaf)],
        "Consider calling it outside of shard_map, where shapes are global.",
    )
    placements, offences = [], []
    for (path, leaf), entry, spec in zip(named, given, annotated, strict=True):
        placement = _from_given(leaf, entry) if entry is not None else _from_leaf(path, leaf, memory, spec)
        if isinstance(placement, str):
            offences.append(Offence(path, placement, leaf.shape, str(leaf.dtype), entry))
            continue
        reason = why_illegal(leaf.shape, placement.spec, placement.mesh_axes)
        if reason:
            offences.append(Offence(path, reason, leaf.shape, str(leaf.dtype), placement.partition_spec))
        placements.append(placement)
    raise_for_leaves(
        where,
        "cannot be sharded as given",
        offences,
        "Consider correcting param_shardings= for these leaves.",
    )
    _require_coherent_meshes(named, placements, where)
    return placements


ASSUMED = "assumed"


def whole(tree: Any, param_shardings: Shardings, where: str) -> Any:
    """`tree` as the whole mesh sees it: inside a user's `shard_map` structs of global shapes, elsewhere `tree` itself.

    Raises:
        ValueError: listing the leaves whose global shape cannot be told, and why.
    """
    named, treedef = flatten_with_paths(tree)
    if not any(_is_shard(leaf) for _, leaf in named):
        return tree
    given = _given(tree, param_shardings) or [None] * len(named)
    reasons = [_why_not_whole(leaf, entry) for (_, leaf), entry in zip(named, given, strict=True)]
    raise_for_leaves(
        where,
        "seen from inside a shard_map",
        [_offence(path, leaf, reason) for (path, leaf), reason in zip(named, reasons, strict=True) if reason],
        "Consider param_shardings= (the in_specs of the parameters, with the axes that are not Manual added), or "
        "calling it outside of shard_map.",
    )
    return treedef.unflatten([_whole(leaf, entry) for (_, leaf), entry in zip(named, given, strict=True)])


def _is_shard(leaf: Any) -> bool:
    return isinstance(leaf, Tracer) and bool(_axes(leaf, AxisType.Manual))


def _why_not_whole(leaf: Any, entry: Any) -> str:
    """Why a local shard cannot be seen as a part of its leaf, in one sentence; '' if it can."""
    manual = _axes(leaf, AxisType.Manual)
    if entry is None:
        return f"axes {manual} are Manual here, and a shard does not tell its global shape"
    entries = _entries(leaf, entry)
    for axes in entries:
        axes = [a for a in axes if jax.typeof(leaf).sharding.mesh.shape.get(a, 1) > 1]
        if axes != sorted(axes, key=lambda a: a not in manual):
            inner = [a for a in axes if a in manual]
            return f"{inner} of {axes} are Manual here, so they cut it first, and its spec must name them first"
    surplus = sorted(varying(leaf).intersection(manual).difference(*entries))
    if surplus:
        return f"it differs along {surplus}, which do not shard it: a gradient whose mean has not been taken?"
    return ""


def varying(x: Any) -> frozenset[str]:
    """The mesh axes along which JAX believes `x` to vary; empty where `shard_map` does not check that (check_vma)."""
    return frozenset(getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", ()))


def _entries(leaf: Any, entry: Any) -> tuple[tuple[str, ...], ...]:
    """The axes that shard each dimension, by an entry of `param_shardings` that may yet turn out to be illegal."""
    spec = getattr(concrete_sharding(entry) or entry, "spec", entry)
    return spec_entries(spec if isinstance(spec, PartitionSpec) else (), leaf.ndim)


def _whole(leaf: Any, entry: Any) -> jax.ShapeDtypeStruct:
    """A local shard with the shape of the leaf; whether its entry in `param_shardings` is legal is checked later."""
    sharding = jax.typeof(leaf).sharding
    manual = _axes(leaf, AxisType.Manual)
    ways = [math.prod(sharding.mesh.shape[a] for a in axes if a in manual) for axes in _entries(leaf, entry)]
    shape = tuple(size * way for size, way in zip(leaf.shape, ways, strict=False))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


def _offence(path: str, leaf: Any, reason: str) -> Offence:
    return Offence(path, reason, leaf.shape, str(leaf.dtype))


def _given(tree: Any, param_shardings: Shardings) -> list[Any] | None:
    if param_shardings is None:
        return None
    if callable(param_shardings) and not isinstance(param_shardings, PartitionSpec):
        param_shardings = param_shardings(tree)
    return spread(
        _unboxed(param_shardings),
        tree,
        lambda x: x is None or isinstance(x, NamedSharding | PartitionSpec),
        "param_shardings",
    )


def _from_given(leaf: Any, entry: Any) -> Placement | str:
    """The placement an entry of `param_shardings` asks for, or why it cannot be had."""
    if hasattr(entry, "shape") and hasattr(entry, "dtype"):
        if tuple(entry.shape) != tuple(leaf.shape):
            return f"param_shardings= holds an array of shape {list(entry.shape)} for it"
        sharding = concrete_sharding(entry)
        if sharding is None:
            return Placement(mesh_of(leaf), ((),) * len(leaf.shape), "param_shardings")
        entry = sharding
    if isinstance(entry, NamedSharding):
        on = mesh_of(leaf)
        if on is not None and dict(on.shape) != dict(entry.mesh.shape):
            return f"it lives on mesh {dict(on.shape)}, param_shardings= names mesh {dict(entry.mesh.shape)}"
        mesh: AnyMesh | None = entry.mesh if on is None else on
        return _checked(leaf, mesh, entry.spec)
    if not isinstance(entry, PartitionSpec):
        return f"param_shardings= holds a {type(entry).__name__}, not a sharding, PartitionSpec, array or struct"
    context = jax.sharding.get_abstract_mesh()
    mesh = mesh_of(leaf) or (context if context.axis_names else None)
    if mesh is None:
        return "a PartitionSpec needs a mesh, and neither the leaf nor jax.set_mesh names one"
    return _checked(leaf, mesh, entry)


def _checked(leaf: Any, mesh: AnyMesh | None, spec: PartitionSpec) -> Placement | str:
    if PartitionSpec.UNCONSTRAINED in tuple(spec):
        return "UNCONSTRAINED does not say how the leaf is sharded"
    reason = why_illegal(leaf.shape, spec, () if mesh is None else tuple(mesh.shape.items()))
    return reason or Placement(mesh, spec_entries(spec, len(leaf.shape)), "param_shardings")


def _from_leaf(path: str, leaf: Any, memory: Memory, spec: PartitionSpec | None) -> Placement:
    """Types, then values, then memory, then flax's annotation (`spec`), then the assumption."""
    mesh, rank = mesh_of(leaf), len(leaf.shape)
    if mesh is None:
        return Placement(None, ((),) * rank, "one device")
    sharding = concrete_sharding(leaf)
    if sharding is not None:
        return Placement(mesh, spec_entries(sharding.spec, rank), "its sharding")
    typed = spec_entries(jax.typeof(leaf).sharding.spec, rank)
    hidden = [name for name, kind in axis_types(mesh).items() if kind == AxisType.Auto and mesh.shape[name] > 1]
    if not hidden:
        return Placement(mesh, typed, "its type")
    visible = [a for a in mesh.axis_names if a not in hidden and mesh.shape[a] > 1]
    for seen, source in ((memory.recall(path, leaf, mesh), "init"), (_annotated(leaf, spec), "its annotation")):
        entries = () if seen is None else spec_entries(seen.spec, rank)
        if seen is not None and only_axes(typed, visible) == only_axes(entries, visible):
            return Placement(mesh, entries, source)
    return Placement(mesh, assumed_spec(leaf.shape, typed, hidden, mesh), ASSUMED)


def assumed_spec(
    shape: Sequence[int], typed: tuple[tuple[str, ...], ...], hidden: Sequence[str], mesh: AnyMesh
) -> tuple[tuple[str, ...], ...]:
    """The known (typed) part of a spec, with the hidden axes added to the first dimension that most of them divide."""

    def dividing(d: int, axes: Sequence[str]) -> bool:
        return shape[d] % math.prod(mesh.shape[a] for a in (*typed[d], *axes)) == 0

    # Matrix dimensions are last in stacks: rows first, then cols, then whatever is in front.
    dims = [*range(max(len(shape) - 2, 0), len(shape)), *range(max(len(shape) - 2, 0))]
    for start in range(len(hidden)):
        axes = tuple(hidden[start:])
        for d in dims:
            if dividing(d, axes):
                return tuple(t + axes if i == d else t for i, t in enumerate(typed))
    return typed


def only_axes(entries: tuple[tuple[str, ...], ...], axes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The part of a spec over these axes."""
    return tuple(tuple(a for a in of_dim if a in axes) for of_dim in entries)


def _axes(leaf: Any, kind: AxisType) -> list[str]:
    mesh = mesh_of(leaf)
    return [] if mesh is None else [name for name, k in axis_types(mesh).items() if k == kind and mesh.shape[name] > 1]


def _require_coherent_meshes(named: Sequence[tuple[str, Any]], placements: Sequence[Placement], where: str) -> None:
    """Concrete meshes must hold the same devices or disjoint ones: no device can run two programs at once."""
    meshes: dict[frozenset[int], Mesh] = {}
    offences = []
    for (path, leaf), placement in zip(named, placements, strict=True):
        if not isinstance(placement.mesh, Mesh):
            continue
        devices = frozenset(d.id for d in placement.mesh.devices.flat)
        clash = next((m for ids, m in meshes.items() if ids != devices and ids & devices), None)
        if clash is not None:
            offences.append(
                Offence(
                    path,
                    f"its mesh {dict(placement.mesh.shape)} shares some, not all, devices with mesh "
                    f"{dict(clash.shape)} of other leaves",
                    leaf.shape,
                    str(leaf.dtype),
                )
            )
        meshes.setdefault(devices, placement.mesh)
    raise_for_leaves(
        where,
        "on overlapping meshes",
        offences,
        "Consider one mesh for all parameters, or disjoint meshes for pipeline stages.",
    )
