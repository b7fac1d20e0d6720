"""Where a process listens, as Linux tells it."""

import contextlib
import os
from pathlib import Path

LOOPBACK = ("0100007F", "00000000000000000000000001000000")  # 127.0.0.1 and ::1


def listening_addresses(pid: int) -> list[str]:
    """The hexadecimal IP address of each TCP port that a process listens on."""
    inodes, addresses = set(), []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if inode in inodes and state == "0A":
                addresses.append(local.partition(":")[0])
    return addresses
