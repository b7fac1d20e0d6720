"""What the files of sentence-transformers beside a checkpoint say of its embeddings: modules.json, the configuration of
its Pooling module, and config_sentence_transformers.json."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from nanovllm.models.model_files import read_json, read_json_list
from nanovllm.utils.checks import quoted

_MODULES, _SETTINGS = "modules.json", "config_sentence_transformers.json"
_POOLING = "1_Pooling/config.json"
# The kinds of pooling that we have, by the two spellings of the files.
_FLAGS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_NAMES = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_PLAIN_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True)
class SentenceFacts:
    """
    Attributes:
        pooling: "last", "mean" or "cls"; None if no file says.
        prompts: {name: text that is put before a text}.
        default_prompt: the name of the one that is used where none is asked for; None for none.
    """

    pooling: str | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None

    def text_before(self, prompt_name: str | None) -> str:
        """What is put before each text. prompt_name: None for the default. Raises ValueError for a name that the files
        do not have."""
        if prompt_name is None:
            return self.prompts.get(self.default_prompt or "", "")
        if not isinstance(prompt_name, str) or prompt_name not in self.prompts:
            names = ", ".join(map(repr, self.prompts)) or "none, because config_sentence_transformers.json has none"
            raise ValueError(f"prompt_name={quoted(prompt_name)}: the model's names are {names}")
        return self.prompts[prompt_name]


def is_sentence_model(directory: str) -> bool:
    """Whether a checkpoint is published for embeddings."""
    return os.path.lexists(Path(directory, _MODULES))


def read_sentence_facts(directory: str) -> SentenceFacts:
    """Raises ValueError, naming the file, for what changes embeddings and we do not have."""
    modules = Path(directory, _MODULES)
    pooling_file = Path(directory, _POOLING)
    if os.path.lexists(modules):
        for module in read_json_list(modules):
            kind = str(module.get("type") if isinstance(module, dict) else module).rpartition(".")[2]
            if kind not in _PLAIN_MODULES:
                raise ValueError(
                    f"{modules}: module {quoted(kind)} is not supported: embeddings are made by "
                    f"{', '.join(_PLAIN_MODULES)} alone"
                )
            if kind == "Pooling":
                pooling_file = Path(directory, str(module.get("path") or "1_Pooling"), "config.json")
    pooling = _pooling(pooling_file) if os.path.lexists(pooling_file) else None
    settings_file = Path(directory, _SETTINGS)
    settings = read_json(settings_file) if os.path.lexists(settings_file) else {}
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ValueError(f"{settings_file}: prompts={quoted(prompts)}: must be an object of texts")
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ValueError(f"{settings_file}: default_prompt_name={quoted(default)}: must be one of {', '.join(prompts)}")
    return SentenceFacts(pooling, prompts, default)


def _pooling(file: Path) -> str:
    content = read_json(file)
    named = content.get("pooling_mode")
    modes = [named] if isinstance(named, str) else named or []
    modes = [*modes, *(name for name, value in content.items() if name.startswith("pooling_mode_") and value is True)]
    kinds = {_FLAGS.get(mode) or _NAMES.get(mode) for mode in modes}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        supported = ", ".join(_FLAGS)
        raise ValueError(f"{file}: pooling by {', '.join(modes) or 'nothing'} is not supported: one of {supported} is")
    if kind != "last" and content.get("include_prompt") is False:
        raise ValueError(f"{file}: include_prompt=false is not supported: a prompt's tokens count as the text's")
    return kind
