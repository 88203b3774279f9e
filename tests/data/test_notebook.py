"""Media in notebooks: files are embedded in HTML, and Python shows short reprs."""

from __future__ import annotations

import base64
import io
import re
import wave

import numpy as np
import PIL.Image

from tessera.data.notebook import to_html
from tessera.modalities.audio.media import Audio
from tessera.modalities.image.media import Image
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.music.similarity_sheet import SimilarityRow
from tessera.modalities.video.media import Video
from tessera.objectives.generation import Generated

RNG = np.random.default_rng(0)
IMAGE = Image(RNG.integers(0, 256, (28, 28, 3), dtype=np.uint8))
AUDIO = Audio(np.zeros((2, 800), np.float32), 8000)


def embedded(html: str, mime_type: str) -> list[io.BytesIO]:
    """Return the embedded files of a type."""
    found = re.findall(rf'src="data:{mime_type};base64,([^"]*)"', html)
    return [io.BytesIO(base64.b64decode(one)) for one in found]


def test_images_are_shown_enlarged_by_a_whole_factor() -> None:
    shown = np.asarray(PIL.Image.open(io.BytesIO(IMAGE._repr_png_())))
    assert shown.shape == (112, 112, 3) and np.array_equal(shown[::4, ::4], IMAGE.pixels)
    large = Image(np.zeros((100, 200, 3), np.uint8))
    assert PIL.Image.open(io.BytesIO(large._repr_png_())).size == (200, 100)


def test_grey_and_transparent_images_keep_their_channels() -> None:
    for channels, mode in ((1, "L"), (4, "RGBA")):
        image = Image(np.zeros((8, 8, channels), np.uint8))
        assert PIL.Image.open(io.BytesIO(image._repr_png_())).mode == mode


def test_videos_are_shown_as_animations() -> None:
    video = Video(RNG.integers(0, 256, (3, 32, 48, 3), dtype=np.uint8), 5.0)
    html = video._repr_html_()
    (gif,) = embedded(html, "image/gif")
    with PIL.Image.open(gif) as shown:
        assert (shown.n_frames, shown.size) == (3, (48, 32))
    assert 'width="144"' in html and "pixelated" in html


def test_audio_has_a_plot_and_a_player() -> None:
    html = AUDIO._repr_html_()
    (plot,), (wav,) = embedded(html, "image/png"), embedded(html, "audio/wav")
    assert PIL.Image.open(plot).width == AUDIO.plot().pixels.shape[1]
    with wave.open(wav) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (8000, 2, 800)
    assert "<audio controls" in html


def test_meshes_are_rendered() -> None:
    mesh = Mesh(np.eye(4, 3), np.array([[0, 1, 2], [0, 2, 3]]))
    assert mesh._repr_png_() == mesh.render().to_png()


def test_results_are_shown_with_their_names() -> None:
    generated = Generated(media=[IMAGE, AUDIO], names=["a <red> star", "a & b"])
    html = generated._repr_html_()
    assert "<figcaption>a &lt;red&gt; star</figcaption>" in html and "a &amp; b" in html
    assert len(embedded(html, "image/png")) == 2 and len(embedded(html, "audio/wav")) == 1


def test_results_have_a_short_repr() -> None:
    generated = Generated(media=[IMAGE] * 3, names=["a star", "a star", "a ring"])
    assert repr(generated) == "Generated(samples=3, media=Image, names=['a star', 'a ring'])"
    assert len(repr(Generated(media=[IMAGE] * 99, names=[f"number {i}" for i in range(99)]))) < 120
    assert repr(Generated()) == "Generated(samples=0, media=none, names=[])"
    row = SimilarityRow("a.wav", "a harp", AUDIO, np.ones(512), np.ones(512))
    assert (
        len(repr(row)) < 120 and repr(SimilarityRow.sheet([row])) == "SimilarityMatrix(examples=1)"
    )
    assert "a harp" in row._repr_html_()


def test_objects_without_a_picture_are_shown_by_their_repr() -> None:
    assert to_html("<b>") == "<code>&#x27;&lt;b&gt;&#x27;</code>"
