"""`python tests/fuzz/run.py [TARGET …] [--seconds N]`: fuzz with atheris, starting from the seeds and the corpus.

A crash is written to tests/fuzz/corpus/<target>/, where test runs replay it: fix the bug, and keep the file.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"


def fuzz(name: str, arguments: list[str]) -> None:
    """Run one target in this process; atheris ends it."""
    import atheris

    with atheris.instrument_imports(include=["halimede"]):
        from targets import TARGETS

    atheris.Setup([f"fuzz-{name}", *arguments], TARGETS[name])
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help="all, unless named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target [60]")
    options = parser.parse_args()
    from seeds import SEEDS

    if unknown := set(options.targets) - set(SEEDS):
        parser.error(f"unknown targets {', '.join(sorted(unknown))}; there are {', '.join(SEEDS)}")
    failed: list[str] = []
    for name in options.targets or SEEDS:
        found = CORPUS / name
        found.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as work:
            for at, seed in enumerate(SEEDS[name]):
                (Path(work) / f"seed-{at}").write_bytes(seed)
            command = [
                *(sys.executable, __file__, "--target", name, work, str(found)),
                *(f"-max_total_time={options.seconds}", f"-artifact_prefix={found}/", "-max_len=2048"),
                # The tracer's own tables grow with every input, so memory is bounded for each allocation, not in all.
                *("-timeout=10", "-rss_limit_mb=0", "-malloc_limit_mb=256", "-print_final_stats=1"),
            ]
            if subprocess.run(command, check=False).returncode:
                failed.append(name)
    if failed:
        print(f"findings in {', '.join(failed)}: see {CORPUS}")
    return bool(failed)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    if sys.argv[1:2] == ["--target"]:
        fuzz(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
