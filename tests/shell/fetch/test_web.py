"""Models from web servers: single files, archives of directories, and hostile archives."""

import base64
import gzip
import inspect
import io
import os
import ssl
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import support.stores
from halimede.fetch.archive import unpack
from halimede.fetch.errors import FetchError
from halimede_spec.fetch_exit import FetchExit
from support.stores import (
    Asked,
    Fault,
    Fetch,
    Fetched,
    Proxy,
    Served,
    WebServer,
    numbered_bytes,
    s3_error,
    tree,
    write_credentials,
)

PKI = Path(support.stores.__file__).parent / "pki"
MB = 1 << 20
Run = Callable[..., Fetched]


def tar(*members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz", compresslevel=1) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return made.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def zipped(*members: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return made.getvalue()


def test_a_file_in_ranges(run: Run, tmp_path: Path) -> None:
    content = numbered_bytes(20 * MB)
    with WebServer({"/files/net.onnx": Served(content)}).running() as web:
        fetched = run(f"{web.url}/files/net.onnx")

    assert (fetched.code, tree(tmp_path / "models")) == (0, {"digits/1/model.onnx": content})
    ranges = {(asked.start, asked.stop) for asked in web.asked[1:]}
    assert ranges == {(0, 8 * MB), (8 * MB, 16 * MB), (16 * MB, 20 * MB)}
    assert {asked.headers.get("if-match") for asked in web.asked[1:]} == {'"one"'}


@pytest.mark.parametrize(
    "served",
    [
        Served(b"x" * 3 * MB, ranges=False),
        Served(b"x" * 3 * MB, ranges=False, hidden_size=True, etag=""),
        Served(b"x" * 3 * MB, etag=""),
    ],
)
def test_servers_without_ranges_or_validators(run: Run, tmp_path: Path, served: Served) -> None:
    with WebServer({"/net.onnx": served}).running() as web:
        assert run(f"{web.url}/net.onnx").code == 0

    assert tree(tmp_path / "models") == {"digits/1/model.onnx": b"x" * 3 * MB}


def test_cut_connection_without_ranges_starts_from_the_beginning(run: Run, tmp_path: Path) -> None:
    def cut(asked: Asked) -> Fault | None:
        return Fault(cut_after=MB) if asked.number == 1 else None

    served = Served(b"abc" * MB, ranges=False)
    with WebServer({"/net.onnx": served}).running() as web, Proxy(web.url, cut).running() as proxy:
        fetched = run(f"{proxy.url}/net.onnx")

    assert (fetched.code, tree(tmp_path / "models")) == (0, {"digits/1/model.onnx": b"abc" * MB})
    assert "the connection was cut" in fetched.log


@pytest.mark.parametrize(
    ("values", "header"),
    [
        ({"TOKEN": "tok-en"}, "Bearer tok-en"),
        ({"USERNAME": "ann", "PASSWORD": "pass word"}, "Basic " + base64.b64encode(b"ann:pass word").decode()),
    ],
)
def test_credentials_are_sent_only_to_their_server(
    run: Run, tmp_path: Path, values: dict[str, str], header: str
) -> None:
    with WebServer({"/net.onnx": Served(b"x")}).running() as other:
        files = {"/net.onnx": Served(redirect="/moved", authorization=header)}
        files["/moved"] = Served(redirect=f"{other.url}/net.onnx?signature=se-cret", authorization=header)
        with WebServer(files).running() as web:
            refused = run(f"{web.url}/net.onnx")
            fetched = run(f"{web.url}/net.onnx", credentials=write_credentials(tmp_path / "c", **values))

    assert (refused.code, refused.report) == (10, f"{web.url}/net.onnx: access was denied (401)")
    assert (fetched.code, tree(tmp_path / "models")) == (0, {"digits/1/model.onnx": b"x"})
    assert {asked.headers.get("authorization") for asked in other.asked} == {None}


def test_query_is_sent_but_never_printed(run: Run) -> None:
    with WebServer({"/net.onnx": Served(b"x")}).running() as web:
        fetched = run(f"{web.url}/net.onnx?X-Amz-Signature=0123456789abcdef")
        gone = run(f"{web.url}/gone.onnx?X-Amz-Signature=0123456789abcdef")

    assert (fetched.code, gone.code, gone.report) == (0, 11, f"{web.url}/gone.onnx: it does not exist (404)")
    assert "0123456789abcdef" not in fetched.log + gone.log + gone.report
    assert {asked.query for asked in web.asked} == {"X-Amz-Signature=0123456789abcdef"}


def test_presigned_address_with_an_expired_token(run: Run) -> None:
    with Proxy("http://127.0.0.1:1", lambda _: s3_error(400, "ExpiredToken")).running() as store:
        fetched = run(f"{store.url}/net.onnx?X-Amz-Signature=0123456789abcdef")

    assert (fetched.code, fetched.report) == (
        10,
        f"{store.url}/net.onnx: the credentials have expired (400 ExpiredToken)",
    )


def test_a_changed_file_is_fetched_anew(run: Run, tmp_path: Path) -> None:
    files = {"/net.onnx": Served(b"old" * 4 * MB)}
    with WebServer(files).running() as web:

        def rule(asked: object) -> None:
            if len(proxy.asked) == 2:
                files["/net.onnx"] = Served(b"new" * 4 * MB, etag='"two"')

        proxy = Proxy(web.url, rule)
        with proxy.running():
            assert run(f"{proxy.url}/net.onnx").code == 0

    assert tree(tmp_path / "models") == {"digits/1/model.onnx": b"new" * 4 * MB}


@pytest.mark.parametrize("name", ["m.tar.gz", "m.tgz", "m.zip"])
@pytest.mark.parametrize("prefix", ["", "digits-v3/", "./"])
def test_archives_of_folders(run: Run, tmp_path: Path, name: str, prefix: str) -> None:
    members = (
        (f"{prefix}config.pbtxt", b"max_batch_size: 2"),
        (f"{prefix}1/model.onnx", b"one"),
        (f"{prefix}2/model.onnx", b"two"),
    )
    with WebServer({f"/{name}": Served(zipped(*members) if name.endswith("zip") else tar(*members))}).running() as web:
        fetched = run(f"{web.url}/{name}")

    assert (fetched.code, fetched.report[:10]) == (0, '{"models":'), fetched.report
    assert tree(tmp_path / "models") == {"digits/config.pbtxt": b"max_batch_size: 2", "digits/2/model.onnx": b"two"}


def test_links_within_an_archive_are_files(run: Run, tmp_path: Path) -> None:
    archive = tar(("1/weights", b"w"), link("1/model.onnx", "weights"), link("1/same", "1/weights", tarfile.LNKTYPE))
    with WebServer({"/m.tgz": Served(archive)}).running() as web:
        assert run(f"{web.url}/m.tgz").code == 0

    assert tree(tmp_path / "models") == {f"digits/1/{name}": b"w" for name in ("model.onnx", "weights", "same")}
    assert not any(path.is_symlink() for path in (tmp_path / "models").rglob("*"))


def device() -> tarfile.TarInfo:
    info = tarfile.TarInfo("1/null")
    info.type, info.devmajor, info.devminor = tarfile.CHRTYPE, 1, 3
    return info


def zip_link() -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("1/model.onnx")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


def long_header() -> bytes:
    info = tarfile.TarInfo("1/model.onnx")
    info.pax_headers = {"comment": "x" * MB}
    return tar(info)


def many_members() -> bytes:
    info = tarfile.TarInfo("./")
    info.type = tarfile.DIRTYPE
    return gzip.compress(info.tobuf() * 100_001 + bytes(1024), compresslevel=1)


HOSTILE: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "parent": ("m.tgz", lambda: tar(("../evil", b"x")), "'../evil' has '.' or '..' in it"),
    "absolute": ("m.tgz", lambda: tar(("/tmp/evil", b"x")), "'/tmp/evil' is an absolute path"),
    "zip parent": ("m.zip", lambda: zipped(("1/../../evil", b"x")), "has '.' or '..' in it"),
    "link out": (
        "m.tgz",
        lambda: tar(link("1/model.onnx", "../../../../etc/passwd")),
        "is a link to something that is not a file",
    ),
    "link absolute": (
        "m.tgz",
        lambda: tar(link("1/model.onnx", "/etc/passwd")),
        "is a link to something that is not a file",
    ),
    "through a link": ("m.tgz", lambda: tar(link("1", "/tmp"), ("1/model.onnx", b"x")), "'1' is a link to something"),
    "hard link": (
        "m.tgz",
        lambda: tar(link("1/model.onnx", "../../etc/passwd", tarfile.LNKTYPE)),
        "is a link to something that is not a file",
    ),
    "device": ("m.tgz", lambda: tar(device()), "'1/null' is a device or a pipe"),
    "zip link": ("m.zip", lambda: zipped((zip_link(), b"/etc/passwd")), "is a link or a device"),
    "twice": ("m.tgz", lambda: tar(("1/model.onnx", b"x"), ("1/model.onnx", b"y")), "occurs twice"),
    "file and folder": ("m.tgz", lambda: tar(("1", b"x"), ("1/model.onnx", b"y")), "is both a file and a folder"),
    "bomb": ("m.tgz", lambda: tar(("1/model.onnx", bytes(65 * MB))), "unpacks to more than 67108864 bytes"),
    "zip bomb": ("m.zip", lambda: zipped(("1/model.onnx", bytes(65 * MB))), "unpacks to more than 67108864 bytes"),
    "header bomb": ("m.tgz", long_header, "is not a complete archive"),
    "many": ("m.tgz", many_members, "holds more than 100000 files"),
    "cut": ("m.tgz", lambda: tar(("1/model.onnx", os.urandom(MB)))[:-1000], "is not a complete archive"),
    "no archive": ("m.tgz", lambda: b"<html>", "is not a complete archive"),
    "no zip": (
        "m.zip",
        lambda: b"<html>",
        "is not a complete archive: BadZipFile: File is not a zip file; pack the folder of one model by: (cd MODEL_FOLDER "
        '&& zip -r "$OLDPWD"/m.zip .)',
    ),
    "several": (
        "m.tgz",
        lambda: tar(("a/1/model.onnx", b"x"), ("b/model.py", b"y")),
        "holds several models: a, b; pack the folder of one model by: tar -czf m.tgz -C a .",
    ),
    "litter": ("m.tgz", lambda: tar(("1/._x", bytes(65 * MB))), "unpacks to more than 67108864 bytes"),
    "nothing": ("m.tgz", tar, "is not a model: it holds nothing"),
}
LARGE = {"many": pytest.mark.large, "zip bomb": pytest.mark.large}


