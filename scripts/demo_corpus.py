"""The demo model's corpus: the running Python's standard library, as source files and as dialogues."""

import ast
import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SKIPPED_FOLDERS = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "lib-dynload", "msilib", "pydoc_data", "site-packages",
}  # fmt: skip
# Tables and oddities: many tokens, nothing to learn from.
SKIPPED_FILES = {
    "antigravity.py", "entities.py", "locale.py", "pickletools.py", "stringprep.py", "this.py", "turtle.py",
}  # fmt: skip
# Never trained on, neither as source nor as dialogue.
HELD_OUT_FILES = {"colorsys.py", "fileinput.py", "sched.py", "shelve.py", "reprlib.py", "quopri.py"}

SMALLEST_FILE_BYTES = 200
SHORTEST_SUMMARY_CHARS = 12
LONGEST_SOURCE_CHARS = 1400
LONGEST_PARAGRAPH_CHARS = 900

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that knows the Python standard library.",
    "You are nanovllm-demo, a small model that answers questions about Python.",
)

CODE_REQUESTS = (
    "Write a Python function `{signature}`. {summary}",
    "Implement `{signature}` in Python. {summary}",
    "Please write `{signature}` for me. What it should do: {summary}",
    "I need a function named `{name}` with the arguments `({arguments})`. {summary}",
    "Show me the source code of `{path}`.",
    "How could `{path}` be implemented?",
)
CODE_ANSWER = "Here is `{name}`:\n\n```python\n{source}\n```"

PURPOSE_REQUESTS = (
    "What does `{path}` do?",
    "What is `{path}` for?",
    "Explain `{path}`.",
    "Describe `{path}` in a few words.",
    "Tell me about `{path}` in the Python standard library.",
    "When would I use `{path}`?",
)
CALLABLE_ANSWER = "`{path}({arguments})`: {paragraph}"
OTHER_ANSWER = "`{path}`: {paragraph}"

Message = dict[str, str]


@dataclass
class Corpus:
    """Text to train on. A dialogue is a list of messages with the keys `role` and `content`."""

    sources: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    dialogues: list[list[Message]] = field(default_factory=list)


def read_standard_library(root: Path, max_bytes: int, seed: int) -> Corpus:
    """Reads the standard library that lies in `root`.

    Smaller files come first until `max_bytes` are reached: many short modules teach more than few long ones.
    Raises RuntimeError where the sources are missing (a Python installed as bytecode or as a zip file).
    """
    rng = random.Random(seed)
    corpus, num_bytes = Corpus(), 0
    for path, text in sorted(_source_files(root), key=lambda item: (len(item[1]), str(item[0]))):
        if path.name in HELD_OUT_FILES:
            corpus.held_out.append(text)
        elif num_bytes + len(text) <= max_bytes:
            num_bytes += len(text)
            corpus.sources.append(text)
            corpus.dialogues.extend(_dialogues_about(_module_name(path.relative_to(root)), text, rng))
    if num_bytes < 1_000_000 or not corpus.held_out:
        raise RuntimeError(f"{root} holds {num_bytes:,} bytes of Python sources; at least 1,000,000 are needed")
    return corpus


def as_dialogue(question: str, answer: str, rng: random.Random) -> list[Message]:
    """One question and its answer; one dialogue in three opens with a system prompt."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if rng.random() < 1 / 3:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    return messages


def _source_files(root: Path) -> Iterator[tuple[Path, str]]:
    for path in root.rglob("*.py"):
        parents = path.relative_to(root).parts[:-1]
        skipped = any(part in SKIPPED_FOLDERS or part.startswith("config-") for part in parents)
        if skipped or path.name in SKIPPED_FILES or path.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        if len(text) >= SMALLEST_FILE_BYTES:
            yield path, text


def _module_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _dialogues_about(module: str, text: str, rng: random.Random) -> Iterator[list[Message]]:
    tree, lines = ast.parse(text), text.split("\n")
    yield from _purpose_dialogue(tree, module, None, rng)
    for node, path in _definitions(tree, module):
        is_class = isinstance(node, ast.ClassDef)
        arguments = None if is_class else _arguments(node)
        yield from _purpose_dialogue(node, path, arguments, rng)
        if not is_class:
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            yield from _code_dialogue(node, path, arguments, source, rng)


def _definitions(tree: ast.Module, module: str) -> Iterator[tuple[ast.stmt, str]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node, f"{module}.{node.name}"
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield member, f"{module}.{node.name}.{member.name}"


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return ast.unparse(node.args)


def _first_paragraph(node: ast.AST) -> str:
    """The docstring up to its first empty line, on one line; empty where it is missing or says too little."""
    docstring = ast.get_docstring(node) or ""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return paragraph if SHORTEST_SUMMARY_CHARS <= len(paragraph) <= LONGEST_PARAGRAPH_CHARS else ""


def _purpose_dialogue(node, path: str, arguments: str | None, rng) -> Iterator[list[Message]]:
    paragraph = _first_paragraph(node)
    if paragraph:
        question = rng.choice(PURPOSE_REQUESTS).format(path=path)
        template = OTHER_ANSWER if arguments is None else CALLABLE_ANSWER
        yield as_dialogue(question, template.format(path=path, arguments=arguments, paragraph=paragraph), rng)


def _code_dialogue(node, path: str, arguments: str, source: str, rng) -> Iterator[list[Message]]:
    summary = _first_paragraph(node)
    if summary and len(source) <= LONGEST_SOURCE_CHARS:
        facts = {"name": node.name, "path": path, "arguments": arguments, "summary": summary}
        question = rng.choice(CODE_REQUESTS).format(signature=f"{node.name}({arguments})", **facts)
        yield as_dialogue(question, CODE_ANSWER.format(name=node.name, source=source), rng)
