"""Google's and Microsoft's stores, partly simulated: which addresses are requested, and how."""

import base64
import json
from pathlib import Path
from urllib.parse import parse_qs

from support.stores import Fetch, Served, WebServer, answer, asked_of, tree, write_credentials


def test_google_with_a_service_account(tmp_path: Path) -> None:
    with WebServer({"/bucket/digits/1/model.onnx": Served(b"x")}).running() as web:
        account = {
            "gcs_base_url": web.url,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        credentials = write_credentials(tmp_path / "c", GOOGLE_APPLICATION_CREDENTIALS_JSON=json.dumps(account))
        model = {"name": "digits", "uri": "gs://bucket/digits/", "credentials": credentials}
        fetched = Fetch(tmp_path, {"models": [model]}).run()

    assert (fetched.code, tree(tmp_path / "models")) == (0, {"digits/1/model.onnx": b"x"}), fetched.log


def test_google_with_an_invalid_service_account(tmp_path: Path) -> None:
    credentials = write_credentials(
        tmp_path / "c", GOOGLE_APPLICATION_CREDENTIALS_JSON='{"private_key": "nobody-may-see"}'
    )
    model = {"name": "digits", "uri": "gs://bucket/digits/", "credentials": credentials}

    fetched = Fetch(tmp_path, {"models": [model]}, timeout=5).run()

    assert (fetched.code, "nobody-may-see" in fetched.log) == (10, False), fetched.log


def test_azure_with_account_and_key_or_signature(tmp_path: Path) -> None:
    account_key = base64.b64encode(b"k" * 32).decode()
    signature = "sv=2024-01-01&sig=nobody%2Fmay%2Bsee"
    for uri, values in (
        ("az://box/digits", {"AZURE_STORAGE_ACCOUNT": "shelf", "AZURE_STORAGE_KEY": account_key}),
        ("as://shelf/box/digits", {"AZURE_STORAGE_SAS_TOKEN": signature}),
    ):
        with AzureServer({"/box/digits/1/model.onnx": Served(b"x")}).running() as web:
            credentials = write_credentials(tmp_path / uri[:2] / "c", **values)
            model = {"name": "digits", "uri": uri, "credentials": credentials}
            fetched = Fetch(tmp_path / uri[:2], {"models": [model]}, timeout=5).run({"AZURE_ENDPOINT": web.url})
            gone = Fetch(tmp_path / uri[:2], {"models": [{**model, "uri": f"{uri}/gone"}]}, timeout=5).run(
                {"AZURE_ENDPOINT": web.url}
            )

        assert (fetched.code, tree(tmp_path / uri[:2] / "models")) == (0, {"digits/1/model.onnx": b"x"}), fetched.log
        assert gone.code == 11, gone.log
        assert "nobody" not in fetched.log + gone.log
        signed = {("sig=" in asked.query, "authorization" in asked.headers) for asked in web.asked}
        assert signed == {(uri.startswith("as"), uri.startswith("az"))}


class AzureServer(WebServer):
    """Lists files like Azure, whose tags have no quotes in listings."""

    def serve(self, handler) -> None:  # type: ignore[no-untyped-def]
        if "comp=list" not in handler.path:
            super().serve(handler)
            return
        asked = asked_of(len(self.asked), handler)
        self.asked.append(asked)
        prefix = parse_qs(asked.query).get("prefix", [""])[0]
        blobs = "".join(
            f"<Blob><Name>{path.removeprefix('/box/')}</Name><Properties><Last-Modified>Sat, 21 Nov 2026 08:00:00 GMT</Last-Modified>"
            f"<Content-Length>{len(served.content)}</Content-Length><Content-Type>a/b</Content-Type><Etag>one</Etag></Properties></Blob>"
            for path, served in self.files.items()
            if path.removeprefix("/box/").startswith(prefix)
        )
        listing = f"<?xml version='1.0'?><EnumerationResults><Blobs>{blobs}</Blobs></EnumerationResults>"
        answer(handler, 200, {"Content-Type": "application/xml"}, listing.encode())