@pytest.mark.parametrize("case", [pytest.param(case, marks=LARGE.get(case, ())) for case in HOSTILE])
def test_invalid_archives_are_refused(run: Run, tmp_path: Path, case: str) -> None:
    name, make, text = HOSTILE[case]
    with WebServer({f"/{name}": Served(make())}).running() as web:
        fetched = run(f"{web.url}/{name}")

    assert (fetched.code, text in fetched.report) == (14, True), fetched.report
    assert tree(tmp_path / "models") == {}
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("name", ["m.tgz", "m.zip"])
def test_what_macos_adds_to_an_archive_is_left_out(run: Run, tmp_path: Path, name: str) -> None:
    members = [("digits/1/model.onnx", b"x"), ("digits/1/._model.onnx", b"y"), ("__MACOSX/digits/._1", b"z")]
    content = zipped(*members) if name.endswith("zip") else tar(*members)
    with WebServer({f"/{name}": Served(content)}).running() as web:
        fetched = run(f"{web.url}/{name}")

    assert (fetched.code, tree(tmp_path / "models")) == (0, {"digits/1/model.onnx": b"x"}), fetched.report


@pytest.mark.parametrize("name", ["m.tgz", "m.zip"])
def test_archive_holds_a_bounded_number_of_files(tmp_path: Path, name: str) -> None:
    members = [(f"{number}", b"x") for number in range(3)]
    (tmp_path / name).write_bytes(zipped(*members) if name.endswith("zip") else tar(*members))

    unpack(tmp_path / name, tmp_path / "three", "here", max_files=3)

    assert tree(tmp_path / "three") == dict(members)
    with pytest.raises(FetchError, match="here holds more than 2 files") as raised:
        unpack(tmp_path / name, tmp_path / "two", "here", max_files=2)
    assert raised.value.code is FetchExit.NOT_A_MODEL
    assert inspect.signature(unpack).parameters["max_files"].default == 100_000


