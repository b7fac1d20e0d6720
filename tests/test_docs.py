"""README and docs say what is true of the code: families, memory of models, versions, links; and say it once."""

import re
import shlex
from pathlib import Path

import pytest

from nanovllm import __version__
from nanovllm.fit import CARDS_GIB, print_fit
from nanovllm.models.registry import ARCHITECTURES

ROOT = Path(__file__).parents[1]
# The notebook and the changelog tell what was; all others tell what is.
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), ROOT / "llms.txt", *(ROOT / "docs").glob("*.md"), ROOT / "pyproject.toml"]
    if path.name not in ("notebook.md", "CHANGELOG.md")
}
README = PAGES["README.md"]
NUMBERS = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen"
)
FAMILY_FILES = {module.replace(".", "/") + ".py" for module in ARCHITECTURES.values()}


def table_after(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table after this heading, without its head."""
    table = re.search(r"\n\|.*?(?=\n\n|\Z)", text[text.index(heading) :], re.DOTALL).group().strip().split("\n")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_readme_has_a_row_for_each_family():
    """A family is a file of nanovllm/models that the registry names: its row links to it."""
    linked = [re.findall(r"\]\((nanovllm/models/\w+\.py)\)", row[0]) for row in table_after(README, "## Supported")]
    assert sorted(linked) == sorted([file] for file in FAMILY_FILES)


def test_families_are_counted_right_wherever_they_are_counted():
    words = NUMBERS.split()
    counted = [
        (page, number)
        for page, text in PAGES.items()
        for number in re.findall(rf"\b(\d+|{'|'.join(words)})\s+families\b", text, re.IGNORECASE)
    ]
    assert counted == [("README.md", str(len(FAMILY_FILES)))]  # in one place alone


@pytest.mark.parametrize("row", table_after(PAGES["docs/first-model.md"], "# Your first"), ids=lambda row: row[0])
def test_the_memory_of_first_models_is_what_fit_counts(row, capsys):
    name, _, weights, gpu, command = row
    program, chat, model, *options = shlex.split(command.strip("`"))
    assert (program, chat) == ("nanovllm", "chat")
    assert name.startswith(model.split("/")[-1])
    values = dict(zip([option.strip("-").replace("-", "_") for option in options[::2]], options[1::2], strict=True))
    print_fit(model, CARDS_GIB, **values)
    printed = capsys.readouterr().out
    assert weights == f"{float(re.search(r'weights +([0-9.]+) GiB', printed)[1]):.1f} GiB"
    # A GPU that has room for one sequence of the default length.
    cards = re.findall(r"^ *(\d+ GiB) +yes +[\d,]+ +([\d,]+)", printed, re.MULTILINE)
    assert gpu == next(card for card, sequences in cards if sequences != "0")


def test_rows_of_first_models_begin_with_the_largest_memory():
    memory = [int(row[3].split()[0]) for row in table_after(PAGES["docs/first-model.md"], "# Your first")]
    assert memory == sorted(memory, reverse=True)


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith((".md", ".txt"))])
def test_links_lead_somewhere(page):
    """To a file of the repository, and to a heading in it."""
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), link
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), link


def anchors(file: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)).lower().replace(" ", "-")
        for heading in headings
    }


def test_the_index_for_programs_has_every_page():
    linked = set(re.findall(r"\]\(([^)]+)\)", PAGES["llms.txt"]))
    pages = {page for page in PAGES if page.endswith(".md")} | {"docs/notebook.md", "CHANGELOG.md"}
    assert linked == pages


def test_the_version_is_the_same_everywhere():
    assert re.search(r'^version = "(.+)"$', PAGES["pyproject.toml"], re.MULTILINE)[1] == __version__


def test_what_is_read_in_an_evening_is_the_path_of_a_request():
    for page, text in PAGES.items():
        for sentence in re.findall(r"[^.:]*\bevening\b[^.]*", text, re.IGNORECASE):
            assert "path" in sentence, page


def test_nothing_is_said_twice():
    """No sentence or row of a table of some length stands on two pages: one has it, and others link to it."""
    found: dict[str, str] = {}
    for page, text in PAGES.items():
        if not page.endswith(".md") or page.startswith("docs/adding-"):
            continue
        text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        prose = "\n".join("\n" if line.startswith(("|", "#", "    ")) else line for line in text.splitlines())
        for sentence in re.split(r"(?<=[.:])\s+|\n\s*\n", prose):
            plain = " ".join(re.sub(r"\[(.*?)\]\(.*?\)", r"\1", sentence).split()).lower()
            if len(plain) >= 60:
                assert found.setdefault(plain, page) == page, plain
