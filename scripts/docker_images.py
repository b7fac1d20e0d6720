"""Build the container images of docker/, or check them where there is no docker.

    python scripts/docker_images.py               nanovllm:gpu and nanovllm:cpu
    python scripts/docker_images.py --image cpu   one of them
    python scripts/docker_images.py --check       build the wheel, and look for mistakes in the Dockerfiles, as CI does

An image gets the wheel that `pip wheel .` makes of this tree. It is the only file of the build's context, so nothing
else of the tree can get into an image.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
IMAGES = "gpu", "cpu"
_VERSION = re.compile(r'^version = "(.+)"$', re.MULTILINE)


class Wheel(NamedTuple):
    """What an image expects of the wheel."""

    name: str  # of its file
    extras: Collection[str]


def dockerfile(image: str) -> Path:
    return ROOT / "docker" / f"{image}.Dockerfile"


def project_version() -> str:
    found = _VERSION.search((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if found is None:
        raise ValueError('pyproject.toml has no line version = "..."')
    return found[1]


def build_wheel(folder: Path) -> Wheel:
    """The wheel of this tree, in the folder."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = Parser().parsestr(archive.read(metadata).decode(), headersonly=True)
    return Wheel(path.name, headers.get_all("Provides-Extra", []))


def read_instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, its arguments) in order: lines that end in a backslash joined, without comments."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\s*\\\n\s*", " ", lines)
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(pair[0].upper(), pair[1] if len(pair) > 1 else "") for pair in pairs]


def find_mistakes(text: str, wheel: Wheel, version: str) -> list[str]:
    """What is wrong with a Dockerfile: files that its context does not have, another version than the project's, extras
    that the wheel does not have, a base that is not pinned, root at the end, and what package managers leave behind."""
    instructions = read_instructions(text)
    arguments = dict(value.split("=", 1) for name, value in instructions if name == "ARG" and "=" in value)

    def filled(value: str) -> str:
        return re.sub(r"\$\{(\w+)\}", lambda found: arguments.get(found[1], found[0]), value)

    mistakes = []
    if arguments.get("VERSION") != version:
        mistakes.append(f"ARG VERSION={arguments.get('VERSION')}: pyproject.toml has {version}")
    for name, value in instructions:
        value = filled(value)
        if name == "FROM" and not re.search(r":[\w.-]*\d", value):
            mistakes.append(f"FROM {value}: name a version of the base")
        if name in ("COPY", "ADD"):
            sources = [word for word in value.split()[:-1] if not word.startswith("--")]
            mistakes += [f"{name} {source}: the context has {wheel.name}" for source in sources if source != wheel.name]
        if name == "RUN":
            mistakes += [f"RUN {value}: {mistake}" for mistake in _mistakes_of_run(value, wheel)]
    users = [value for name, value in instructions if name == "USER"]
    if not users or users[-1].split(":")[0] in ("root", "0"):
        mistakes.append("the image ends as root: USER names another user")
    installs = [filled(value) for name, value in instructions if name == "RUN" and "pip install" in value]
    if not any(wheel.name in command for command in installs):
        mistakes.append(f"no RUN installs {wheel.name}")
    return mistakes


def _mistakes_of_run(command: str, wheel: Wheel) -> list[str]:
    mistakes = []
    if "apt-get install" in command:
        if "--no-install-recommends" not in command:
            mistakes.append("apt-get without --no-install-recommends")
        if "rm -rf /var/lib/apt/lists" not in command:
            mistakes.append("apt-get leaves its lists in the image")
    for part in command.split("&&"):
        if "pip install" in part and "--no-cache" not in part:
            mistakes.append("pip leaves its cache in the image")
    asked = re.search(re.escape(wheel.name) + r"\[([\w,-]+)\]", command)
    unknown = sorted(set(asked[1].split(",")) - set(wheel.extras)) if asked else []
    return mistakes + [f"the wheel has no extra {extra}" for extra in unknown]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", choices=IMAGES, nargs="+", default=list(IMAGES), help="default: all")
    parser.add_argument("--check", action="store_true", help="only check: needs no docker")
    args = parser.parse_args()
    version = project_version()
    with tempfile.TemporaryDirectory() as context:
        wheel = build_wheel(Path(context))
        found = [
            f"{dockerfile(image).relative_to(ROOT)}: {mistake}"
            for image in args.image
            for mistake in find_mistakes(dockerfile(image).read_text(encoding="utf-8"), wheel, version)
        ]
        if found:
            sys.exit("\n".join(found))
        if args.check:
            print(f"{', '.join(args.image)}: no mistakes found; the wheel is {wheel.name}")
            return
        for image in args.image:
            tag = f"nanovllm:{image}"
            command = ["docker", "build", "--file", str(dockerfile(image)), "--tag", tag]
            subprocess.run([*command, "--build-arg", f"VERSION={version}", context], check=True)


if __name__ == "__main__":
    main()
