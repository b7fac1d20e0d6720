"""What tests of models that see share."""

import pytest
from checkpoints import skip_unless_known
from vision_checkpoints import make_image_tokenizer, make_vision_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A tiny Qwen3-VL with a tokenizer, and a chat template that gives images their places."""
    skip_unless_known("qwen3_vl")
    path = make_vision_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_vl")
    make_image_tokenizer(path)
    return path
