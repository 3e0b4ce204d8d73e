"""The demo's conclusions from its measurements, and its drawings."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from rich.console import Console

from halimede.demo.__main__ import batch_text, disagreements, drawn, frameworks_table, missing, short
from halimede.demo.drive import Drive
from halimede.demo.frameworks import FRAMEWORKS, Digits, Framework, TrainingError, train_missing
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


def test_frameworks_have_a_row_or_a_line_that_says_how_to_add_them(tmp_path: Path) -> None:
    served = Drive(OUTSIDE.repeat(2, axis=0), np.array([0.001, 0.002, 0.003, 0.004]), 2.0, Counter({2: 2}))
    console = Console(width=110)
    with console.capture() as captured:
        console.print(frameworks_table({"PyTorch": (served, OUTSIDE)}, np.array([0, 0])))
    shown = [[cell.strip() for cell in line.split("│")[1:-1]] for line in captured.get().splitlines() if "│" in line]
    assert [row[:3] for row in shown] == [["PyTorch", "pytorch", "0.5000 (0.5000)"]]
    assert shown[0][3:] == ["2", "2.50", "3.97"]
    extras = {"scikit-learn": "trees", "XGBoost": "trees", "TensorFlow": "tensorflow", "OpenVINO": "openvino"}
    clone = Path(__file__).parents[2]
    for source, path in ((clone, f"-e '{short(clone)}"), (tmp_path, "'PATH-OF-THE-WHEEL")):
        assert missing(["PyTorch"], source) == [
            f"{title} is not installed here. To add it: {short(Path(sys.executable))} -m pip install {path}[{extra}]'"
            for title, extra in extras.items()
        ]


def test_a_framework_is_installed_if_all_its_packages_are() -> None:
    torch = next(each for each in FRAMEWORKS if each.title == "PyTorch")
    assert torch.is_installed()
    assert not replace(torch, packages=("torch", "no_such_package")).is_installed()


def test_a_training_that_fails_says_which_and_why(tmp_path: Path) -> None:
    def train(digits: Digits, path: Path) -> None: ...

    unknown = Framework("Unknown", "unknown", "fil", (), "trees", "model", train)
    with pytest.raises(TrainingError, match=r"(?s)the training with Unknown ended with 1:.*not enough values"):
        train_missing([unknown], tmp_path)
    assert not unknown.export(tmp_path).folder.exists()


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
