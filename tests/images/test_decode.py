"""What becomes of an image's file: its pixels, or what is wrong with it."""

import base64
import io
import struct
import sys
import zlib

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the extra images")
from PIL import Image, ImageFile

from nanovllm.images.decode import decode
from nanovllm.images.read import read_image
from nanovllm.images.rules import ANYWHERE, ImageRules

RULES = ImageRules(image_root=ANYWHERE)


def picture(width=5, height=3, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def as_file(pixels, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(file, kind, **options)
    return file.getvalue()


def as_base64(kind: str) -> str:
    return base64.b64encode(as_file(picture(), kind)).decode()


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png_of_size(width: int, height: int) -> bytes:
    """A small file that says that it is large."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(10_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def webp_of_size(width: int, height: int) -> bytes:
    canvas = struct.pack("<I", 0) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    content = b"WEBPVP8X" + struct.pack("<I", 10) + canvas
    return b"RIFF" + struct.pack("<I", len(content)) + content


def gif_of_size(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\0\0\0" + b"," + struct.pack("<HHHH", 0, 0, width, height)


@pytest.fixture
def no_decoding(monkeypatch):
    """Fails if pixels are decoded, or room for them is made."""

    def refuse(*args, **kwargs):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    monkeypatch.setattr("PIL._webp.WebPAnimDecoder", refuse)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("PNG", {"compress_level": 0})],
)
def test_lossless_files_give_their_pixels(kind, options):
    pixels = picture()
    found = decode(as_file(pixels, kind, **options), RULES)
    assert (found.pixels == pixels).all()
    assert (found.width, found.height, found.num_bytes) == (5, 3, 45)


def test_a_jpeg_gives_nearly_its_pixels():
    pixels = np.full((16, 16, 3), (200, 30, 90), np.uint8)
    found = decode(as_file(pixels, "JPEG", quality=100, subsampling=0), RULES).pixels
    assert np.abs(found.astype(int) - pixels).max() <= 3  # Its colours are rounded twice.


def test_the_first_frame_of_several_counts():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for kind, options in (("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True})):
        data = as_file(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert (decode(data, RULES).pixels == (255, 0, 0)).all()


def test_what_a_file_is_is_decided_by_its_content(tmp_path):
    (tmp_path / "page.jpg").write_bytes(as_file(picture()))
    assert (read_image(tmp_path / "page.jpg").pixels == picture()).all()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "its file is empty"),
        (b"no image", "it is no image: JPEG, PNG, WebP or GIF is read"),
        (b"%PDF-1.7 ...", "pdftoppm"),
        (as_file(picture(), "TIFF"), "it is TIFF"),
        (as_file(picture(), "BMP"), "it is BMP"),
        (b" \n<svg xmlns='http://www.w3.org/2000/svg'/>", "it is SVG"),
        (b"\0\0\0\x1cftypheic\0\0\0\0", "HEIF"),
        (b"\x89PNG\r\n\x1a\n", "it is a broken PNG file"),
        (b"GIF89a", "it is a broken GIF file"),
        (b"RIFF\0\0\0\0WEBPVP8X", "it is a broken WEBP file"),
        (b"RIFF\0\0\0\0WEBPICCP0123456789", "it is a broken WEBP file"),
    ],
)
def test_other_files_are_refused(data, said):
    with pytest.raises(ValueError, match=said):
        decode(data, RULES)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_files_that_are_cut_off_are_refused(kind, share):
    data = as_file(picture(64, 64), kind)
    with pytest.raises(ValueError, match=f"it is a broken {kind} file"):
        decode(data[: int(len(data) * share)], RULES)


@pytest.mark.parametrize(("kind", "num_bytes"), [("PNG", 12), ("PNG", 4), ("JPEG", 2), ("GIF", 1), ("WEBP", 1)])
def test_files_without_their_end_are_refused(kind, num_bytes):
    data = as_file(picture(61, 40), kind)
    assert decode(data + b"more", ImageRules()).width == 61
    with pytest.raises(ValueError, match=f"it is a broken {kind} file"):
        decode(data[:-num_bytes], ImageRules())


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_the_end_of_files_with_several_frames(kind):
    first, second = (Image.fromarray(picture(20, 30, seed)) for seed in range(2))
    file = io.BytesIO()
    first.save(file, kind, save_all=True, append_images=[second], comment=b"a;b" * 200)
    assert decode(file.getvalue(), ImageRules()).height == 30
    with pytest.raises(ValueError, match=f"it is a broken {kind} file: its end is missing"):
        decode(file.getvalue()[: -12 if kind == "PNG" else -1], ImageRules())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_damaged_files_give_an_error_or_pixels_and_nothing_else(kind):
    data = as_file(picture(32, 32), kind)
    rng = np.random.default_rng(0)
    for _ in range(40):
        damaged = bytearray(data)
        for place in rng.integers(0, len(data), 4):
            damaged[place] = rng.integers(0, 256)
        try:
            decode(bytes(damaged), ImageRules(max_image_megapixels=1))
        except ValueError:
            continue


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [png_of_size, webp_of_size, gif_of_size])
def test_bombs_are_refused_before_anything_is_decoded(make, no_decoding):
    with pytest.raises(ValueError, match=r"16000 x 16000 pixels, 256.0 million; max_image_megapixels .* allows 50"):
        decode(make(16_000, 16_000), RULES)


def test_a_jpeg_that_says_it_is_large_is_refused_before_it_is_decoded(no_decoding):
    data = as_file(picture(16, 16), "JPEG")
    at = data.index(b"\xff\xc0") + 5
    data = data[:at] + struct.pack(">HH", 16_000, 16_000) + data[at + 4 :]
    with pytest.raises(ValueError, match="16000 x 16000 pixels"):
        decode(data, RULES)


def test_limits_are_exact():
    data = as_file(picture(1000, 3))
    decode(data, ImageRules(max_image_megapixels=0.003))
    with pytest.raises(ValueError, match="it has 1000 x 3 pixels"):
        decode(data, ImageRules(max_image_megapixels=0.002999))
    decode(data, ImageRules(max_image_mib=len(data) / 2**20))
    with pytest.raises(ValueError, match="max_image_mib"):
        decode(data, ImageRules(max_image_mib=(len(data) - 1) / 2**20))


def test_a_jpeg_of_a_thousand_scans_is_refused():
    data = as_file(picture(64, 64), "JPEG", progressive=True)
    decode(data, RULES)
    scan = data.rindex(b"\xff\xda")
    with pytest.raises(ValueError, match="more than 100 scans"):
        decode(data[:-2] + data[scan:-2] * 1000 + data[-2:], RULES)


def test_a_second_size_in_a_png_does_not_count_more_than_the_first(no_decoding):
    data = png_of_size(4, 4)
    head = struct.pack(">IIBBBBB", 16_000, 16_000, 8, 2, 0, 0, 0)
    with pytest.raises(ValueError, match=r"16000 x 16000 pixels|broken PNG"):
        decode(data[:33] + chunk(b"IHDR", head) + data[33:], RULES)


def test_what_looks_like_scans_in_other_parts_of_a_jpeg_does_not_count():
    comment = b"\xff\xfe" + struct.pack(">H", 2002) + b"\xff\xda" * 1000
    data = as_file(picture(16, 16), "JPEG")
    decode(data[:2] + comment + data[2:] + b"\xff\xda" * 1000, RULES)


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_image_mib", 0), ("max_image_megapixels", 90), ("image_root", "/nowhere"), ("allow_remote", 1)],
)
def test_a_wrong_rule_is_refused_by_its_name(option, value):
    with pytest.raises(ValueError, match=f"{option}={value!r}: must be"):
        ImageRules(**{option: value})


# -- colours -----------------------------------------------------------------------------------------------------------


def test_exif_turns_an_image():
    pixels = picture(4, 2)
    turned = {1: pixels, 3: pixels[::-1, ::-1], 6: np.rot90(pixels, -1), 8: np.rot90(pixels), 2: pixels[:, ::-1]}
    turned |= {4: pixels[::-1], 5: pixels.transpose(1, 0, 2), 7: np.rot90(pixels, -1)[:, ::-1][::-1, ::-1]}
    for orientation, expected in turned.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        found = decode(as_file(pixels, "PNG", exif=exif), RULES).pixels
        assert np.array_equal(found, expected), orientation


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # Pillow's
def test_broken_exif_leaves_an_image_as_it_is():
    data = as_file(picture(), "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert (decode(data, RULES).pixels == picture()).all()


def test_transparency_lies_over_white():
    half = Image.new("RGBA", (2, 2), (255, 0, 0, 128))
    half.putpixel((0, 0), (0, 0, 0, 0))
    found = decode(as_file(half), RULES).pixels
    assert found[0, 0].tolist() == [255, 255, 255]
    assert found[1, 1].tolist() == [255, 127, 127]
    gray = Image.new("LA", (2, 2), (0, 0))
    assert (decode(as_file(gray), RULES).pixels == 255).all()
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert decode(as_file(palette), RULES).pixels[0, 0].tolist() == [10, 20, 30]
    assert (decode(as_file(palette, transparency=1), RULES).pixels == 255).all()


def test_other_modes_become_rgb():
    cmyk = decode(as_file(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100), RULES).pixels
    assert np.abs(cmyk.astype(int) - (255, 0, 0)).max() <= 6
    assert decode(as_file(Image.new("1", (2, 2), 1)), RULES).pixels[0, 0].tolist() == [255, 255, 255]
    deep = Image.fromarray(np.array([[0, 0x1234], [0x8000, 0xFFFF]], np.uint16))
    assert decode(as_file(deep), RULES).pixels[..., 0].tolist() == [[0, 0x12], [0x80, 0xFF]]


# -- sources -----------------------------------------------------------------------------------------------------------


def test_equal_images_have_equal_hashes_whatever_they_came_from(tmp_path):
    pixels = picture()
    data = as_file(pixels)
    (tmp_path / "a b.png").write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    sources = [Image.fromarray(pixels), data, bytearray(data), tmp_path / "a b.png", str(tmp_path / "a b.png"), url]
    sources += [f"file://{tmp_path}/a%20b.png", {"bytes": data, "path": None}, {"path": str(tmp_path / "a b.png")}]
    sources += [as_file(pixels, "WEBP", lossless=True), url.rstrip("="), url.replace("data:image/png", "DATA:")]
    images = [read_image(source) for source in sources]
    assert {image.sha256 for image in images} == {images[0].sha256}
    assert len(images[0].sha256) == 32
    assert read_image(images[0]) is images[0]


def test_the_hash_tells_sizes_and_pixels_apart():
    pixels = picture(4, 6)
    other = pixels.copy()
    other[5, 3, 2] ^= 1
    hashes = {read_image(Image.fromarray(each)).sha256 for each in (pixels, other, pixels.reshape(4, 6, 3))}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        (7, TypeError, "image 7: must be a path"),
        ({"path": None}, TypeError, r"image {'path': None}: must have \"bytes\" or \"path\", or be a path"),
        ({"url": "https://a.example/a.png"}, TypeError, r"image {'url': 'https.*'}: must have \"bytes\" or \"path\""),
        (
            np.zeros((40, 40, 3)),
            TypeError,
            r"must be a path, .*, not ndarray of shape \(40, 40, 3\): PIL.Image.fromarray",
        ),
        (as_base64("JPEG"), ValueError, "is base64, and no path: put data:image/png;base64, in front of it"),
        (as_base64("PNG"), ValueError, "is base64, and no path"),
        (as_base64("PNG")[:40], ValueError, "is base64, and no path"),
        (
            f"data:image/png,{as_base64('PNG')}",
            ValueError,
            "does not say so: it must begin with data:image/png;base64,",
        ),
        (f"data:image/jpeg,{as_base64('JPEG')}", ValueError, "it must begin with data:image/jpeg;base64,"),
        ("", ValueError, "image '': is empty"),
        ("s3://bucket/page.png", ValueError, "URLs of s3 are not read"),
        ("data:image/png;base64,&&&&", ValueError, "is not base64"),
        ("data:image/png", ValueError, "is no data: URL"),
        (
            "http://example.com/a.png",
            ValueError,
            r"allow_remote \(read_image\(..., rules=ImageRules\(allow_remote=True\)\)\) is off",
        ),
        ("no-such-file.png", ValueError, "image 'no-such-file.png': it cannot be read: No such file"),
        (b"abc", ValueError, "image of 3 bytes: it is no image"),
        (Image.new("F", (1, 1)), ValueError, "mode F"),
    ],
)
def test_a_wrong_source_is_named(source, error, said):
    with pytest.raises(error, match=said) as found:
        read_image(source)
    assert "\n" not in str(found.value)


def test_limits_name_what_a_caller_can_set():
    """A command has an option; a caller of Python reads the image by rules of his own."""
    large = Image.new("RGB", (9000, 9000))
    with pytest.raises(ValueError, match=r"\(read_image\(..., rules=ImageRules\(max_image_megapixels=...\)\)\)"):
        read_image(large)
    with pytest.raises(ValueError, match=r"max_image_megapixels \(--max-image-megapixels\) allows 50"):
        read_image(large, rules=ImageRules())
    with pytest.raises(ValueError, match=r"max_image_mib \(read_image\(..., rules=ImageRules\(max_image_mib=...\)\)\)"):
        read_image(bytes(51 << 20))
    with pytest.raises(ValueError, match=r"allow_remote \(--allow-remote\) is off"):
        read_image("http://example.com/a.png", rules=ImageRules())


def test_a_large_data_url_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(base64, "b64decode", None)
    with pytest.raises(ValueError, match="max_image_mib"):
        read_image("data:image/png;base64," + "A" * 3000, rules=ImageRules(max_image_mib=2**-10))


def test_without_pillow_an_error_says_what_to_install(monkeypatch):
    data = as_file(picture())
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'nanovllm\[images\]'"):
        read_image(data)
