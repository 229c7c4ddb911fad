"""No figure that repeats exactly may change unseen: collectives, bytes, FLOPs, temporaries, programs, compiles.

`python -m tests.golden_figures` writes them anew, under every supported JAX line (see there).
"""

import pytest

from tests import golden_figures
from tests.golden_figures import FIGURES, VERSION

REMEDY = "see python -m tests.golden_figures"
TEMPORARIES = 0.05
"""They repeat exactly on one machine; patch releases of XLA and other processors may lay out buffers otherwise."""


@pytest.mark.parametrize("figure", FIGURES, ids=" ".join)
def test_planned(figure):
    want = golden_figures.read("planned")
    assert want, REMEDY
    assert golden_figures.planned(*figure) == want[" ".join(figure)], REMEDY


@pytest.mark.parametrize("figure", FIGURES, ids=" ".join)
def test_compiled(figure):
    want = golden_figures.read(f"compiled_{VERSION}")
    if want is None:
        pytest.skip(f"no golden figures of JAX {VERSION}: only what is planned is compared; {REMEDY}")
    found, expected = golden_figures.compiled(*figure), want[" ".join(figure)]
    assert found.pop("temp_bytes") == pytest.approx(expected.pop("temp_bytes"), rel=TEMPORARIES), REMEDY
    assert found == expected, REMEDY


def test_the_files_agree_with_each_other():
    """Planned collectives and FLOPs are those compiled, under every version, and nothing compiles twice."""
    planned = golden_figures.read("planned")
    files = [path.stem for path in golden_figures.FOLDER.glob("compiled_*.json")]
    assert {"compiled_0.10", "compiled_0.12"} <= set(files)
    for file in files:
        compiled = golden_figures.read(file)
        assert list(planned) == list(compiled) == [" ".join(figure) for figure in FIGURES]
        for name, facts in compiled.items():
            assert facts["collectives"] == planned[name]["collectives"], (file, name)
            assert facts["product_flops"] == planned[name]["flops_per_device"], (file, name)
            assert facts["compiles"] == [1, 0], (file, name)
