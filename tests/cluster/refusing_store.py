"""A store that refuses every request and repeats it in the answer: `python -m cluster.refusing_store ADDRESS PORT`."""

import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape


class Refusal(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(HTTPStatus.FORBIDDEN)
        self.end_headers()

    def do_GET(self) -> None:
        body = f"<Error><Code>AccessDenied</Code><Message>{escape(str(self.headers))}</Message></Error>".encode()
        self.send_response(HTTPStatus.FORBIDDEN)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Refusal).serve_forever()
