"""examples/quickstart.ipynb runs from top to bottom, and its outputs are stored (scripts/run_notebook.py)."""

import base64
import io
import os
from pathlib import Path

import nbformat
import pytest
from matplotlib import image
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def executed():
    """Its code cells after a run in a fresh kernel, started where its file is."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    options = {"timeout": None, "startup_timeout": 600, "coalesce_streams": True}
    client = NotebookClient(notebook, kernel_name="python3", resources=resources, **options)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    client.execute(env=env)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def find(cells, source: str):
    (cell,) = [cell for cell in cells if source in cell.source]
    return cell


@pytest.fixture(scope="module")
def stored():
    """Its code cells as they are in the repository."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(params=["stored", pytest.param("executed", marks=pytest.mark.slow)])
def cells(request):
    return request.getfixturevalue(request.param)


@pytest.mark.slow
def test_its_outputs_are_stored(stored, executed):
    """All of them, by one run from top to bottom. What is random or takes time may differ."""
    assert [cell.execution_count for cell in stored] == [cell.execution_count for cell in executed]
    for before, after in zip(stored, executed, strict=True):
        assert [output.output_type for output in before.outputs] == [output.output_type for output in after.outputs]


def test_nothing_goes_wrong_and_nobody_is_warned(cells):
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}


def test_it_shows_what_it_says(cells):
    assert "return a" in printed(find(cells, "fibonacci"))
    assert "class" in find(cells, "llm.stream(").source
    assert "def" in printed(find(cells, "llm.stream("))
    first, *others = [line for line in printed(find(cells, "reset_prefix_cache")).splitlines() if "cached" in line]
    assert " 0 of" in first
    assert len(others) == 2
    assert not any(" 0 of" in line for line in others)
    assert printed(find(cells, "as again")).startswith("[")


def test_both_figures_are_drawn(cells):
    outputs = [output.get("data", {}) for cell in cells for output in cell.outputs]
    figures = [data["image/png"] for data in outputs if "image/png" in data]
    assert len(figures) == 2
    for figure in figures:
        pixels = image.imread(io.BytesIO(base64.b64decode(figure)))
        assert pixels.shape[0] > 300
        assert pixels.shape[1] > 500
        assert pixels.std() > 0.05, "blank"
