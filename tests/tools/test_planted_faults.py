"""scripts/planted_faults.py: its list fits the code, and a fault is told from one that nobody notices."""

import re
import sys

import planted_faults
import pytest
from planted_faults import FAULTS, ROOT, FaultListError, check_all, main, read_faults

TEST = """
from nanovllm.numbers import add, low


def test_add():
    assert add(2, 3) == 5


def test_low():
    assert low(2) is True
"""
CODE = """
def add(a, b):
    return a + b


def low(n):
    # three at most
    return n < 3
"""
LIST = """
# -- sums, limits -----
[sum-is-a-product]
file = nanovllm/numbers.py
- a + b
+ a * b
tests = tests/test_numbers.py

[limit-one-more]
file = nanovllm/numbers.py
-     # three at most
-     return n < 3
+     return n <= 3
tests = tests/test_numbers.py::test_low tests/test_numbers.py
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository with one file, one file of tests, and two faults of which they notice the first."""
    monkeypatch.setattr(planted_faults, "IMPORTED", ())
    files = {
        "nanovllm/__init__.py": "",
        "nanovllm/numbers.py": CODE,
        "tests/conftest.py": "import hypothesis\n\nhypothesis.settings.register_profile('planted_faults')\n",
        "tests/test_numbers.py": TEST,
        "faults.txt": LIST,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def plant(tree, *arguments: str) -> int:
    return main(arguments, tree, tree / "faults.txt")


def test_the_list_fits_the_code():
    """Each text to replace is in its file once, what replaces it compiles, and the tests that should notice are there.
    Where code has moved, planted_faults.txt must follow."""
    faults = read_faults(FAULTS)
    assert len(faults) >= 60
    check_all(faults, ROOT)
    assert all(fault.subject for fault in faults)
    assert sum(not fault.is_slow for fault in faults) >= 60, "what CI's samples are taken of"


@pytest.mark.slow
def test_one_fault_is_noticed_and_one_survives(tree, capfd):
    before = (tree / "nanovllm/numbers.py").read_text()
    assert plant(tree, "--jobs", "2") == 1
    out = capfd.readouterr().out
    assert re.search(r"noticed +sum-is-a-product  by tests/test_numbers.py::test_add\n", out)
    assert re.search(r"SURVIVED +limit-one-more", out)
    assert out.endswith("1 of 2 planted faults noticed; survived: limit-one-more\n")
    assert plant(tree, "sum-is-a-product", "--no-baseline") == 0
    assert (tree / "nanovllm/numbers.py").read_text() == before
    assert "nanovllm.numbers" not in sys.modules


def test_a_fault_that_only_breaks_the_tests_is_an_error(tree, capfd):
    (tree / "faults.txt").write_text(LIST.replace("a * b", "a + b\n+ \n+ \n+ raise OSError"))
    assert plant(tree, "sum-is-a-product", "--no-baseline") == 1
    out = capfd.readouterr().out
    assert "exit code 2" in out
    assert "0 of 1 planted faults noticed; errors: sum-is-a-product" in out


@pytest.mark.parametrize("hangs", [False, True])
def test_a_hang_is_noticed_only_where_the_list_says_so(tree, capfd, hangs):
    hang = LIST.replace("+ a * b", "+ add(a, b) if print() else __import__('time').sleep(600)")
    (tree / "faults.txt").write_text(hang.replace("tests =", "hangs = yes\ntests =", int(hangs)))
    assert plant(tree, "sum-is-a-product", "--no-baseline", "--timeout", "3") == (0 if hangs else 1)
    assert ("by a hang" if hangs else "the tests hung") in capfd.readouterr().out


def test_tests_that_fail_anyway_are_named(tree, capfd):
    (tree / "tests/test_numbers.py").write_text(TEST.replace("== 5", "== 6"))
    assert plant(tree) == 2
    assert "without a fault, tests must pass:\ntests/test_numbers.py: tests/test_numbers.py::test_add fails" in (
        capfd.readouterr().err
    )


def test_a_sample_is_the_same_for_a_seed(tree, capsys):
    """Any text: CI gives the commit."""

    def listed(*arguments):
        assert plant(tree, "--list", *arguments) == 0
        return capsys.readouterr().out

    seeds = [f"{number:x}ab" for number in range(20)]
    said = [listed("--sample", "1", "--seed", seed) for seed in seeds]
    assert said[3].startswith("a sample of 1 of 2 faults, --seed 3ab\nsums, limits: ")
    assert said == [listed("--sample", "1", "--seed", seed) for seed in seeds]
    assert all(any(name in text for text in said) for name in ("sum-is-a-product", "limit-one-more"))


def test_a_sample_of_the_quick_ones(tree, capsys):
    (tree / "faults.txt").write_text(LIST.replace("+ a * b", "+ a * b\nslow = yes"))
    assert plant(tree, "--list", "--quick", "--sample", "10", "--seed", "1") == 0
    said = capsys.readouterr().out
    assert "a sample of 1 of 1 faults" in said
    assert "sum-is-a-product" not in said


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("- a + b", "- a", r"sum-is-a-product: must be in nanovllm/numbers.py once, but is there \d times: 'a'"),
        ("- a + b", "- a - b", "but is there 0 times"),
        ("file = nanovllm/numbers.py", "file = nanovllm/number.py", "there is no file nanovllm/number.py"),
        ("tests/test_numbers.py\n", "tests/test_number.py\n", "there is no file tests/test_number.py"),
        ("::test_low", "::test_lo", "limit-one-more: tests/test_numbers.py has no test_lo"),
        ("+ a * b", "+ a *", "sum-is-a-product: is no Python"),
    ],
)
def test_a_fault_that_does_not_fit_the_code_is_refused(tree, capsys, old, new, message):
    (tree / "faults.txt").write_text(LIST.replace(old, new, 1))
    assert plant(tree) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("+ a * b", "+ a + b", "sum-is-a-product: must have"),
        ("- a + b", "", "sum-is-a-product: must have"),
        ("tests = ", "test = ", "'test = tests/test_numbers.py' must begin with"),
        ("tests = ", "slow = no\ntests = ", "sum-is-a-product: hangs and slow can only be yes"),
        ("limit-one-more", "sum-is-a-product", "sum-is-a-product: comes twice"),
        ("[sum-is-a-product]", "", "comes before the first"),
    ],
)
def test_a_wrong_list_is_refused(tree, old, new, message):
    (tree / "faults.txt").write_text(LIST.replace(old, new, 1))
    with pytest.raises(FaultListError, match=message):
        read_faults(tree / "faults.txt")


def test_unknown_names_are_refused(tree, capsys):
    assert plant(tree, "sum-is-a-product", "no-such-fault") == 2
    assert "there is no fault no-such-fault; --list shows all" in capsys.readouterr().err
