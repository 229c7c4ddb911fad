"""The sets of matrices the benchmarks run on, and their arrays on a mesh of 8 emulated devices."""

import dataclasses
import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Leaves = dict[str, tuple[tuple[int, ...], P]]

LAYERS = 8
WIDTH = 512


@dataclasses.dataclass(frozen=True)
class ReferenceSet:
    """A mesh and the leaves on it: name → (global shape, spec)."""

    mesh_shape: tuple[int, ...]
    mesh_axes: tuple[str, ...]
    leaves: Leaves

    @property
    def specs(self) -> dict[str, P]:
        """The spec of every leaf."""
        return {name: spec for name, (_, spec) in self.leaves.items()}

    def mesh(self) -> Mesh:
        """The mesh, with Auto axes: optax's Muon refuses sharded matrices on Explicit ones."""
        kinds = (AxisType.Auto,) * len(self.mesh_axes)
        return jax.make_mesh(self.mesh_shape, self.mesh_axes, axis_types=kinds)

    def shardings(self, mesh: Mesh) -> dict[str, NamedSharding]:
        """The sharding of every leaf on `mesh`."""
        return {name: NamedSharding(mesh, spec) for name, spec in self.specs.items()}

    def host_arrays(self, seed: int) -> dict[str, np.ndarray]:
        """Normal numbers for every leaf, equal for equal seeds, on the host."""
        rng = np.random.default_rng(seed)
        return {name: rng.standard_normal(shape, np.float32) for name, (shape, _) in self.leaves.items()}

    def arrays(self, mesh: Mesh, seed: int) -> dict[str, jax.Array]:
        """`host_arrays(seed)` laid out on `mesh`: seed 0 for parameters, other seeds for gradients."""
        return jax.device_put(self.host_arrays(seed), self.shardings(mesh))


def transformer(layers: int, width: int, spec: P) -> Leaves:
    """Attention q, k, v, o and a 4× feed-forward up, down, for each layer."""
    shapes = dict.fromkeys("qkvo", (width, width)) | {"up": (width, 4 * width), "down": (4 * width, width)}
    return {f"{i}.{name}": (shape, spec) for i in range(layers) for name, shape in shapes.items()}


def mixed() -> Leaves:
    """35 matrices of 7 shapes, in counts that the devices do not divide: the hard case for balance."""
    counts = {
        (512, 512): 20,
        (512, 2048): 5,
        (2048, 512): 5,
        (512, 1024): 1,
        (1536, 512): 1,
        (512, 256): 2,
        (256, 512): 1,
    }
    return {
        f"{rows}x{cols}.{i}": ((rows, cols), P("fsdp", None))
        for (rows, cols), count in counts.items()
        for i in range(count)
    }


SETS = {
    "reference": ReferenceSet((2, 4), ("replica", "fsdp"), transformer(LAYERS, WIDTH, P("fsdp", None))),
    "replicated": ReferenceSet((8,), ("replica",), transformer(LAYERS, WIDTH, P(None, None))),
    "mixed": ReferenceSet((2, 4), ("replica", "fsdp"), mixed()),
}


def laid_on(mesh: Mesh, state):
    """`state` with scalars born on one device replicated on `mesh`, everything else where it was."""
    replicated, devices = NamedSharding(mesh, P()), set(mesh.devices.flat)
    return jax.tree.map(lambda x: x if x.sharding.device_set == devices else jax.device_put(x, replicated), state)


def local_bytes(tree) -> int:
    """Bytes of the arrays of `tree` that one device holds."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