def test_html_page_is_not_a_model(run: Run) -> None:
    with WebServer({"/models/digits": Served(b"<html>")}).running() as web:
        fetched = run(f"{web.url}/models/digits")

    assert (fetched.code, "is not a model; use" in fetched.report) == (14, True)


@pytest.mark.parametrize("scheme", ["https", "s3"])
def test_private_certificate_authority_is_trusted(tmp_path: Path, scheme: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PKI / "server.pem", PKI / "server.key")
    with WebServer({"/files/1/model.onnx": Served(b"x")}, context).running() as web:
        uri = f"{web.url}/files/1/model.onnx" if scheme == "https" else f"s3://{web.url}/files/"
        model = {"name": "digits", "uri": uri}
        refused = Fetch(tmp_path, {"models": [model]}, timeout=5).run()
        model["ca_bundle"] = str(PKI / "root.pem")
        # The same server by an address that its certificate does not have.
        misnamed = {**model, "uri": uri.replace("127.0.0.1", "[::ffff:127.0.0.1]")}
        refused_name = Fetch(tmp_path, {"models": [misnamed]}, timeout=1).run()
        fetched = Fetch(tmp_path, {"models": [model]}).run()

    report = refused_name.report
    assert (refused_name.code, "its certificate is for another name" in report) == (15, True), report
    assert (refused.code, "its certificate is not trusted" in refused.report) == (15, True), refused.report
    assert (fetched.code, tree(tmp_path / "models")) == (0, {"digits/1/model.onnx": b"x"}), fetched.report
