"""Notebooks: what is stored, fast; and each executed in a fresh kernel."""

import os
import pathlib
import sys

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager  # noqa: E402
from jupyter_client.manager import AsyncKernelManager  # noqa: E402

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


class ThisPython(KernelSpecManager):
    """Starts every kernel with the interpreter of the tests, whatever kernels are registered on the machine."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name=kernel_name, language="python")


def clean_environment() -> dict[str, str]:
    """Without what pytest, or whoever started it, tells JAX and matplotlib; with the package, installed or not."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PYTEST"))}
    kept.pop("MPLBACKEND", None)
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return kept


def code_cells(notebook) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert NOTEBOOKS


@each
def test_is_short_and_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert len(notebook.cells) < 15
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in notebook.cells:
        assert not cell.metadata
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None


@each
def test_installs_only_what_is_missing_then_emulates_devices(path):
    install, first, *_ = code_cells(nbformat.read(path, as_version=4))
    guard, command = install.splitlines()[-2:]
    assert guard == 'if importlib.util.find_spec("muon_shard") is None:'
    assert command.startswith("    %pip install")
    lines = [line for line in first.splitlines() if line.strip()]
    assert lines[0] == "import muon_shard"
    assert lines[1].startswith("muon_shard.emulate_devices(8)")


@pytest.mark.slow
@each
def test_runs(path):
    notebook = nbformat.read(path, as_version=4)
    manager = AsyncKernelManager(kernel_spec_manager=ThisPython())
    where = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(notebook, km=manager, timeout=300, resources=where)
    client.execute(env=clean_environment())  # raises at the first cell with an error
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
