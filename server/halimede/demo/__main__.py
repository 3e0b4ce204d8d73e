"""The demo: five parts on one server. A trained model is queried, compared and measured, and so is one of each
framework; python models are queried, and the process of one is killed; pipelines combine models; sequences run through
a model with state."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from halimede.demo import frameworks, photos, pipelines, wards
from halimede.demo.digits import INPUT, LABELS, OUTPUT, REQUEST, answers_outside, held_out_images, train
from halimede.demo.digits import MODEL as DIGITS
from halimede.demo.drive import CALLERS, Drive, Target, batches_formed, drive
from halimede.demo.export import Export
from halimede.demo.process import ServerNotReadyError, ServerProcess

FOLDER = Path(".demo")
PASSES, FRAMEWORK_PASSES = 10, 2
LIBRARIES = {"HTTP": "tritonclient.http", "gRPC": "tritonclient.grpc"}
MEASURES, BATCHES = ("Accuracy (outside)", "Requests/s", "p50 ms", "p99 ms"), "Batches formed, by size"
TOLERANCE = 1e-5
"""Tolerance for probabilities compared with those computed outside: batch sizes affect rounding."""
READY_S = 180
"""A busy machine takes this long to import all frameworks at the same time."""
PICTURES = 60
DIGITS_READ_ALOUD = 4
RAMP = " .:-=+*#%@"


def main() -> int:
    """Run the demo; returns 1 if the server's results differ from those of the model outside of it."""
    # A terminated demo must still stop its server: leave through the `with` blocks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    FOLDER.mkdir(exist_ok=True)
    export = Export(FOLDER / "digits", DIGITS)
    if export.folder.exists():
        console.print(f"Model: {export.model}, trained before")
    else:
        with console.status("Training a classifier of handwritten digits"):
            train(export)
        console.print(f"Model: {export.model}, trained now")
    stateful = Export(FOLDER / "wards", wards.MODEL)
    if not stateful.folder.exists():
        with console.status("Training a forecast with state"):
            wards.train(stateful)
    installed = [each for each in frameworks.FRAMEWORKS if each.is_installed()]
    with console.status(f"Training the same with {', '.join(each.title for each in installed)}"):
        frameworks.train_missing(installed, FOLDER)

    trained = [each.export(FOLDER).repository for each in installed]
    folders = (export.repository, stateful.repository, photos.REPOSITORY, *trained)
    repositories = [f"--model-repository={folder}" for folder in folders]
    with ServerProcess(repositories, FOLDER / "server.log") as server:
        with console.status("Starting halimede serve"):
            server.wait_ready(READY_S)
        console.print(f"Server: process {server.pid}, HTTP {server.address('http')}, gRPC {server.address('grpc')}")
        are_right = [
            digits_act(console, server, export),
            frameworks_act(console, server, export),
            photos_act(console, server),
            pipelines_act(console, server, export),
            sequences_act(console, server, stateful),
        ]

    console.print("\nGo on by hand:")
    shown = [short(folder) for folder in (Path(sys.executable).with_name("halimede"), photos.REPOSITORY)]
    for line in (
        f"{shown[0]} serve --model-repository {export.repository} --model-repository {shown[1]}",
        f"curl -s -d @{export.folder / REQUEST} localhost:8000/v2/models/digits/infer",
        "curl -s localhost:8002/metrics",
    ):
        console.out(f"  {line}", highlight=False)
    return 0 if all(are_right) else 1


