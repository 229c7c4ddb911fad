"""Coefficient sets as data. A new one is one entry of `COEFFICIENTS`.

One step maps every singular value σ to p(σ) = a σ + b σ³ + c σ⁵. A set is a triple for every step, or one row per step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Row = tuple[float, float, float]


def _loosened(rows: tuple[Row, ...], safety: float) -> tuple[Row, ...]:
    """Rows for singular values up to `safety`, by shrinking the argument: all but the last."""
    shrunk = tuple((a / safety, b / safety**3, c / safety**5) for a, b, c in rows[:-1])
    return (*shrunk, rows[-1])


COEFFICIENTS: dict[str, tuple[float, ...] | tuple[Row, ...]] = {
    # Jordan et al., Muon, 2024; optax's default. σ in [.01, 1] ends in [.68, 1.13] after 5 steps. Bears σ up to 1.1.
    "standard": (3.4445, -4.7750, 2.0315),
    # You; Ahn et al., Dion, arXiv 2504.05295; optax's 'dion'. Ends in [.978, 1.032]. Bears σ up to 1.1.
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # You, six steps in multiples of 1/1024. Ends in [.996, .999]. Bears σ up to 1.05 only.
    "you6": tuple(
        (a / 1024, b / 1024, c / 1024)
        for a, b, c in (
            (3955, -8306, 5008),
            (3735, -6681, 3463),
            (3799, -6499, 3211),
            (4019, -6385, 2906),
            (2677, -3029, 1162),
            (2172, -1833, 682),
        )
    ),
    # Amsel et al., Polar Express, arXiv 2505.16932, with safety 1.05. Five steps end in [.846, 1.124]. Bears σ up to
    # 1.05; with the paper's safety of 1.01 it diverges from about 1.02, which rounding in low precision reaches.
    "polar_express": _loosened(
        (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
            (1.875, -1.25, 0.375),
        ),
        safety=1.05,
    ),
    # Boissin et al., Turbo-Muon, arXiv 2512.04632: four steps, made for preconditioning='aol'. σ in [.02, .87] ends in
    # [.987, 1.085]; above .88 it comes out negative, so a matrix close to rank 1 is turned around, whatever divides it.
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
    # DeepSeek-V4 technical report, eq. 28: eight fast steps, two that settle on 1. Bears σ up to 1.1.
    "deepseek_v4": (*((3.4445, -4.7750, 2.0315),) * 8, *((2.0, -1.5, 0.5),) * 2),
}


def coefficients(ns_coeffs: Any, ns_steps: int) -> jax.Array:
    """Coefficients as optax keeps them in its state: a triple `[3]`, or one row per step `[ns_steps, 3]`.

    Surplus rows are cut from the end.

    Raises:
        ValueError: unknown preset, wrong shape, or fewer rows than steps (differs from optax, whose check is inverted).
    """
    return jnp.asarray(_rows(ns_coeffs, ns_steps))


def slopes(ns_coeffs: Any, ns_steps: int) -> tuple[float, ...] | None:
    """The coefficient a of every step, which bounds how much rounding is amplified; None where it is traced."""
    rows = _rows(ns_coeffs, ns_steps)
    if isinstance(rows, Tracer):
        return None
    a = np.atleast_2d(np.asarray(rows, np.float64))[:, 0]
    return tuple(map(float, np.broadcast_to(a, ns_steps)))


def _rows(ns_coeffs: Any, ns_steps: int) -> Any:
    """`coefficients` in numpy where they are known, so that they stay known under `jit`."""
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in COEFFICIENTS:
            raise ValueError(f"Unknown ns_coeffs preset {ns_coeffs!r}; known: {', '.join(COEFFICIENTS)}.")
        ns_coeffs = COEFFICIENTS[ns_coeffs]
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(ns_coeffs))
    rows = jnp.asarray(ns_coeffs) if traced else np.asarray(ns_coeffs)
    if rows.ndim not in (1, 2) or rows.shape[-1] != 3:
        raise ValueError(f"ns_coeffs must have shape (3,) or (n, 3), got {rows.shape}.")
    if rows.ndim == 1:
        return rows
    if rows.shape[0] < ns_steps:
        raise ValueError(f"ns_coeffs has {rows.shape[0]} rows, too few for ns_steps={ns_steps}.")
    return rows[:ns_steps]
