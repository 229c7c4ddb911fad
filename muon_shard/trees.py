"""Pytree helpers: names of leaves, and prefix trees spread over the leaves they stand for."""

from collections.abc import Callable
from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

from muon_shard.logical import Blocks


def leaf_path(path: Any) -> str:
    """`params['blocks'][0]['wq']` for a key path of `jax.tree_util`."""
    return "params" + jax.tree_util.keystr(path)


def flatten_with_paths(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Leaves with readable paths, and the treedef."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [(leaf_path(path), leaf) for path, leaf in leaves], treedef


def spread(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool], name: str, of: str = "params") -> list[Any]:
    """One entry of `prefix` per leaf of `tree`, in flattening order.

    `prefix` may stop above the leaves of `tree` (an entry then stands for the whole subtree), and may hold entries
    where `tree` holds nothing (`optax.MaskedNode`, None). Raises ValueError when the two do not match.
    """
    found: list[Any] = []
    if not jax.tree.leaves(tree):  # also what optax.tree.map_params calls init with: a placeholder without leaves
        return found
    try:
        jax.tree.map(
            lambda entry, sub: found.extend([entry] * len(jax.tree.leaves(sub))),
            prefix,
            tree,
            is_leaf=is_leaf,
        )
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{name} does not match the tree of {of} (it must be the same tree or a prefix): {error}"
        ) from error
    return found


def is_dimension_numbers(x: Any) -> bool:
    """Where a tree of dimension numbers ends; None is an entry of its own."""
    return x is None or isinstance(x, MuonDimensionNumbers | Blocks)
