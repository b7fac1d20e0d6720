"""Who may import whom: the rooms of docs/architecture.md."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm

PUBLIC_API_ROOMS = ("jobs", "integrations", "openai_format")
PACKAGE = Path(__file__).parents[1] / "nanovllm"
# Without these, the tests that need them are skipped.
OPTIONAL = ["triton", "pyarrow", "pandas", "ray", "datasets", "lm_eval", "trl", "accelerate", "starlette", "uvicorn"]
OPTIONAL += [
    "datatrove",
    "httpx",
    "openai",
    "llguidance",
    "gguf",
    "nbformat",
    "nbclient",
    "matplotlib",
    "prompt_toolkit",
    "shtab",
    "PIL",
]


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in PACKAGE.rglob("*.py")}


def imports_of(file: Path) -> set[str]:
    """Our modules that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in {file}"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return {name for name in found if name in FILES}


GRAPH = {module: imports_of(file) for module, file in FILES.items()}


def room_of(module: str) -> str:
    """A folder; but a file is a room of its own where its folder holds other rooms, as engine/ does."""
    folder = FILES[module].parent
    has_rooms = any(file.is_dir() and (file / "__init__.py").exists() for file in folder.iterdir())
    return module if has_rooms else str(folder.relative_to(PACKAGE.parent)).replace("/", ".")


def test_no_two_rooms_know_each_other():
    known: dict[str, dict[str, str]] = {}
    for module, imported in GRAPH.items():
        for other in imported:
            known.setdefault(room_of(module), {})[room_of(other)] = f"{module} imports {other}"
    pairs = [(a, b) for a in known for b in known[a] if a < b and a in known.get(b, {})]
    assert not pairs, "\n".join(f"{known[a][b]}, and {known[b][a]}" for a, b in pairs)
    assert len(known) > 50


def test_nothing_is_imported_in_a_circle():
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle: {' -> '.join((*path, module))}"
        if module in done:
            return
        for imported in sorted(GRAPH[module]):
            visit(imported, (*path, module))
        done.add(module)

    for module in sorted(GRAPH):
        visit(module, ())
    assert len(done) > 80


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("kernels", ["kernels"]),
        ("layers", ["kernels", "layers", "utils"]),
        ("models", ["kernels", "layers", "models", "utils"]),
        ("utils", ["utils"]),
        ("images", ["images", "utils"]),
        # Whoever writes jobs or integrations of their own has this API and no other.
        ("jobs", ["jobs", "openai_format", "utils"]),
        ("integrations", ["integrations", "jobs", "openai_format", "utils"]),
        ("openai_format", ["openai_format", "utils"]),
    ],
)
def test_a_room_imports_only_what_it_may(room, allowed):
    allowed = [f"nanovllm.{name}" for name in allowed]
    for module, imported in GRAPH.items():
        if module.startswith(f"nanovllm.{room}"):
            others = [name for name in imported if not name.startswith(tuple(allowed))]
            if room in PUBLIC_API_ROOMS:
                others = [name for name in others if name != "nanovllm"]
            assert not others, f"{module} imports {others}"


def test_jobs_use_exported_names_alone():
    """`from nanovllm import name` also works for a folder, such as engine."""
    exported = {*nanovllm.__all__, "__version__"}
    for room in PUBLIC_API_ROOMS:
        for file in (PACKAGE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == "nanovllm":
                    assert {alias.name for alias in node.names} <= exported | {room}, file


def test_every_exported_name_exists():
    for name in nanovllm.__all__:
        assert getattr(nanovllm, name) is not None


def test_every_file_is_imported_without_triton():
    """As on macOS, which has none. Only integrations, and what runs inside another package's kernels, need others."""
    names = [
        name
        for name in FILES
        if not name.endswith(("__main__", ".quack_products")) and ".integrations." not in name and ".ray_" not in name
    ]
    script = f"import importlib, sys; sys.modules['triton'] = None; [importlib.import_module(x) for x in {names}]"
    done = subprocess.run([sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_other_programs_are_imported_only_when_they_are_used():
    programs = {"accelerate", "datasets", "lm_eval", "pandas", "pyarrow", "ray", "starlette", "trl", "uvicorn"}
    script = (
        "import sys; before = set(sys.modules); import nanovllm, nanovllm.cli, nanovllm.integrations; nanovllm.LLM; "
        f"print(sorted((set(sys.modules) - before) & {programs}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr[-2000:]


def test_a_kernel_without_triton_says_what_is_missing():
    script = (
        "import sys; sys.modules['triton'] = None; from nanovllm.kernels.step_copies import _return_kernel; "
        "_return_kernel[(1,)]"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert "this kernel needs Triton, which is not installed" in done.stderr


@pytest.mark.nightly
def test_the_tests_are_collected_without_triton_and_optional_packages():
    """As on macOS, which has no Triton, and on a machine with a GPU and little else: the tests that need them are
    skipped, and no file fails."""
    collect = (
        f"import sys; sys.modules |= dict.fromkeys({OPTIONAL}); import pytest; "
        "sys.exit(pytest.main(['--collect-only', '-q', '-n0', '-p', 'no:cacheprovider']))"
    )
    done = subprocess.run([sys.executable, "-c", collect], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
