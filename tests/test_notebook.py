"""The notebooks of examples/ run from top to bottom, and their outputs are stored (scripts/run_notebook.py)."""

import base64
import io
import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra test")
image = pytest.importorskip("matplotlib.image", reason="needs the extra test")
NotebookClient = pytest.importorskip("nbclient", reason="needs the extra test").NotebookClient

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NUM_FIGURES = {"quickstart": 2, "walkthrough": 3}

quickstart = pytest.mark.parametrize("name", ["quickstart"], indirect=True)
walkthrough = pytest.mark.parametrize("name", [pytest.param("walkthrough", marks=pytest.mark.nightly)], indirect=True)


@pytest.fixture(scope="module", params=["quickstart", pytest.param("walkthrough", marks=pytest.mark.nightly)])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def executed(name):
    """Its code cells after a run in a fresh kernel, started where its file is."""
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES)}}
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
def stored(name):
    """Its code cells as they are in the repository."""
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(params=["stored", pytest.param("executed", marks=pytest.mark.slow)])
def cells(name, request):
    return request.getfixturevalue(request.param)


def test_all_notebooks_are_tested():
    assert {file.stem for file in EXAMPLES.glob("*.ipynb")} == set(NUM_FIGURES)


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


@quickstart
def test_the_quick_start_shows_what_it_says(cells):
    assert "return a" in printed(find(cells, "fibonacci"))
    assert "class" in find(cells, "llm.stream(").source
    assert "def" in printed(find(cells, "llm.stream("))
    first, *others = [line for line in printed(find(cells, "reset_prefix_cache")).splitlines() if "cached" in line]
    assert " 0 of" in first
    assert len(others) == 2
    assert not any(" 0 of" in line for line in others)
    assert printed(find(cells, "as again")).startswith("[")


@walkthrough
def test_the_walkthrough_shows_what_it_says(cells):
    assert "return a" in printed(find(cells, "while not scheduler.is_finished():\n    seqs"))
    slots = printed(find(cells, "prepare_prefill"))
    assert "slot_mapping: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 32, 33, 34]" in slots
    assert "slot_mapping: [18, 35]" in slots
    shared = printed(find(cells, "compute_hash"))
    assert "sequence 1 begins: 32 of 42 tokens cached" in shared
    assert "sequence 2 begins: 16 of 22 tokens cached" in shared
    assert "64 of 150" in printed(find(cells, "small.max_num_batched_tokens"))
    preempted = printed(find(cells, "def run_three("))
    assert "24 blocks: 0 preemptions" in preempted
    assert "8 blocks: 1 preemptions" in preempted
    assert "the same tokens: True" in preempted
    prefill, *decode = printed(find(cells, "pickle.dumps(seq)")).splitlines()
    assert "200 token ids" in prefill
    assert len(decode) == 2
    assert all(" 0 token ids" in line for line in decode)
    assert "all the same: True" in printed(find(cells, "plain=True"))
    assert "all the same: True" in printed(find(cells, "with LLM("))


def test_all_figures_are_drawn(name, cells):
    outputs = [output.get("data", {}) for cell in cells for output in cell.outputs]
    figures = [data["image/png"] for data in outputs if "image/png" in data]
    assert len(figures) == NUM_FIGURES[name]
    for figure in figures:
        pixels = image.imread(io.BytesIO(base64.b64decode(figure)))
        assert pixels.shape[0] > 300
        assert pixels.shape[1] > 500
        assert pixels.std() > 0.05, "blank"
