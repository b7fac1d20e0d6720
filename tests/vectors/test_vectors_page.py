"""The programs of docs/vectors.md run, on small models in place of the published ones."""

import re
import shutil
from pathlib import Path

import pytest
from checkpoints import EOS, edit_json, make_checkpoint, make_tokenizer
from vector_checkpoints import add_sentence_files, make_pooling_checkpoint

import nanovllm

ROOT = Path(__file__).parents[2]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "vectors.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def run(monkeypatch, capsys):
    def run(program: str, model: Path) -> tuple[dict, str]:
        make = nanovllm.LLM
        sizes = {"num_kvcache_blocks": 32, "max_model_len": 2048, "use_tqdm": False}
        llms = []

        def llm(name, **options):
            assert re.fullmatch(r"\w+/[\w.-]+", name)
            llms.append(make(str(model), device="cpu", **sizes, **options))
            return llms[0]

        monkeypatch.setattr(nanovllm, "LLM", llm)
        values = {"LLM": llm}
        try:
            exec(compile(program, "docs/vectors.md", "exec"), values)
        finally:
            for each in llms:
                each.exit()
        return values, capsys.readouterr().out

    return run


def test_the_search_finds_a_passage_by_its_own_words(run, tmp_path, monkeypatch):
    model = shutil.copytree(ROOT / "assets" / "demo-model", tmp_path / "model")
    add_sentence_files(model, prompts={"query": ""})
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "vectors.md", tmp_path / "docs")
    monkeypatch.chdir(tmp_path)
    program = PROGRAMS[0].replace('search("What is a block of the KV cache?")', "search(passages[4])")
    values, printed = run(program, model)
    assert len(values["vectors"]) == len(values["passages"]) > 10
    assert printed.startswith(f"1.000  {values['passages'][4][:70]!r}")
    assert len(printed.splitlines()) == 3


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_other_programs_print_what_they_say(run, tmp_path, number):
    if number == 1:
        path = make_pooling_checkpoint(tmp_path, num_labels=1)
        make_tokenizer(path)
        edit_json(path / "tokenizer_config.json", chat_template="{% for m in messages %}{{ m.content }}\n{% endfor %}")
    else:
        path = make_checkpoint(tmp_path)
        make_tokenizer(path, ("<|endoftext|>", EOS, "<|im_start|>", "yes", "no"))
    _, printed = run(PROGRAMS[number], path)
    lines = printed.splitlines()
    assert len(lines) == (2 if number == 2 else 1)
    assert number != 1 or printed.rstrip().endswith("LABEL_0")
    assert number != 2 or float(lines[0].split()[1]) >= float(lines[1].split()[1])


def test_all_programs_of_the_page_are_run():
    assert len(PROGRAMS) == 4
