"""A URL and a file that no server may ask for because a request names them."""

from __future__ import annotations

import errno
import http.server
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from server import Server
from wire_client import ask


class Lure:
    """A URL and a file that nobody may ask for; `check` says whether somebody did."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        lure = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                lure.asked.append(self.path)
                self.send_error(404)

            do_HEAD = do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/image.png"
        # Who opens a pipe to read it waits for a writer: that can be seen.
        self.file = folder / "image.png"
        os.mkfifo(self.file)

    def check(self) -> None:
        assert self.asked == []
        with pytest.raises(OSError) as nobody:
            os.close(os.open(self.file, os.O_WRONLY | os.O_NONBLOCK))
        assert nobody.value.errno == errno.ENXIO

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def names(self) -> list[str]:
        return [self.url, str(self.file), f"file://{self.file}"]

    def requests(self) -> list[dict[str, Any]]:
        """Inputs that name the URL or the file wherever a server could be so kind as to look."""
        names = self.names
        parts = [
            {"type": kind, kind: {"url": name}}
            for kind in ("image_url", "video_url", "audio_url")
            for name in names
        ]
        parts += [{"type": "image_url", "image_url": name} for name in names]
        parts += [{"type": "input_audio", "input_audio": {"data": name, "format": "wav"}} for name in names]
        parts += [{"type": "image", "image": name} for name in names]
        chats = [{"messages": [{"role": "user", "content": [part]}]} for part in parts]
        chats += [
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"chat_template": name}}
            for name in names
        ]
        loras = [{"lora_request": {"load": name}} for name in [*names, "../image.png"]]
        return [*({"messages": chat} for chat in chats), *loras]


def check_that_nothing_is_fetched(server: Server, lure: Lure) -> None:
    for inputs in lure.requests():
        answer = ask(server.grpc_url, **inputs)
        assert (answer.error or "").startswith("INVALID_ARGUMENT: "), (inputs, answer)
        assert next(iter(inputs)) in (answer.error or "")
    lure.check()