def short(path: Path) -> Path:
    """The path relative to the current directory, if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def digits_act(console: Console, server: ServerProcess, export: Export) -> bool:
    """Query every held-out image over both protocols; returns whether the results equal those of the model outside."""
    images, digits = held_out_images(export)
    outside = answers_outside(export, images)
    drives: dict[str, Drive] = {}
    with progress_bars(console) as bars:
        for protocol, library in LIBRARIES.items():
            drives[protocol] = drive(
                library,
                server.address(protocol.lower()),
                server.address("http"),
                Target(DIGITS, INPUT, OUTPUT),
                images,
                PASSES,
                reporter(bars, protocol, PASSES * len(images)),
            )
    console.print(table(drives, digits, outside))
    different = {protocol: disagreements(each, outside) for protocol, each in drives.items()}
    for protocol, count in different.items():
        if count:
            console.print(f"{protocol}: {count} answers differ from the model's outside the server", style="bold red")
    return not any(different.values())


def frameworks_act(console: Console, server: ServerProcess, export: Export) -> bool:
    """Query the model of each framework; returns whether the results equal those of the frameworks outside."""
    images, digits = held_out_images(export)
    address = server.address("http")
    measured: dict[str, tuple[Drive, NDArray[np.float32]]] = {}
    with progress_bars(console) as bars:
        for each in frameworks.FRAMEWORKS:
            if each.is_installed():
                report = reporter(bars, f"HTTP, {each.title}", FRAMEWORK_PASSES * len(images))
                driven = drive(LIBRARIES["HTTP"], address, address, each.target, images, FRAMEWORK_PASSES, report)
                measured[each.title] = driven, frameworks.outside(each.export(FOLDER))
    console.print(frameworks_table(measured, digits))
    for line in missing(measured, Path(__file__).parents[3]):
        console.print(line, markup=False, soft_wrap=True)
    different = {title: disagreements(driven, outside) for title, (driven, outside) in measured.items()}
    for title, count in different.items():
        if count:
            console.print(f"{title}: {count} answers differ from its own outside the server", style="bold red")
    return not any(different.values())


def photos_act(console: Console, server: ServerProcess) -> bool:
    """Query python models with photographs, kill the process of one, query again; returns whether all results equal
    opencv's."""
    samples = photos.sample_photos()
    console.print(f"\nPython model '{photos.PHOTOS}' decodes and resizes over HTTP:")
    are_right = [show_pixels(console, server, photo) for photo in samples]
    console.print(f"\nDecoupled python model '{photos.SKETCH}' sends a photograph row by row over gRPC:")
    are_right.append(show_rows(console, server, samples[-1]))

    killed = server.worker_pid(photos.INSTANCE)
    if killed is None:
        raise ServerNotReadyError(f"instance '{photos.INSTANCE}' has no process; the server's log is {server.log}")
    os.kill(killed, signal.SIGKILL)
    gone = f"instance '{photos.INSTANCE}': its process is gone: signal 9"
    server.wait_logged(gone)
    console.print(f"\nProcess {killed} killed. The log says: {gone}", soft_wrap=True)
    are_right.append(show_pixels(console, server, samples[-1]))
    console.print(
        f"  answered by process {server.worker_pid(photos.INSTANCE)}; the server is still process {server.pid}"
    )
    return all(are_right)


def pipelines_act(console: Console, server: ServerProcess, export: Export) -> bool:
    """Read digits from files with an ensemble and with python code, and spell a number; returns whether all results
    equal those computed outside."""
    images, digits = held_out_images(export)
    pictures = [pipelines.as_png(image) for image in images[:PICTURES]]
    samples = photos.sample_photos()
    outside = pipelines.read_outside(export, [*pictures, *(photo.jpeg for photo in samples)])
    are_right = []
    console.print("\nPipelines decode PNG and JPEG files, classify them in ONNX Runtime, and say it in words:")
    for model, kind in ((pipelines.ENSEMBLE, "an ensemble"), (pipelines.BLS, "python code that calls models")):
        reading = pipelines.read(server.address("http"), model, [*pictures, *(photo.jpeg for photo in samples)])
        is_right = pipelines.are_equal(reading, outside)
        correct = sum(word == LABELS[digit] for word, digit in zip(reading.words, digits[:PICTURES], strict=False))
        console.print(
            f"  {model}, {kind}: {len(pictures)} digits in {reading.seconds * 1000:.0f} ms, {correct} read right; "
            + ", ".join(
                f"{photo.name} looks like a {word}"
                for photo, word in zip(samples, reading.words[PICTURES:], strict=True)
            )
            + f": {comparison(is_right, 'as the same steps do here')}",
            soft_wrap=True,
        )
        are_right.append(is_right)
    number = "".join(str(digit) for digit in digits[:DIGITS_READ_ALOUD])
    words = list(pipelines.spell(server.address("http"), number))
    is_right = words == [LABELS[int(digit)] for digit in number]
    console.print(
        f"Decoupled model '{pipelines.SPELL}' reads {number} aloud in {len(words)} server-sent events: "
        + f"{' '.join(words)}{'' if is_right else ': [bold red]NOT what it says[/]'}",
        soft_wrap=True,
    )
    return all((*are_right, is_right))


