"""The fuzz targets over their seeds, over mutations of them, and over all findings."""

import random
from pathlib import Path

import pytest

from fuzz.seeds import SEEDS
from fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
FOUND = sorted(path for path in CORPUS.glob("*/*") if path.is_file())
MUTATIONS = 1_000


def test_every_target_has_seeds() -> None:
    assert set(SEEDS) == set(TARGETS)
    assert {path.parent.name for path in FOUND} <= set(TARGETS)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_findings_stay_fixed(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_mutations_of_them(name: str) -> None:
    chance = random.Random(name)
    for seed in SEEDS[name]:
        TARGETS[name](seed)
    for _ in range(MUTATIONS):
        mutated = bytearray(chance.choice(SEEDS[name]))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(mutated) + 1)
            match chance.randrange(4):
                case 0:
                    mutated[at:at] = bytes([chance.randrange(256)])
                case 1:
                    del mutated[at : at + chance.randint(1, 8)]
                case 2:
                    other = chance.choice(SEEDS[name])
                    begin = chance.randrange(len(other))
                    mutated[at:at] = other[begin : begin + chance.randint(1, 32)]
                case _:
                    mutated[at : at + 1] = chance.choice(
                        (b"\0", b"-", b"9" * 20, b"[[", b"\r\n", b"\n", b'"', b"NaN", b"\xff")
                    )
        TARGETS[name](bytes(mutated))
