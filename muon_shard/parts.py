"""What an owner does with a whole matrix before and after: cut into the blocks declared, turned wide, and back."""

import jax
import jax.numpy as jnp

from muon_shard.layout import Kind


def split(x: jax.Array, kind: Kind) -> list[jax.Array]:
    """Matrices of one kind [count, rows, cols] → wide matrices [.., m, n], one array for blocks that lie together."""
    if kind.parts is None:
        return [_wide(x)]
    parts, count = kind.parts, len(x)
    x = x.mT if parts.side == 0 else x
    x, at, pieces = x.reshape(*x.shape[:2], parts.outer, sum(parts.sizes)), 0, []
    for size, many in parts.runs:
        piece = x[..., at : at + size * many].reshape(*x.shape[:3], many, size)
        pieces.append(_wide(piece.transpose(0, 3, 1, 2, 4).reshape(count * many, x.shape[1], -1)))
        at += size * many
    return pieces


def join(ys: list[jax.Array], kind: Kind) -> jax.Array:
    """The inverse of `split`."""
    if kind.parts is None:
        return ys[0].mT if kind.shape[0] > kind.shape[1] else ys[0]
    parts, other, pieces = kind.parts, kind.shape[1 - kind.parts.side], []
    for (size, many), y in zip(parts.runs, ys, strict=True):
        y = y.mT if other > parts.outer * size else y
        y = y.reshape(-1, many, other, parts.outer, size).transpose(0, 2, 3, 1, 4)
        pieces.append(y.reshape(*y.shape[:3], many * size))
    x = jnp.concatenate(pieces, axis=-1)
    x = x.reshape(*x.shape[:2], -1)
    return x.mT if parts.side == 0 else x


def _wide(x: jax.Array) -> jax.Array:
    return x.mT if x.shape[1] > x.shape[2] else x
