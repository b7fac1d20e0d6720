"""scripts/docker_images.py without docker: the Dockerfiles fit the project, and mistakes in them are found."""

import re

import docker_images
import pytest
from docker_images import IMAGES, Wheel, find_mistakes, project_version, read_instructions

PYPROJECT = (docker_images.ROOT / "pyproject.toml").read_text(encoding="utf-8")
EXTRAS = re.findall(
    r"^([\w-]+) = \[", PYPROJECT.split("[project.optional-dependencies]")[1].split("\n[")[0], re.MULTILINE
)
# The name by the specification of wheels. `--check`, which CI runs, compares it with what pip makes.
VERSION = project_version()
WHEEL = Wheel(f"nanovllm-{VERSION}-py3-none-any.whl", EXTRAS)


def text_of(image: str) -> str:
    return docker_images.dockerfile(image).read_text(encoding="utf-8")


@pytest.mark.parametrize("image", IMAGES)
def test_the_dockerfiles_fit_the_project(image):
    assert find_mistakes(text_of(image), WHEEL, VERSION) == []


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        (f"VERSION={VERSION}", "VERSION=0.0.9", f"pyproject.toml has {VERSION}"),
        (f"ARG VERSION={VERSION}", "ARG OTHER=1", "ARG VERSION=None"),
        ("COPY nanovllm-", "COPY nano-", f"the context has nanovllm-{VERSION}"),
        ("COPY nanovllm-", "COPY docs nanovllm-", "COPY docs"),
        ("[jobs,", "[job,", "the wheel has no extra job"),
        ("USER nanovllm", "USER root", "ends as root"),
        ("USER nanovllm\n", "", "ends as root"),
        ("pip install --no-cache-dir ", "pip install ", "leaves its cache"),
        ('RUN pip install --no-cache-dir "/tmp/', 'RUN ls "/tmp/', "no RUN installs"),
    ],
)
def test_a_mistake_is_found(image, old, new, mistake):
    assert old in text_of(image)
    assert any(mistake in found for found in find_mistakes(text_of(image).replace(old, new), WHEEL, VERSION))


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        (":13.0.2-base-ubuntu24.04", "", "name a version"),
        (":13.0.2-base-ubuntu24.04", ":latest", "name a version"),
        (" --no-install-recommends", "", "--no-install-recommends"),
        ("rm -rf /var/lib/apt/lists/*", "true", "leaves its lists"),
    ],
)
def test_a_mistake_in_the_base_is_found(old, new, mistake):
    assert old in text_of("gpu")
    assert any(mistake in found for found in find_mistakes(text_of("gpu").replace(old, new), WHEEL, VERSION))


def test_lines_that_go_on_are_one_instruction():
    text = "# a comment\nRUN a \\\n    # another\n    && b\ncmd []\n"
    assert read_instructions(text) == [("RUN", "a && b"), ("CMD", "[]")]
