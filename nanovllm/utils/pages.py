"""Where the pages of the documentation are: in a wheel, in the folder `docs` of the package, which is a link here."""

from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "docs"


def page(name: str = "") -> str:
    """The path of a page, or of all; where a copy has none, its path in the repository."""
    return str((_FOLDER / name).resolve()) if (_FOLDER / name).exists() else str(Path("docs", name))
