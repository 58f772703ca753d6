"""Requests that name files and URLs, before the real engine, whose own server would fetch them."""

from __future__ import annotations

from pathlib import Path

from lure import Lure, check_that_nothing_is_fetched
from server import Server
from wire_client import ask


def test_urls_and_paths_in_requests_are_refused(server: Server, tmp_path: Path) -> None:
    lure = Lure(tmp_path)
    try:
        check_that_nothing_is_fetched(server, lure)
        for name in lure.names:
            answer = ask(server.grpc_url, "a", image=[name], stream=True)
            assert (answer.error or "").startswith("INVALID_ARGUMENT: image[0]: not a base64 image")
        lure.check()
        assert ask(server.grpc_url, "Once", sampling_parameters={"max_tokens": 1}).error is None
    finally:
        lure.close()
