"""A model's tokenizer: loaded by transformers, without code of the checkpoint, and compared with its tokenizer.json."""

import json
import logging
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.models.model_files import OTHER_FILES, download, find_directory, read_json
from nanovllm.models.sentence_files import is_sentence_model
from nanovllm.utils.checks import one_line, quoted

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_JSON, _CONFIG, _MODEL = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"
_FILES = (_JSON, _CONFIG, "vocab.json", "merges.txt", _MODEL)
_ALTERNATIVES = "tokenizer= takes another's, and skip_tokenizer_init=True does without"
# What tokenizer.json decides, and a class of transformers may replace. What begins and ends a text (`post_processor`)
# is not here: tokenizer_config.json may change that.
_COMPONENTS = ("normalizer", "pre_tokenizer", "decoder")
_OF_MODEL = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
# Of what tokenizers differ in: spaces at the beginning and in a row, line feeds, digits, contractions, letters outside
# ASCII in one piece and in two, and characters that no vocabulary has.
_SAMPLES = (
    "The capital of France is Paris, isn't it?",
    " a space first,  then two;   then three",
    "  ",
    "def f(x):\n    if x > 12345:\n\n\treturn 3.14159\r\n",
    "Grüße, cafe\u0301, 你好世界, привет, हिन्दी",
    "🙂 <tag> https://example.org/?a=b&c=[d] WE'LL x²",
)
_SPACE, _DECODER = re.compile(r"[ \t\n\r]*"), json.JSONDecoder()


def find_tokenizer(name: str, revision: str | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model, as an engine has it.

    name: a directory, or a hub id of which the files are downloaded. revision: of the hub id.

    Raises FileNotFoundError or ValueError.
    """
    directory = find_directory(name, "tokenizer") or download(name, "tokenizer", OTHER_FILES, revision)
    return load_tokenizer(name, str(directory))


def load_tokenizer(model: str, directory: str | None) -> "PreTrainedTokenizerBase":
    """A transformers tokenizer that agrees with its tokenizer.json. Raises FileNotFoundError or ValueError, naming the
    file and the alternatives.

    Args:
        model: the option, for messages.
        directory: where its files are; None if it is a published shape, which has none.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, __version__

    if directory is None:
        raise ValueError(f"model={quoted(model)}: a published shape has no tokenizer; {_ALTERNATIVES}")
    files = [file for name in _FILES if os.path.lexists(file := Path(directory, name))]
    if not files:
        raise FileNotFoundError(f"{directory}: holds no {_JSON}; {_ALTERNATIVES}")
    try:
        tokenizer = _load(AutoTokenizer, directory)
        own_class = type(tokenizer).__name__
        if not _agrees(tokenizer, Path(directory, _JSON)):
            tokenizer = _load(PreTrainedTokenizerFast, directory)  # which takes the file as it is
            if not _agrees(tokenizer, Path(directory, _JSON)):
                raise ValueError(f"{own_class} of transformers {__version__} tokenizes otherwise than {_JSON}")
            logger.warning(
                "%s: %s of transformers %s tokenizes otherwise than %s, which is used as it is",
                *(directory, own_class, __version__, _JSON),
            )
    except Exception as error:
        for file in files:
            if file.suffix == ".json":
                read_json(file)  # Raises for the file at fault. Only now, because these files have megabytes.
        names = ", ".join(file.name for file in files)
        reason = _explain(directory, error) or f"{one_line(error)}; {_ALTERNATIVES}"
        raise ValueError(f"{directory}: its tokenizer ({names}) cannot be loaded: {reason}") from error
    if code := _own_code(directory):
        logger.info("%s: auto_map names code of the checkpoint, %s, which is not run", directory, code)
    _warn_without_bos(tokenizer, directory)
    if is_sentence_model(directory):
        _end_texts(tokenizer, Path(directory, _CONFIG))
    return tokenizer


def _end_texts(tokenizer: "PreTrainedTokenizerBase", config: Path) -> None:
    """Let each text end with the end-of-sequence token, where an embedding model's settings say so and its tokenizer
    has not learned of it: classes of transformers ignore the setting, and the vector is that of this token."""
    if not config.is_file() or read_json(config).get("add_eos_token") is not True:
        return
    eos, eos_id, backend = tokenizer.eos_token, tokenizer.eos_token_id, getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(eos, str) or tokenizer("a")["input_ids"][-1:] == [eos_id]:
        return
    from tokenizers import processors

    end = processors.TemplateProcessing(single=f"$A {eos}", pair=f"$A $B:1 {eos}:1", special_tokens=[(eos, eos_id)])
    own = backend.post_processor
    backend.post_processor = end if own is None else processors.Sequence([own, end])


def _load(cls: "type[AutoTokenizer | PreTrainedTokenizerBase]", directory: str) -> "PreTrainedTokenizerBase":
    # False, because None asks on standard input whether to run code of the checkpoint.
    tokenizer = cls.from_pretrained(directory, use_fast=True, trust_remote_code=False)
    # Without a vocabulary transformers 5 makes up an empty one.
    if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):
        raise ValueError("it has no vocabulary")
    return tokenizer