def sequences_act(console: Console, server: ServerProcess, export: Export) -> bool:
    """Send the patients of many wards, interleaved, to a model with implicit state; returns whether each ward has the
    means that it has alone."""
    patients = wards.measured_patients(export)
    means = wards.means_of_wards(server.address("http"), patients)
    is_right = bool(np.allclose(means, wards.means_outside(export, patients), rtol=0, atol=wards.TOLERANCE))
    formed = batch_text(batches_formed(server.address("http"), wards.MODEL))
    console.print(
        f"\nStateful model '{wards.MODEL}' forecasts the mean progress of diabetes in {len(patients)} wards, a "
        f"sequence of {patients.shape[1]} patients each, all at the same time (batches by size: {formed}): "
        + comparison(is_right, "as each ward alone does here"),
        soft_wrap=True,
    )
    return is_right


def show_pixels(console: Console, server: ServerProcess, photo: photos.Photo) -> bool:
    """Print a line on one photograph; returns whether its pixels are right."""
    answer = photos.ask_pixels(server.address("http"), photo)
    is_right = photos.is_right(photo, answer.pixels)
    size = " x ".join(map(str, answer.pixels.shape))
    console.print(f"  {photo.name} ({len(photo.jpeg):,} bytes) to {size} in {ms(answer)}: {comparison(is_right)}")
    return is_right


def show_rows(console: Console, server: ServerProcess, photo: photos.Photo) -> bool:
    """Draw a photograph while its rows arrive; returns whether they are right."""
    rows: list[photos.Timed] = []
    for row in photos.stream_rows(server.address("grpc"), photo):
        console.print(drawn(row.pixels))
        rows.append(row)
    is_right = photos.is_right(photo, np.stack([row.pixels for row in rows]))
    console.print(
        f"  {len(rows)} answers, the first after {ms(rows[0])}, the last after {ms(rows[-1])}: {comparison(is_right)}"
    )
    return is_right


def ms(timed: photos.Timed) -> str:
    return f"{timed.seconds * 1000:.0f} ms"


def comparison(is_right: bool, same: str = "as opencv does here") -> str:
    return same if is_right else f"[bold red]NOT {same}[/]"


