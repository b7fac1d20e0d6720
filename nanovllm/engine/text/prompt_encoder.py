"""PromptEncoder: from prompts to token ids, for the engine, jobs and the server. It needs no torch."""

import logging
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from nanovllm.engine.text.chat import Messages, Template, TemplateRenderer, Tool, Variables
from nanovllm.engine.text.prompts import Prompt, has_images, read_prompt
from nanovllm.utils.checks import half_pair

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# To tokenize ten million characters takes seconds and gigabytes. A text with this many characters for each token of the
# longest sequence is judged by its beginning first. English has about four.
CHARACTERS_PER_TOKEN = 10


class PromptEncoder:
    """Encodes prompts and conversations with one tokenizer."""

    _tokenizer: Any  # None without one: `check_text` refuses texts then.

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | None",
        max_len: int | None = None,
        remedy: str = "shorten it, or raise max_model_len",
        read_images: Callable[[list[Any]], list[Any]] | None = None,
    ):
        """
        Args:
            tokenizer: None accepts token ids only.
            max_len: tokens of the longest sequence, at most. None is unknown: a text of any length is tokenized.
            remedy: what to do about a text that is longer.
            read_images: makes token ids of prompts with images, a text of one that has none, or a ValueError or
                TypeError. None refuses them.
        """
        self._read_images = read_images
        self._tokenizer, self._max_len, self._remedy = tokenizer, sys.maxsize if max_len is None else max_len, remedy
        self._renderer = TemplateRenderer(tokenizer)
        self._write_images: Callable[[str], str] = str
        self._bos = getattr(tokenizer, "bos_token_id", None)

    def encode(self, prompts: Iterable[Prompt], **options: bool) -> list[Any]:
        """The token ids of each prompt, or the ValueError or TypeError that says what is wrong with it. All texts go
        through the tokenizer in one batch, with these options. Token ids are not checked: the vocabulary is the
        model's."""
        found: list[Any] = list(prompts)
        if not all(type(prompt) in (list, str) for prompt in found):
            self._read_others(found)
        texts: dict[int, str] = {}  # index of the prompt -> its text
        for i, prompt in enumerate(found):
            if isinstance(prompt, str):
                try:
                    self.check_text(prompt)
                    texts[i] = prompt
                except ValueError as error:
                    found[i] = error
        if texts:
            batch = list(texts.values())
            try:
                # Not verbose: a prompt that is too long gets an error of ours.
                encoded = self._tokenizer(batch, verbose=False, **options)["input_ids"]
                if self._bos is not None and not options:
                    self._warn_of_second_bos(encoded)
            except Exception as error:  # Of one of them. The library's own classes.
                wrong = [ValueError(f"cannot be tokenized: {error}")]
                encoded = wrong if len(batch) == 1 else [self.encode([text], **options)[0] for text in batch]
            for i, token_ids in zip(texts, encoded, strict=True):
                found[i] = token_ids
        return found

    def _read_others(self, prompts: list[Any]) -> None:
        """Replace prompts that are neither lists nor texts by the token ids or the text that they stand for, or by what
        is wrong with them. Those with images together, since threads read them."""
        with_images: dict[int, Any] = {}  # by index
        for i, prompt in enumerate(prompts):
            try:
                if self._read_images and has_images(prompt):
                    with_images[i] = prompt
                else:
                    prompts[i] = read_prompt(prompt)
            except (TypeError, ValueError) as error:
                prompts[i] = error
        if with_images and self._read_images:
            for i, read in zip(with_images, self._read_images([*with_images.values()]), strict=True):
                prompts[i] = read

    def encode_chats(self, messages: Messages, *arguments: Any, **options: Any) -> list[Any]:
        """Token ids of each conversation; of one with images {"prompt_token_ids": ..., "images": their sources}. The
        arguments are those of TemplateRenderer.render. Raises ValueError or TypeError, naming the argument or the
        conversation."""
        rendered = self._renderer.render(messages, *arguments, **options)
        texts = [each.text for each in rendered]
        for i, each in enumerate(rendered):
            if each.images:
                try:
                    texts[i] = self._write_images(each.text)
                except ValueError as error:
                    raise ValueError(f"conversation {i}: {error}") from error
        # The template writes the special tokens.
        encoded = self.encode(texts, add_special_tokens=False)
        for i, token_ids in enumerate(encoded):
            if isinstance(token_ids, Exception):
                raise ValueError(f"conversation {i}: {token_ids}") from token_ids
            if rendered[i].images:
                encoded[i] = {"prompt_token_ids": token_ids, "images": rendered[i].images}
        return encoded

    def encode_chat(
        self,
        conversation: Any,
        template: Template | None = None,
        tools: Iterable[Tool] | None = None,
        kwargs: Variables | None = None,
        needed: Iterable[str] = (),
    ) -> Any:
        """Token ids of one conversation that is to be answered. As encode_chats, but errors do not name the
        conversation."""
        try:
            options = {"add_generation_prompt": True}
            (token_ids,) = self.encode_chats([conversation], template, kwargs, tools, needed, **options)
        except ValueError as error:
            raise ValueError(str(error).removeprefix("conversation 0: ").removeprefix("conversation 0, ")) from error
        return token_ids

    def accept_images(self, write_images: Callable[[str], str]) -> None:
        """From now on conversations may have images. write_images: gives a prompt's text a token for each image."""
        self._renderer.reads_images, self._write_images = True, write_images

    @property
    def accepts_images(self) -> bool:
        return self._renderer.reads_images

    def template_text(self, chat_template: Template | None = None) -> str:
        """The text of a chat template, as chat() takes it; "" if there is none. Raises ValueError or TypeError."""
        return self._renderer.template_text(chat_template)

    def check_text(self, text: str) -> None:
        """Raises ValueError for a text that cannot be tokenized, or whose beginning alone has more than twice max_len
        tokens. Only twice, because the end of a beginning may have fewer tokens as a part of the whole text.

        Beginnings are tried from short to long, because some tokens have many characters, such as 64 spaces. So at most
        as much again is tokenized as without this check, and usually far less.
        """
        if self._tokenizer is None:
            raise ValueError("is a text, but skip_tokenizer_init is set: pass token ids")
        try:
            text.encode()  # The tokenizer's own message for a lone surrogate is that this is no text.
        except UnicodeEncodeError as error:
            raise ValueError(half_pair(error)) from error
        length = CHARACTERS_PER_TOKEN * self._max_len
        while length < len(text):
            num_tokens = len(self._tokenizer(text[:length], verbose=False)["input_ids"])
            if num_tokens > 2 * self._max_len:
                raise ValueError(
                    f"the text has {len(text)} characters, of which the first {length} have {num_tokens} tokens: the "
                    f"longest sequence has {self._max_len} tokens, {self._remedy}"
                )
            length *= 2

    def _warn_of_second_bos(self, encoded: list[list[int]]) -> None:
        """Once. encoded: token ids of texts."""
        if any(len(token_ids) > 1 and token_ids[0] == token_ids[1] == self._bos for token_ids in encoded):
            self._bos = None
            logger.warning(
                "a prompt begins with %s twice: its text has it already, as that of a chat template does, and the "
                "tokenizer adds another, which makes answers worse. Use chat(), or pass "
                "tokenizer(text, add_special_tokens=False) as the prompt (this is logged once)",
                self._tokenizer.bos_token,
            )


class ChatRenderer:
    """Token ids of conversations, by one tokenizer's chat template or another."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None"):
        self._encoder = PromptEncoder(tokenizer)

    def render(
        self,
        messages: Messages,
        chat_template: Template | None,
        chat_template_kwargs: Variables | None,
        tools: Iterable[Tool] | None,
        **options: bool,
    ) -> list[list[int]]:
        """Token ids of each conversation. Raises ValueError or TypeError, naming the argument or the conversation.

        Args:
            messages, tools: as for `LLM.chat`.
            chat_template: a Jinja template or its file; None uses the tokenizer's.
            chat_template_kwargs: variables of the template.
            options: other arguments of the tokenizer's apply_chat_template.
        """
        return self._encoder.encode_chats(messages, chat_template, chat_template_kwargs, tools, **options)
