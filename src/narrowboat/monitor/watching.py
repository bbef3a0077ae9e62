"""A run's report that follows the run: served on this machine alone, to whoever has its token.

``narrowboat report RUN --watch`` prints the address. Each look makes the page anew from ``events.jsonl``; the page asks
again every few seconds. Nothing is written and nothing leaves 127.0.0.1.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from narrowboat.errors import DataError

HOST = "127.0.0.1"
EVERY_SECONDS = 5


class Watched(ThreadingHTTPServer):
    """Serves what ``page`` gives.

    Args:
        page: the report as it is now.
        port: 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, page: Callable[[], str], port: int = 0) -> None:
        self.page, self.token = page, secrets.token_urlsafe(16)
        super().__init__((HOST, port), _Request)

    @property
    def address(self) -> str:
        """What to open, with the token."""
        return f"http://{HOST}:{self.server_address[1]}/?token={self.token}"


class _Request(BaseHTTPRequestHandler):
    server: Watched

    def do_GET(self) -> None:
        """The page, for whoever has the token and calls this machine by its own name."""
        given = parse_qs(urlsplit(self.path).query).get("token", [""])[0]
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (HOST, "localhost") or not hmac.compare_digest(given.encode(), self.server.token.encode()):
            self.send_error(403, "The address with its token is in the terminal.")
            return
        try:
            status, text = 200, self.server.page()
        except DataError as error:
            status, text = 404, f"<!doctype html><title>Narrowboat</title><p>{error}</p>"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Refresh", str(EVERY_SECONDS))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is said of each look."""
