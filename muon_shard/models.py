"""Matrices of public models, to plan and simulate without their weights.

The inventories stand in `data/model_configs.json`, each with its sources: shapes are [in, out], experts
[E, in, out], norms and biases left out.  Embeddings, heads and routers are included; they go to Adam by name.

    model = load('deepseek-v3')
    model.params['layers.attn.q_a_proj.0']                   # (7168, 1536)
    specs(model, {'replica': 8, 'fsdp': 64})[...]            # ('fsdp', None)
"""

import dataclasses
import functools
import importlib.resources
import json
import math
from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

Shape = tuple[int, ...]
Spec = tuple[str | None, ...]

# Axes with a role of their own; any other axis can take the part of 'fsdp'.
_TENSOR, _EXPERT, _REPLICAS = "tensor", "expert", ("replica", "data")


@dataclasses.dataclass(frozen=True)
class Model:
    """Inventory of one model.

    Attributes:
      name: the name given to `load`.
      title: the name its authors use.
      size: parameters as its authors state them; empty where they do not.
      params: path -> shape, one leaf per layer; experts stay one leaf [E, in, out].
      sources: where the sizes were read.
      confidence: how far the sources agree.
      notes: what is particular about this model.
    """

    name: str
    title: str
    size: str
    params: Mapping[str, Shape]
    sources: tuple[str, ...]
    confidence: str
    notes: str

    @property
    def num_params(self) -> int:
        """Elements of all leaves."""
        return sum(math.prod(shape) for shape in self.params.values())


def names() -> tuple[str, ...]:
    """Names that `load` takes."""
    return tuple(_inventories())


def load(name: str) -> Model:
    """The inventory called `name`."""
    entries = _inventories()
    if name not in entries:
        raise ValueError(f"no model is called {name!r}. Known are: {', '.join(entries)}.")
    entry = dict(entries[name])
    params = _params(entry.pop("matrices"))
    return Model(name=name, params=params, sources=tuple(entry.pop("sources")), **entry)


def specs(model: Model, mesh_axes: Mapping[str, int]) -> dict[str, Spec]:
    """Usual shardings of the model's leaves, path -> entries of a PartitionSpec.

    'fsdp' (or the last axis without a role of its own) shards the first matrix dimension that it divides,
    'tensor' the other one, 'expert' the experts.  Without an 'expert' axis, 'fsdp' shards the experts if it
    divides their number.  An axis that divides nothing shards nothing; 'replica' and 'data' never shard.

    Args:
      model: the inventory.
      mesh_axes: axis name -> size, in mesh order.
    """
    return {path: _spec(path, shape, mesh_axes) for path, shape in model.params.items()}


def abstract_params(model: Model, mesh_axes: Mapping[str, int], dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The model's leaves with the shardings of `specs` on an abstract mesh, path -> `ShapeDtypeStruct`."""
    mesh = AbstractMesh(tuple(mesh_axes.values()), tuple(mesh_axes))
    return {
        path: jax.ShapeDtypeStruct(model.params[path], dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for path, spec in specs(model, mesh_axes).items()
    }


@functools.cache
def _inventories() -> Mapping[str, Mapping]:
    file = importlib.resources.files("muon_shard") / "data" / "model_configs.json"
    return json.loads(file.read_text(encoding="utf-8"))


def _params(matrices) -> dict[str, Shape]:
    """Leaves of an inventory: entries with 'layers' become one leaf per layer that has them."""
    params = {}
    for matrix in matrices:
        name, shape = matrix["name"], tuple(matrix["shape"])
        if "layers" in matrix:
            params |= {f"layers.{name}.{i}": shape for i in range(matrix["layers"])}
        else:
            params[name] = shape
    return params


def _spec(path: str, shape: Shape, axes: Mapping[str, int]) -> Spec:
    """The entries of one leaf; matrix dimensions are the last two."""
    spec: list[str | None] = [None] * len(shape)

    def shard(axis: str | None, *dims: int) -> None:  # the first free dimension that the axis divides
        if axis is None or axis not in axes or axis in spec:
            return
        fitting = [dim for dim in dims if spec[dim] is None and shape[dim] % axes[axis] == 0]
        if fitting:
            spec[fitting[0]] = axis

    weights = [a for a in axes if a not in (_TENSOR, _EXPERT, *_REPLICAS)]
    fsdp = "fsdp" if "fsdp" in axes else weights[-1] if weights else None
    if "experts" in path.split("."):
        shard(_EXPERT if _EXPERT in axes else fsdp, 0)
    shard(fsdp, -2, -1)
    shard(_TENSOR, -1, -2)
    return tuple(spec)