def drawn(row: photos.Pixels) -> Text:
    """Pixels [n, 3] as characters, denser for brighter pixels, in their colours if the terminal supports them."""
    line = Text("  ")
    for pixel in row:
        red, green, blue = map(int, pixel)
        line.append(RAMP[max(red, green, blue) * len(RAMP) // 256], f"rgb({red},{green},{blue})")
    return line


def progress_bars(console: Console) -> Progress:
    return Progress(
        TextColumn("Asking over {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def reporter(bars: Progress, protocol: str, total: int) -> Callable[[int], None]:
    """A new progress bar; returns the function that advances it."""
    bar = bars.add_task(protocol, total=total)
    return lambda done: bars.update(bar, completed=done)


def disagreements(driven: Drive, outside: NDArray[np.float32]) -> int:
    """The number of results with a different digit, or a different probability, than the model outside the server."""
    expected = np.resize(outside, driven.answers.shape)
    same_digit = driven.answers.argmax(axis=1) == expected.argmax(axis=1)
    close = np.isclose(driven.answers, expected, rtol=0, atol=TOLERANCE).all(axis=1)
    return int((~(same_digit & close)).sum())


def table(drives: dict[str, Drive], digits: NDArray[np.int64], outside: NDArray[np.float32]) -> Table:
    """One row per protocol."""
    shown = Table(
        title=f"{len(digits)} held-out images, {PASSES} passes, one request per image, {CALLERS} callers",
        caption="In parentheses: the same model in ONNX Runtime, without a server. Callers are Python threads, one "
        f"tritonclient each, on the {os.cpu_count()} cores that the server uses too: rates and latencies are mostly "
        "theirs.",
    )
    shown.add_column("Protocol")
    for name in MEASURES:
        shown.add_column(name, justify="right")
    shown.add_column(BATCHES)
    for protocol, each in drives.items():
        shown.add_row(protocol, *cells(each, digits, outside), batch_text(each.batches))
    return shown


def frameworks_table(measured: Mapping[str, tuple[Drive, NDArray[np.float32]]], digits: NDArray[np.int64]) -> Table:
    """One row per installed framework: `measured` has requests and the answers outside by title."""
    shown = Table(
        title=f"A model of each framework, {FRAMEWORK_PASSES} passes over HTTP, {CALLERS} callers",
        caption="In parentheses: the framework itself, without a server.",
    )
    for name in ("Framework", "Backend"):
        shown.add_column(name)
    for name in MEASURES:
        shown.add_column(name, justify="right")
    for each in frameworks.FRAMEWORKS:
        if each.title in measured:
            shown.add_row(each.title, each.backend, *cells(measured[each.title][0], digits, measured[each.title][1]))
    return shown


def missing(measured: Collection[str], source: Path) -> list[str]:
    """A line for each framework that is not installed: how to add it to the environment of this Python.

    `source` is the source folder if Halimede runs from it, as `make demo` installs it. From a wheel there is none.
    """
    pip = f"{short(Path(sys.executable))} -m pip install"
    path = f"-e '{short(source)}" if (source / "pyproject.toml").is_file() else "'PATH-OF-THE-WHEEL"
    return [
        f"{each.title} is not installed here. To add it: {pip} {path}[{each.extra}]'"
        for each in frameworks.FRAMEWORKS
        if each.title not in measured
    ]


def cells(driven: Drive, digits: NDArray[np.int64], outside: NDArray[np.float32]) -> list[str]:
    """The columns of measurements in a table's row."""
    wanted = np.resize(digits, len(driven.answers))
    accuracy = float((driven.answers.argmax(axis=1) == wanted).mean())
    outside_accuracy = float((outside.argmax(axis=1) == digits).mean())
    p50_ms, p99_ms = np.percentile(driven.latencies_s * 1000, [50, 99])
    return [
        f"{accuracy:.4f} ({outside_accuracy:.4f})",
        f"{len(driven.answers) / driven.wall_s:.0f}",
        f"{p50_ms:.2f}",
        f"{p99_ms:.2f}",
    ]


def batch_text(batches: Counter[int]) -> str:
    """Executions by batch size, grouped between powers of two: `1:1317 2-3:366`."""
    octaves: Counter[int] = Counter()
    for size, count in batches.items():
        octaves[size.bit_length() - 1] += count
    texts = []
    for octave, count in sorted(octaves.items()):
        low, high = 1 << octave, (2 << octave) - 1
        texts.append(f"{low}:{count}" if low == high else f"{low}-{high}:{count}")
    return " ".join(texts)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (ServerNotReadyError, frameworks.TrainingError) as error:
        sys.exit(str(error))
