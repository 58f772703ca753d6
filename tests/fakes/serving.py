"""A gateway in a thread of this process, with real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from voltriton_client.gateway.app import create_app
from voltriton_client.gateway.settings import Settings


@contextmanager
def gateway(*servers: str, **settings: Any) -> Iterator[str]:
    """`with gateway(server.address) as url`; `settings` are those of the gateway."""
    options = {"health_interval_s": 0.1, "request_timeout_s": 20.0, **settings}
    app = create_app(Settings(servers=servers, **options))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive())
        assert server.started, "the gateway did not start"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def wait_for(condition: Callable[[], Any], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)
