"""Ways to leave a stream or an iterator of results before its end."""

import contextlib


def leave_by_break(stream):
    for _ in stream:
        break


def leave_by_exception(stream):
    with contextlib.suppress(ZeroDivisionError):
        for _ in stream:
            raise ZeroDivisionError


def leave_by_close(stream):
    next(stream)
    stream.close()


def leave_unread(stream):
    pass


LEAVING = [leave_by_break, leave_by_exception, leave_by_close, leave_unread]
