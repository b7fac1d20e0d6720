"""Run examples/quickstart.ipynb and store its outputs, which GitHub shows: `python scripts/run_notebook.py`."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "quickstart.ipynb"


def main() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    # What a cell prints piece by piece is one output.
    NotebookClient(notebook, kernel_name="python3", resources=resources, coalesce_streams=True).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
