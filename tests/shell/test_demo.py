"""What the demo concludes from what it measured."""

from collections import Counter

import numpy as np

from halimede.demo.__main__ import batch_text, disagreements
from halimede.demo.drive import Drive

# Two images; the model outside the server says 0 for the first and 1 for the second.
OUTSIDE = np.array([[0.6, 0.4], [0.1, 0.9]], dtype=np.float32)


def driven(*answers: tuple[float, float]) -> Drive:
    return Drive(np.array(answers, dtype=np.float32), np.zeros(len(answers)), 1.0, Counter())


def test_the_same_answers_in_every_pass_agree() -> None:
    assert disagreements(driven((0.6, 0.4), (0.1, 0.9), (0.600001, 0.399999), (0.1, 0.9)), OUTSIDE) == 0


def test_another_digit_or_another_probability_disagrees() -> None:
    assert disagreements(driven((0.4, 0.6), (0.1, 0.9), (0.6, 0.4), (0.101, 0.899)), OUTSIDE) == 2


def test_answers_of_other_images_disagree() -> None:
    assert disagreements(driven((0.1, 0.9), (0.6, 0.4)), OUTSIDE) == 2


def test_batches_are_told_between_powers_of_two() -> None:
    assert batch_text(Counter({1: 5, 2: 3, 3: 1, 7: 2, 8: 1, 15: 1, 16: 4})) == "1:5 2-3:4 4-7:2 8-15:2 16-31:4"
