"""The demo's conclusions from its measurements, and its drawings."""

from collections import Counter

import cv2
import numpy as np

from halimede.demo.__main__ import batch_text, disagreements, drawn
from halimede.demo.drive import Drive
from halimede.demo.photos import Photo, is_right

# Two images; the model outside the server returns 0 for the first and 1 for the second.
OUTSIDE = np.array([[0.6, 0.4], [0.1, 0.9]], dtype=np.float32)


def driven(*answers: tuple[float, float]) -> Drive:
    return Drive(np.array(answers, dtype=np.float32), np.zeros(len(answers)), 1.0, Counter())


def test_the_same_answers_in_every_pass_agree() -> None:
    assert disagreements(driven((0.6, 0.4), (0.1, 0.9), (0.600001, 0.399999), (0.1, 0.9)), OUTSIDE) == 0


def test_another_digit_or_another_probability_disagrees() -> None:
    assert disagreements(driven((0.4, 0.6), (0.1, 0.9), (0.6, 0.4), (0.101, 0.899)), OUTSIDE) == 2


def test_answers_of_other_images_disagree() -> None:
    assert disagreements(driven((0.1, 0.9), (0.6, 0.4)), OUTSIDE) == 2


def test_batches_are_grouped_between_powers_of_two() -> None:
    assert batch_text(Counter({1: 5, 2: 3, 3: 1, 7: 2, 8: 1, 15: 1, 16: 4})) == "1:5 2-3:4 4-7:2 8-15:2 16-31:4"


def test_pixels_are_right_when_opencv_makes_the_same_of_the_file() -> None:
    pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    photo = Photo("small.png", cv2.imencode(".png", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))[1].tobytes())
    assert is_right(photo, pixels)
    pixels[7, 7, 2] += 1
    assert not is_right(photo, pixels)


def test_a_bright_pixel_is_a_dense_character_of_its_colour() -> None:
    line = drawn(np.array([[0, 0, 0], [30, 120, 10], [255, 255, 255]], np.uint8))
    assert line.plain == "  " + " =@"
    assert [span.style for span in line.spans] == ["rgb(0,0,0)", "rgb(30,120,10)", "rgb(255,255,255)"]
