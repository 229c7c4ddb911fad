import sys

import numpy as np
import pytest

from benchmarks import ns_accuracy
from benchmarks.ns_accuracy import CONDITIONS, WAYS, by_condition, draw_singular_values, inputs, main, table
from benchmarks.ns_oracle import low_rank, oracle, polynomial, relative_errors, rows_of, with_condition
from muon_shard.newton_schulz import COEFFICIENTS


def test_the_table_holds_the_bars():
    ways = [("bfloat16", "direct"), ("bfloat16", "gram")]
    kinds = {kind: x for kind, x in inputs().items() if "gaussian" in kind}
    found = table(["dion"], ways, kinds)
    assert found.keys() == {"dion"} and found["dion"].keys() == {"bfloat16 direct", "bfloat16 gram"}
    direct, gram = found["dion"]["bfloat16 direct"], found["dion"]["bfloat16 gram"]
    assert gram.keys() == {"gaussian square", "gaussian wide"}
    assert max(gram.values()) <= 2.5e-3
    assert 7e-3 <= min(direct.values()) and max(direct.values()) <= 1.2e-2  # else rounding is not emulated


def test_errors_by_condition_are_one_per_condition():
    gram = by_condition("standard", [("float32", "gram")])["float32 gram"]
    assert len(gram) == len(CONDITIONS)
    assert max(gram) <= 1e-3 and gram[-1] > 50 * gram[0]


def test_inputs_are_what_they_are_called():
    kinds = inputs()
    for kind, x in kinds.items():
        sigma = np.linalg.svd(x, compute_uv=False)
        if kind.startswith("condition"):
            np.testing.assert_allclose(sigma[0] / sigma[-1], float(kind.split()[1]), rtol=1e-6)
        elif kind == "rank 1":
            assert sigma[1] <= 1e-12 * sigma[0]
    assert kinds["gaussian square"].shape == (64, 64) and kinds["gaussian wide"].shape == (64, 256)


def test_the_oracle_is_the_iteration_in_float64():
    rng = np.random.default_rng(0)
    x = np.stack(
        [rng.standard_normal((5, 9)), low_rank(rng, 5, 9, 2), with_condition(rng, 5, 9, 1e3), np.zeros((5, 9))]
    )
    for preconditioning in ("frobenius", "spectral", "schatten", "aol"):
        for given in (x, x + 1j * rng.standard_normal(x.shape), x.swapaxes(-1, -2)):
            wide = given if given.shape[-2] < given.shape[-1] else given.swapaxes(-1, -2)
            gram = wide @ wide.conj().swapaxes(-1, -2)
            value = np.linalg.eigvalsh(gram).clip(0)
            norm = {
                "frobenius": value.sum(-1) ** 0.5,
                "spectral": value.max(-1) ** 0.5,
                "schatten": (value**2).sum(-1) ** 0.25,
                "aol": np.abs(gram).sum(-1) ** 0.5,
            }[preconditioning].reshape(len(x), -1, 1)
            y = wide / np.where(norm == 0, 1, norm)
            for a, b, c in rows_of("you6"):
                r = y @ y.conj().swapaxes(-1, -2)
                y = a * y + b * r @ y + c * r @ r @ y
            y = y if wide is given else y.swapaxes(-1, -2)
            assert relative_errors(oracle(given, rows_of("you6"), preconditioning), y).max() <= 1e-11


def test_it_prints_one_line_of_json_and_draws(monkeypatch, capsys, tmp_path):
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    draw_singular_values(axes)
    assert [line.get_label().split(",")[0] for line in axes.get_lines()] == list(COEFFICIENTS)
    for line, coeffs in zip(axes.get_lines(), COEFFICIENTS):
        np.testing.assert_allclose(line.get_ydata(), polynomial(line.get_xdata(), rows_of(coeffs)))
    file = tmp_path / "accuracy.png"
    monkeypatch.setattr(ns_accuracy, "table", lambda sets: {s: {"float32 gram": {"rank 1": 1.23456e-5}} for s in sets})
    monkeypatch.setattr(
        ns_accuracy, "by_condition", lambda coeffs: {" ".join(w): [1e-3] * len(CONDITIONS) for w in WAYS}
    )
    monkeypatch.setattr(sys, "argv", ["ns_accuracy", "--plot", str(file)])
    main()
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and '"dion": {"float32 gram": {"rank 1": 1.2e-05}}' in out
    assert file.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(ns_accuracy.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["ns_accuracy", "--plot", "x.png"])
    with pytest.raises(SystemExit):
        main()
    assert "--plot needs matplotlib. Consider pip install muon_shard[plot]." in capsys.readouterr().err
