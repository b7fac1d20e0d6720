"""What a person types or pastes into a terminal, as messages and commands."""

import difflib
import re
import select
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

_WAIT_SECONDS = 0.05  # A terminal sends the lines of a pasted text sooner one after the other; no one types so fast.


def find_command(text: str, commands: Collection[str]) -> str | None:
    """The command that a text is, or None if it is a message. A text of several lines is a message, and so is one that
    begins with a space, or with a path such as /etc/hosts.

    Raises ValueError, with the nearest command, for one line that begins like a command and is none.
    """
    words = text.split()
    if not words or "\n" in text.strip() or re.fullmatch(r"/[\w?!-]*", words[0]) is None or text[0].isspace():
        return None
    if len(words) == 1 and words[0] in commands:
        return words[0]
    near = difflib.get_close_matches(words[0], commands, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(commands)}."
    raise ValueError(f"{text.strip()!r} is no command: {hint} A space before the / makes it a message.")


def read_messages(
    read_line: Callable[[], str], is_waiting: Callable[[], bool], commands: Collection[str] = ()
) -> Iterator[str]:
    """Messages and commands until the input ends. Lines that come at once are one message: a terminal without bracketed
    paste sends a pasted text like that.

    Args:
        read_line: returns a line, as input() does, or several. Raises EOFError at the end, and KeyboardInterrupt to
            drop what has been typed.
        is_waiting: whether another line, or the beginning of one, has come already.
        commands: lines that are part of no message.
    """
    command: str | None = None
    while True:
        lines = [command] if command is not None else []
        has_ended, command = False, None
        try:
            while not lines or (lines[-1] not in commands and is_waiting()):
                line = read_line()
                if lines and line.strip() in commands:  # typed while an answer was written
                    command = line.strip()
                    break
                lines.append(line)
        except EOFError:
            has_ended = True
        except KeyboardInterrupt:
            print("\n/exit ends.")
            continue
        if lines:
            yield "\n".join(lines).replace("\r\n", "\n").replace("\r", "\n")
        if has_ended:
            return


def terminal_reader(prompt: str = "> ") -> tuple[Callable[[], str], Callable[[], bool]]:
    """What `read_messages` needs, for standard input. In a terminal, prompt_toolkit or readline edits lines and takes a
    pasted text as one. Without them, on macOS, whose readline cannot, and while no line is read, such as at the start,
    the lines of a pasted text come one after the other."""
    if not sys.stdin.isatty():
        return lambda: input(), lambda: False
    if sys.stdout.isatty():
        try:
            return toolkit_reader(prompt)
        except ImportError:
            pass
    _use_readline()
    return lambda: input(prompt), _has_input


def toolkit_reader(prompt: str, **devices: Any) -> tuple[Callable[[], str], Callable[[], bool]]:
    """devices: input and output, for tests. Raises ImportError without prompt_toolkit."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: Any = PromptSession(key_bindings=bindings, **devices)

    def is_waiting() -> bool:
        """It has read what was typed after the line, and keeps it for the next one."""
        keys = get_typeahead(session.app.input)
        store_typeahead(session.app.input, keys)
        return bool(keys)

    return lambda: session.prompt(prompt), is_waiting


def _use_readline() -> None:
    """Have input() edit lines, remember them, and take a pasted text as one."""
    try:
        import readline
    except ImportError:  # Windows has none.
        return
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off.


def _has_input() -> bool:
    try:
        return bool(select.select([sys.stdin], [], [], _WAIT_SECONDS)[0])
    except (OSError, ValueError):  # Windows waits for sockets alone.
        return False
