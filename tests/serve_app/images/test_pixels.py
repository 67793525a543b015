"""Contracts of the way from a file to pixels:
sizes as transformers chooses them, and what the file says about itself."""

from __future__ import annotations

import asyncio
import base64
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from engine.multimodal_inputs import InputKind
from serve_app.api.http.offload import MAX_DECODED, run_decoder, work_of
from serve_app.images import intake
from serve_app.images.intake import AskedImage, ImageIntake
from serve_app.images.pixels import MOST_UNEQUAL, Pixels, read_pixels, scaled_size
from serve_app.images.refusal import ImageRefused
from serve_app.settings.images import ImageSettings
from tests.support.conditions import until
from tests.support.image_files import data_url, image_file, make_image

KIND = InputKind(name="image", token_id=1, side=28, min_pixels=3136, max_pixels=1_003_520, chunkable=False)


@settings(max_examples=300, deadline=None)
@given(width=st.integers(1, 5000), height=st.integers(1, 5000), most=st.sampled_from([3136, 100_352, 1_003_520]))
def test_an_image_is_scaled_as_transformers_does(width: int, height: int, most: int) -> None:
    if max(width, height) > MOST_UNEQUAL * min(width, height):
        return
    want = smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=most)
    assert scaled_size(width, height, KIND, most) == want[::-1]


def pixels(file: bytes, most: int = KIND.max_pixels) -> Pixels:
    return read_pixels(file, KIND, max_decoded=2_000_000, max_shown=most)


@pytest.mark.parametrize("kind", ["png", "webp", "gif"])
def test_a_file_is_known_by_its_contents(kind: str) -> None:
    image = make_image(1, 84, 56).quantize(16) if kind == "gif" else make_image(1, 84, 56)
    options = {"lossless": True} if kind == "webp" else {}
    grid, data = pixels(image_file(image, kind, **options))
    assert grid == (1, 2, 3)
    assert data == image.convert("RGB").tobytes()


def test_a_picture_that_lies_on_its_side_is_put_upright() -> None:
    """Cameras store beside the pixels which way is up."""
    image = make_image(1, 84, 56)
    exif = Image.Exif()
    exif[0x0112] = 6
    grid, data = pixels(image_file(image, "png", exif=exif))
    assert grid == (1, 3, 2)
    assert data == image.transpose(Image.Transpose.ROTATE_270).tobytes()


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK"])
def test_every_mode_becomes_three_colours(mode: str) -> None:
    image = make_image(2, 56, 56).convert(mode)
    _, data = pixels(image_file(image, "jpeg" if mode == "CMYK" else "png"))
    assert len(data) == 56 * 56 * 3


def test_greys_of_16_bits_are_scaled_to_8() -> None:
    """Pillow clips them: all but the darkest 256 became white."""
    greys = np.arange(56 * 56, dtype=np.uint16).reshape(56, 56) * 20
    _, data = pixels(image_file(Image.fromarray(greys)))
    assert np.array_equal(np.frombuffer(data, np.uint8), np.repeat(greys.ravel() >> 8, 3))


def test_a_photo_that_holds_a_second_picture_is_read_and_an_animation_is_refused() -> None:
    """Phones put a depth or gain map, or a smaller copy, behind the photo."""
    photo, second = make_image(4, 84, 56), make_image(5, 28, 28)
    grid, data = pixels(image_file(photo, "mpo", save_all=True, append_images=[second]))
    assert (grid, data) == pixels(image_file(photo, "jpeg"))
    for kind in ("gif", "webp", "png"):
        with pytest.raises(ImageRefused, match="it is an animation"):
            pixels(image_file(photo, kind, save_all=True, append_images=[make_image(5, 84, 56)]))


def test_a_header_that_promises_too_much_is_refused_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    file = bytearray(image_file(Image.new("L", (8, 8)), "gif"))
    file[6:10] = (60_000).to_bytes(2, "little") * 2
    monkeypatch.setattr(Image.Image, "convert", None)
    with pytest.raises(ImageRefused, match="60000 x 60000 pixels, and at most 2000000 are decoded"):
        pixels(bytes(file))


@pytest.mark.parametrize(
    "file",
    [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n", b"BM" + bytes(200), b"%PDF-1.4", image_file(make_image(1, 9, 9))[:60]],
)
def test_what_is_no_image_is_refused(file: bytes) -> None:
    with pytest.raises(ImageRefused, match="cannot be read as one of image/png"):
        pixels(file)


def test_a_side_that_is_too_long_for_what_is_shown_is_refused() -> None:
    with pytest.raises(ImageRefused, match="2000 x 10 pixels: one side is too long"):
        pixels(image_file(Image.new("RGB", (2000, 10))), most=28 * 28 * 20)


def test_pixels_have_the_colours_of_transformers_resizing() -> None:
    image = make_image(3, 300, 170)
    grid, data = pixels(image_file(image), most=28 * 28 * 20)
    _, rows, columns = grid
    want = image.resize((columns * 28, rows * 28), Image.Resampling.BICUBIC)
    assert np.array_equal(np.frombuffer(data, np.uint8), np.asarray(want).ravel())


@pytest.mark.anyio
async def test_the_event_loop_goes_on_while_an_image_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    going, seen = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> Pixels:
        seen.set()
        assert going.wait(20)
        return Pixels((1, 1, 1), b"")

    monkeypatch.setattr(intake, "read_pixels", slow)
    reading = asyncio.create_task(
        ImageIntake(KIND, ImageSettings()).read([AskedImage(data_url(make_image(1, 9, 9)), "a")], run_decoder)
    )
    await until(seen.is_set)
    going.set()
    assert await reading == [Pixels((1, 1, 1), b"")]


@pytest.mark.anyio
async def test_a_tenants_many_images_delay_anothers_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: all tenants had one queue. 70 kB of a single colour have 24 million pixels, and behind a few hundred
    of them another's picture waited for a minute."""
    began: list[str] = []
    released = threading.Semaphore(0)

    def slow(file: bytes, *_: object, **__: object) -> Pixels:
        began.append(file.decode())
        assert released.acquire(timeout=30)
        return Pixels((1, 1, 1), b"")

    monkeypatch.setattr(intake, "read_pixels", slow)
    images = ImageIntake(KIND, ImageSettings())

    async def ask(tenant: str, count: int) -> None:
        url = f"data:image/png;base64,{base64.b64encode(tenant.encode()).decode()}"
        with work_of(tenant):
            await images.read([AskedImage(url, "a")] * count, run_decoder)

    asking = [asyncio.create_task(ask("a", 8)) for _ in range(5)]
    await until(lambda: len(began) == MAX_DECODED)
    asking.append(asyncio.create_task(ask("b", 1)))
    for _ in range(5):
        await asyncio.sleep(0)
    for _ in range(41):
        released.release()
    await asyncio.gather(*asking)
    assert began.count("a") == 40
    assert began.index("b") <= 2 * MAX_DECODED + 1, "behind those that ran, and one more"
