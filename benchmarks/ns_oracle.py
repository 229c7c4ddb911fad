"""Newton–Schulz in float64 by the singular values, which every form is measured against, and inputs to measure with."""

import numpy as np

from muon_shard.newton_schulz.coefficients import COEFFICIENTS


def steps_of(coeffs: str) -> int:
    """Steps a coefficient set is made for: its rows, or 5."""
    return len(COEFFICIENTS[coeffs]) if np.ndim(COEFFICIENTS[coeffs]) == 2 else 5


def rows_of(coeffs: str, steps: int | None = None) -> np.ndarray:
    """Coefficients [steps, 3] in float64."""
    steps = steps or steps_of(coeffs)
    return np.broadcast_to(np.atleast_2d(np.array(COEFFICIENTS[coeffs], np.float64))[:steps], (steps, 3))


def polynomial(sigma: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """What the steps `rows` [steps, 3] make of singular values."""
    for a, b, c in rows:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma


def decompose(x: np.ndarray, preconditioning: str = "frobenius") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """U, σ, Vᴴ in float64 or complex128 of x [..., m, n], m ≤ n, after it is divided by its norm, or by its rows'."""
    x = np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)
    if preconditioning == "aol":
        rows = np.sqrt(np.abs(x @ x.conj().swapaxes(-1, -2)).sum(-1, keepdims=True))
        return np.linalg.svd(x / np.where(rows == 0, 1, rows), full_matrices=False)
    u, sigma, vt = np.linalg.svd(x, full_matrices=False)
    order = {"frobenius": 2, "schatten": 4, "spectral": np.inf}[preconditioning]
    norm = np.linalg.norm(sigma, order, axis=-1, keepdims=True)
    return u, sigma / np.where(norm == 0, 1, norm), vt


def compose(parts: tuple[np.ndarray, np.ndarray, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """What Newton–Schulz with steps `rows` makes of a matrix that was taken apart."""
    u, sigma, vt = parts
    return (u * polynomial(sigma, rows)[..., None, :]) @ vt


def oracle(x: np.ndarray, rows: np.ndarray, preconditioning: str = "frobenius") -> np.ndarray:
    """What Newton–Schulz with steps `rows` [steps, 3] makes of x [..., m, n], without eps."""
    if x.shape[-2] > x.shape[-1]:
        return oracle(x.swapaxes(-1, -2), rows, preconditioning).swapaxes(-1, -2)
    return compose(decompose(x, preconditioning), rows)


def relative_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """‖got − want‖ ÷ ‖want‖ in Frobenius norms for each matrix of a batch; for want = 0: ‖got‖."""
    norm = np.linalg.norm(want, axis=(-2, -1))
    return np.linalg.norm(got - want, axis=(-2, -1)) / np.where(norm == 0, 1, norm)


def low_rank(rng: np.random.Generator, m: int, n: int, rank: int) -> np.ndarray:
    """A gaussian m×n matrix of the given rank."""
    return rng.standard_normal((m, rank)) @ rng.standard_normal((rank, n))


def with_condition(rng: np.random.Generator, m: int, n: int, condition: float) -> np.ndarray:
    """An m×n matrix, m ≤ n, with random singular vectors and singular values from 1 to 1/condition, evenly in log."""
    u, v = (np.linalg.qr(rng.standard_normal((size, m)))[0] for size in (m, n))
    return (u / np.logspace(0, np.log10(condition), m)) @ v.T
