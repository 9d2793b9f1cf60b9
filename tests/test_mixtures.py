"""The frames that requests are put into: given text that asks for nothing, with all slots filled in."""

import random
import re

import pytest

mixtures = pytest.importorskip("mixtures")


@pytest.mark.parametrize("frame", mixtures.list_frames())
def test_a_frame_has_blocks_enough_that_ask_for_nothing(frame):
    blocks = mixtures.read_frames()[frame]
    assert len(blocks) >= 6
    draw = random.Random(0)
    for line in "\n".join(blocks).splitlines():
        assert not re.search(
            r"\b(who|what|when|where|why|how|can|could|please)\b[^?]*\?", line, re.IGNORECASE
        )
    texts = {mixtures.draw_pasted(frame, 1, draw) for _ in range(60)}
    assert len(texts) >= 30
    for text in texts:
        assert not re.search(r"\{[a-z_]+\}|\([^()\n]*[a-z]\|", text), text


def test_pieces_of_a_request_are_in_order_and_cover_it():
    draw = random.Random(1)
    for frame in mixtures.list_frames():
        mixture = mixtures.mix("How old is Anna?", "private", frame, "around", 200, draw)
        assert sum(piece.kind == mixtures.GIVEN for piece in mixture.pieces) == 2
        begin = 0
        for piece in mixture.pieces:
            begin = mixture.text.index(piece.text, begin) + len(piece.text)
        assert begin == len(mixture.text)
