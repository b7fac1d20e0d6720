"""From the sources of a prompt's images to what the engine takes of them, with a stub of a family."""

import pickle

import numpy as np
import pytest
import torch
from vision_stub import PLACE, StubSpec, stub_reader

pytest.importorskip("PIL", reason="needs the extra images")
from test_decode import as_file, picture

from nanovllm.engine.text.image_reader import PackedImage
from nanovllm.images.read import read_image


def test_a_prompt_gets_a_token_for_each_row_of_its_images():
    sources = [as_file(picture(4, 2)), as_file(picture(2, 3))]
    prompt = stub_reader().prompt([7, PLACE, 8, PLACE], sources)
    assert prompt.token_ids == [7, *[PLACE] * 2, 8, *[PLACE] * 3]  # a row for each row of pixels
    for image, source in zip(prompt.images, sources, strict=True):
        expected = StubSpec().process(None, read_image(source).pixels)
        assert torch.equal(image.pixel_values, expected.pixel_values)
        assert (image.grid, image.num_rows) == (expected.grid, expected.num_rows)
        assert image.content_hash == read_image(source).sha256
        assert image.extra["size"] == expected.extra["size"]
        assert torch.equal(image.extra["mask"], expected.extra["mask"])


@pytest.mark.parametrize(
    ("token_ids", "num_images", "said"),
    [
        ([7], 1, "its prompt has 0 places for images, and it has 1 image:"),
        ([PLACE, PLACE], 1, "its prompt has 2 places for images, and it has 1 image:"),
        ([PLACE], 2, "its prompt has 1 place for images, and it has 2 images:"),
    ],
)
def test_places_and_images_are_counted_before_any_is_read(token_ids, num_images, said):
    with pytest.raises(ValueError, match=said):
        stub_reader().prompt(token_ids, ["no-such-file.png"] * num_images)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_an_image_survives_the_way_to_another_process(dtype):
    read = stub_reader(dtype=dtype).read(as_file(picture()))
    buffers = []
    head = pickle.dumps(read, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 2000  # The pixels travel beside it.
    image = pickle.loads(head, buffers=[bytes(buffer.raw()) for buffer in buffers]).unpack()
    expected = torch.from_numpy(picture().astype(np.float32))
    assert torch.equal(image.pixel_values, expected.to(getattr(torch, dtype or "float32")))
    assert image.extra["mask"].dtype == torch.bool
    assert read.num_bytes == sum(len(buffer.raw()) for buffer in buffers)


def test_what_has_been_read_is_not_read_again():
    reader = stub_reader()
    read = reader.read(as_file(picture()))
    assert reader.read(read) is read
    again = reader.read(read.unpack())
    assert isinstance(again, PackedImage)
    assert again.content_hash == read.content_hash


def test_an_image_that_the_processor_refuses_is_an_error_of_the_prompt():
    with pytest.raises(ValueError, match="image of 300 x 1 pixels: ValueError: too long"):
        stub_reader().prompt([PLACE], [as_file(picture(300, 1))])
