"""Streams that are followed in the background, with the time of what came: for tests that break something meanwhile."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import grpc
from server import wait_for
from wire_client import Answer, WireClient, build, decode, is_final


def script(**values: Any) -> str:
    """A prompt that tells the scripted engine what to do."""
    return json.dumps(values)


class Follow:
    """One request on a stream of its own."""

    def __init__(self, address: str, text: str | None = None, **inputs: Any) -> None:
        self.answer = Answer()
        # What became of the connection, where it was not the request that failed.
        self.broken: str | None = None
        self.began = time.monotonic()
        self.ended = 0.0
        self.times: list[float] = []
        self.client = WireClient(address)
        given = {"stream": True, "sampling_parameters": {"max_tokens": 4000}, **inputs}
        request = build(text, **given)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        self.client.send(request)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for message in self.client.messages():
                self._take(message)
                if self.answer.finals:
                    # Half-closed: a second answer to the request would still be seen.
                    self.client._requests.put(None)
        except grpc.RpcError as error:
            self.broken = error.code().name
            self.ended = self.ended or time.monotonic()

    def _take(self, message: Any) -> None:
        now = time.monotonic()
        if message.error_message:
            self.answer.error = message.error_message
            self.answer.errors += 1
        elif message.infer_response.outputs:
            self.answer.responses.append(decode(message.infer_response))
            self.times.append(now)
        if is_final(message):
            self.answer.finals += 1
            self.ended = now

    @property
    def text(self) -> str:
        return self.answer.text

    def wait_for_text(self, timeout_s: float = 30) -> None:
        wait_for(lambda: self.answer.responses or self.ended, timeout_s, "the first token")

    def wait(self, timeout_s: float = 30) -> None:
        """Until the answer has ended, one way or the other."""
        wait_for(lambda: self.ended, timeout_s, "the end of a stream")

    def close(self) -> Follow:
        """Reads to the very end of the stream, so that a second answer would have been seen."""
        self._thread.join(10)
        self.client.channel.close()
        return self

    def cancel(self) -> None:
        self.client.cancel()


def follow(address: str, count: int, text: str, **inputs: Any) -> list[Follow]:
    """So many streams, each with its first token."""
    streams = [Follow(address, text, **inputs) for _ in range(count)]
    for stream in streams:
        stream.wait_for_text()
    return streams