def _explain(directory: str, error: Exception) -> str | None:
    """What to do about a tokenizer that transformers cannot load, where its own message would mislead."""
    if code := _own_code(directory):
        reason = one_line(error)
        reason = "" if "trust_remote_code" in reason else f" ({reason})"  # an option that we do not have
        return (
            f"auto_map names code of the checkpoint, {code}, which is never run, and transformers has no class of its "
            f"own that loads these files{reason}. If you trust that code, run it elsewhere and save a "
            f"{_JSON}; {_ALTERNATIVES}"
        )
    file = Path(directory, _MODEL)
    if file.is_file() and not Path(directory, _JSON).exists() and _is_sentencepiece(file):
        missing = [name for name in ("sentencepiece", "google.protobuf") if not _is_installed(name)]
        packages = " ".join(name.removeprefix("google.") for name in missing)
        install = f": run `pip install {packages}`" if missing else f" ({one_line(error)})"
        return (
            f"{_MODEL} is a SentencePiece model, which transformers converts with the packages sentencepiece and "
            f"protobuf{install}, or add the {_JSON} of the same model; {_ALTERNATIVES}"
        )
    return None


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # Its parent is not there.
        return False


def _is_sentencepiece(file: Path) -> bool:
    """Whether a tokenizer.model is SentencePiece's protocol buffer. tiktoken's has lines of base64."""
    with file.open("rb") as opened:
        return opened.read(1) == b"\n"  # the tag of its first field, the pieces


def _own_code(directory: str) -> str | None:
    """The class that tokenizer_config.json would have transformers import from the checkpoint."""
    file = Path(directory, _CONFIG)
    names = read_json(file).get("auto_map") if file.is_file() else None
    names = names.get("AutoTokenizer") if isinstance(names, dict) else names
    if isinstance(names, list | tuple):  # of the slow and of the fast tokenizer
        names = next((name for name in reversed(names) if name), None)
    return names if isinstance(names, str) else None


def _warn_without_bos(tokenizer: "PreTrainedTokenizerBase", directory: str) -> None:
    """Models with a SentencePiece vocabulary were trained on texts with a beginning, and say nonsense without one."""
    file = Path(directory, _MODEL)
    if not file.is_file() or tokenizer.bos_token_id is None or not _is_sentencepiece(file):
        return
    config = Path(directory, _CONFIG)
    is_given = config.is_file() and isinstance(read_json(config).get("add_bos_token"), bool)
    if not is_given and tokenizer.bos_token_id not in tokenizer("a")["input_ids"]:
        logger.warning(
            "%s: its tokenizer puts no beginning of a text (%s) before a prompt, as most models with a SentencePiece "
            'vocabulary need. "add_bos_token" in tokenizer_config.json, true or false, says what is right.',
            *(directory, tokenizer.bos_token),
        )


# -- the comparison with tokenizer.json --------------------------------------------------------------------------------


def _agrees(tokenizer: "PreTrainedTokenizerBase", file: Path) -> bool:
    """Whether a tokenizer splits and joins texts as its tokenizer.json does. Some classes of transformers take only the
    vocabulary from the file, and the rest is what their first model had. True where there is no such file, or the
    tokenizer is written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not file.is_file():
        return True
    # The settings are compared within milliseconds. To load the file a second time takes as long as the first.
    if _stored_settings(file.read_text(encoding="utf-8")) == _own_settings(backend):
        return True
    from tokenizers import Tokenizer

    stored = Tokenizer.from_file(str(file))
    stored.no_padding()
    stored.no_truncation()
    for text in _SAMPLES:
        token_ids = stored.encode(text, add_special_tokens=False).ids
        if tokenizer(text, add_special_tokens=False)["input_ids"] != token_ids:
            return False
        decoded = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if decoded != stored.decode(token_ids, skip_special_tokens=False):
            return False
    return True


def _own_settings(backend: "Tokenizer") -> dict[str, Any]:
    """What `_stored_settings` returns, of a tokenizer in memory."""
    parts = {name: getattr(backend, name) for name in _COMPONENTS}
    settings = {name: None if part is None else json.loads(part.__getstate__()) for name, part in parts.items()}
    model = {"type": type(backend.model).__name__}
    return _normal(settings | {"model": model | {key: getattr(backend.model, key, None) for key in _OF_MODEL}})


def _stored_settings(text: str) -> dict[str, Any] | None:
    """A tokenizer.json's components and the settings of its model, without its vocabulary if that is at the end, where
    the library writes it."""
    settings: dict[str, Any] = {}
    for key, start in _members(text):
        if key == "model":
            model = {name: _DECODER.raw_decode(text, at)[0] for name, at in _members(text, start, until="vocab")}
            settings[key] = {name: model.get(name) for name in ("type", *_OF_MODEL)}
        elif key in _COMPONENTS:
            settings[key] = _DECODER.raw_decode(text, start)[0]
        if len(settings) == len(_COMPONENTS) + 1:
            return _normal(settings)
    return None


def _members(text: str, start: int = 0, until: str = "") -> Iterator[tuple[str, int]]:
    """The keys of the JSON object that begins at `start`, each with the place of its value, up to the key `until`."""
    place = _skip_space(text, start) + 1
    while text[place := _skip_space(text, place)] == '"':
        key, place = _DECODER.raw_decode(text, place)
        value = _skip_space(text, _skip_space(text, place) + 1)  # after the colon
        if key == until:
            return
        yield key, value
        place = _skip_space(text, _DECODER.raw_decode(text, value)[1])
        if text[place] == ",":
            place += 1


def _skip_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return place if found is None else found.end()


def _normal(part: Any) -> Any:
    """Settings without those that change no token and no text."""
    if isinstance(part, list):
        return [_normal(item) for item in part]
    if not isinstance(part, dict):
        return part
    kept = {key: _normal(value) for key, value in part.items() if key != "trim_offsets" and value not in (None, False)}
    decoder = kept.get("decoder")
    if isinstance(decoder, dict) and decoder["type"] == "ByteLevel":  # The rest is for encoding.
        kept["decoder"] = {"type": "ByteLevel"}
    return kept
