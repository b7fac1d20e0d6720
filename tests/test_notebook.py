"""examples/quickstart.ipynb runs from top to bottom, and its figures are there."""

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
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    client.execute(env=env)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def find(cells, source: str):
    (cell,) = [cell for cell in cells if source in cell.source]
    return cell


def test_it_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_it_shows_what_it_says(executed):
    assert "return a" in printed(find(executed, "fibonacci"))
    assert "class" in find(executed, "llm.stream(").source
    assert "def" in printed(find(executed, "llm.stream("))
    first, *others = [line for line in printed(find(executed, "reset_prefix_cache")).splitlines() if "cached" in line]
    assert " 0 of" in first
    assert len(others) == 2
    assert not any(" 0 of" in line for line in others)
    assert printed(find(executed, "as again")).startswith("[")


def test_both_figures_are_drawn(executed):
    outputs = [output.get("data", {}) for cell in executed for output in cell.outputs]
    figures = [data["image/png"] for data in outputs if "image/png" in data]
    assert len(figures) == 2
    for figure in figures:
        pixels = image.imread(io.BytesIO(base64.b64decode(figure)))
        assert pixels.shape[0] > 300
        assert pixels.shape[1] > 500
        assert pixels.std() > 0.05, "blank"
