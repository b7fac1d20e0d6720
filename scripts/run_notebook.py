"""Run the notebooks of examples/ and store their outputs, which GitHub shows.

python scripts/run_notebook.py               all of them
python scripts/run_notebook.py walkthrough   examples/walkthrough.ipynb alone
"""

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    resources = {"metadata": {"path": str(file.parent)}}
    # What a cell prints piece by piece is one output.
    NotebookClient(notebook, kernel_name="python3", resources=resources, coalesce_streams=True).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
    nbformat.write(notebook, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    files = {file.stem: file for file in sorted(EXAMPLES.glob("*.ipynb"))}
    parser.add_argument("names", nargs="*", help=f"of {', '.join(files)}; default: all")
    names = parser.parse_args().names or list(files)
    if unknown := set(names) - set(files):
        parser.error(f"no notebook of examples/: {', '.join(sorted(unknown))}")
    for name in names:
        run(files[name])


if __name__ == "__main__":
    main()
