"""Files are read below image_root alone."""

import os

import pytest

pytest.importorskip("PIL", reason="needs the extra images")
from PIL import Image

from nanovllm.images.read import read_image
from nanovllm.images.rules import ImageRules


@pytest.fixture
def root(tmp_path):
    """A folder of images, beside which a secret lies."""
    folder = tmp_path / "images"
    (folder / "inner").mkdir(parents=True)
    for path in (folder / "page.png", folder / "inner" / "page.png", tmp_path / "secret.png"):
        Image.new("RGB", (1, 1)).save(path)
    (tmp_path / "images-2").mkdir()
    Image.new("RGB", (1, 1)).save(tmp_path / "images-2" / "page.png")
    return folder


def test_what_lies_below_the_root_is_read(root):
    rules = ImageRules(image_root=root)
    os.symlink(root / "inner", root / "link")
    for path in (
        "page.png",
        "inner/../page.png",
        root / "inner" / "page.png",
        "link/page.png",
        f"file://{root}/page.png",
    ):
        assert read_image(path, rules=rules).width == 1


def test_a_root_that_is_a_link_is_followed(root, tmp_path):
    os.symlink(root, tmp_path / "alias")
    assert read_image("page.png", rules=ImageRules(image_root=str(tmp_path / "alias"))).width == 1


def test_what_lies_outside_is_refused_whether_it_is_there_or_not(root, tmp_path):
    rules = ImageRules(image_root=root)
    os.symlink(tmp_path / "secret.png", root / "link.png")
    os.symlink(tmp_path, root / "up")
    os.symlink("../../secret.png", root / "inner" / "relative.png")
    paths = ["../secret.png", tmp_path / "secret.png", "link.png", "up/secret.png", "inner/relative.png"]
    paths += [f"file://{tmp_path}/secret.png", "file:///etc/hostname", "/etc/passwd", "../nothing.png", "inner/../../x"]
    paths += [
        tmp_path / "images-2" / "page.png",
        "../images-2/page.png",
        f"file://localhost{tmp_path}/secret.png",
        "..",
    ]
    for path in paths:
        with pytest.raises(ValueError, match="it lies outside the folder") as found:
            read_image(path, rules=rules)
        assert str(root) not in str(found.value).replace(str(path), "")  # A client need not know where it is.


def test_a_path_begins_at_the_root_and_knows_no_home(root):
    with pytest.raises(ValueError, match="No such file"):
        read_image("~/page.png", rules=ImageRules(image_root=root))


def test_without_a_root_no_file_is_read(root):
    for path in (root / "page.png", f"file://{root}/page.png", "page.png"):
        with pytest.raises(ValueError, match=r"files are not read here: no image_root \(--image-root\)"):
            read_image(path, rules=ImageRules())


@pytest.mark.parametrize("name", ["pipe", "inner", "nothing.png", "a\0b", "x." * 2500])
def test_what_is_no_file_is_refused_at_once(root, name):
    if name == "pipe":
        os.mkfifo(root / "pipe")  # To open it would wait for ever.
    with pytest.raises(ValueError, match=r"it is no file|it cannot be read|a zero byte"):
        read_image(name, rules=ImageRules(image_root=root))


def test_a_large_file_is_refused_before_it_is_read(root, monkeypatch):
    with open(root / "large.png", "wb") as file:
        file.truncate(2**40)  # It takes no room on the disk.
    with pytest.raises(ValueError, match=r"its file has 1048576.0 MiB; max_image_mib .* allows 50"):
        read_image("large.png", rules=ImageRules(image_root=root))


def test_a_url_with_a_host_is_no_file(root):
    with pytest.raises(ValueError, match="three slashes"):
        read_image("file://elsewhere/page.png", rules=ImageRules(image_root=root))
