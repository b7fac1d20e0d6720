"""Writes the line counts of the core into docs/architecture.md, and prints their sum and the package's.

python scripts/core_lines.py
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^(\| `(nanovllm/[\w/]+\.py)` \|.*\| )[^|]*(\|)$", re.MULTILINE)


def count_lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def main() -> None:
    page = ROOT / "docs" / "architecture.md"
    core = []

    def fill(row: re.Match) -> str:
        core.append(count_lines(ROOT / row[2]))
        return f"{row[1]}{core[-1]} {row[3]}"

    page.write_text(ROW.sub(fill, page.read_text()))
    package = sum(map(count_lines, (ROOT / "nanovllm").rglob("*.py")))
    print(f"core: {sum(core)} lines in {len(core)} files; package: {package} lines")


if __name__ == "__main__":
    main()
