"""Which devices a collective joins, in every notation XLA prints, and which axes of a mesh that is.

Devices are numbered as in the module: row-major over the mesh.
"""

import itertools
import math
import re
from collections.abc import Iterable

import numpy as np

Groups = tuple[tuple[int, ...], ...]
MeshAxes = tuple[tuple[str, int], ...]

_LIST = re.compile(r"\b(?:replica_groups|source_target_pairs)=(\{[\d{},\s]*\})")  # {{0,1},{2,3}}, {}
_IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")  # [4,2]<=[2,4]T(1,0)
_MESH = re.compile(  # mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b':(1)2}
    r"\breplica_groups=mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=\((?P<ids>.*?)\))? \{(?P<axes>[^}]*)\}"
)


def parse_groups(attributes: str) -> Groups:
    """Groups of devices from the attributes of a collective, or (source, target) pairs; () stands for all devices."""
    if listed := _LIST.search(attributes):
        return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,\s]+)\}", listed[1]))
    if iota := _IOTA.search(attributes):
        return _rows(_iota(iota[2], iota[3]).reshape(_numbers(iota[1])))
    if mesh := _MESH.search(attributes):
        return _rows(_mesh_groups(mesh["sizes"], mesh["ids"], mesh["axes"]))
    return ()


def axes_of(groups: Groups, mesh_axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes that groups span, in mesh order; () when they span none, or are not those of any set of axes."""
    sizes = dict(mesh_axes)
    if not groups:
        return tuple(name for name, size in mesh_axes if size > 1)
    if sorted(itertools.chain(*groups)) != list(range(math.prod(sizes.values()))):
        return ()
    spanned = _differing(groups, mesh_axes)
    ways = math.prod(sizes[name] for name in spanned)
    return spanned if all(len(group) == ways for group in groups) else ()


def axes_crossed(pairs: Groups, mesh_axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes along which (source, target) pairs move anything, in mesh order.

    Fewer than the axes it was written for, when a shift over several of them leaves one of them alone.
    """
    devices = math.prod(size for _, size in mesh_axes)
    if any(device >= devices for pair in pairs for device in pair):
        return ()
    return _differing(pairs, mesh_axes)


def _differing(groups: Groups, mesh_axes: MeshAxes) -> tuple[str, ...]:
    """The axes along which the members of any group differ."""
    grid = np.indices([size for _, size in mesh_axes]).reshape(len(mesh_axes), -1)
    differs = np.zeros(len(mesh_axes), bool)
    for group in groups:
        places = grid[:, list(group)]
        differs |= (places != places[:, :1]).any(1)
    return tuple(name for (name, _), differ in zip(mesh_axes, differs, strict=True) if differ)


def _mesh_groups(sizes: str, ids: str | None, axes: str) -> np.ndarray:
    """The groups over some axes, or parts of axes, of a mesh; [groups, members].

    `'a':(2)4` is the part of axis a that is left when its 2 outer and all inner places are fixed: 4 wide.
    """
    parts = [
        (name, int(outer or 1), int(width or 0))
        for name, outer, width in re.findall(r"'?([^',:\s]+)'?(?::\((\d+)\)(\d+))?", axes)
    ]
    shape, grouped = [], []
    for axis, size in re.findall(r"'?([^',=]+)'?=(\d+)", sizes):
        spans = [(outer, outer * width if width else int(size)) for name, outer, width in parts if name == axis]
        for low, high in itertools.pairwise(sorted({1, int(size), *itertools.chain(*spans)})):
            if any(first <= low and high <= last for first, last in spans):
                grouped.append(len(shape))
            shape.append(high // low)
    kept = [d for d in range(len(shape)) if d not in grouped]
    return _device_ids(ids, shape).transpose(*kept, *grouped).reshape(-1, math.prod(shape[d] for d in grouped))


def _device_ids(ids: str | None, shape: list[int]) -> np.ndarray:
    """The devices of a mesh: in order, `0,2,1,3`, or `[2,4]T(1,0)`."""
    if ids is None:
        return np.arange(math.prod(shape)).reshape(shape)
    iota = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids)
    return (_iota(iota[1], iota[2]) if iota else np.array(_numbers(ids))).reshape(shape)


def _iota(shape: str, order: str | None) -> np.ndarray:
    """0, 1, 2, … in a shape, transposed."""
    sizes = _numbers(shape)
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return devices.transpose(_numbers(order)) if order else devices


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _rows(groups: Iterable[np.ndarray]) -> Groups:
    return tuple(tuple(int(device) for device in group) for group in groups)
