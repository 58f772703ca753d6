"""The thinnest clients that can stream: what they cost the machine is not the server's fault.

Each opens one connection and `run`s one request after another on it; `run` returns the arrival time
(`time.perf_counter`) of every message that carried tokens. They ask for `ignore_eos`, so an answer has as many
tokens as it was asked for.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Protocol

import grpc
from tritonclient.grpc import service_pb2 as pb

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
SILENCE_S = 120.0


class Connection(Protocol):
    async def run(self, prompt: str, tokens: int) -> list[float]: ...
    async def close(self) -> None: ...


class WireError(Exception):
    """The server answered with an error, or not at all."""


def sampling(tokens: int) -> str:
    return json.dumps({"max_tokens": tokens, "temperature": 0, "ignore_eos": True})


def packed(text: str) -> bytes:
    """One BYTES element of KServe: a 32-bit length and the text."""
    raw = text.encode()
    return len(raw).to_bytes(4, "little") + raw


class Grpc:
    """One gRPC stream of KServe's ModelStreamInfer."""

    def __init__(self, address: str, model: str) -> None:
        self._model = model
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._call = self._channel.stream_stream(METHOD)()

    @classmethod
    async def open(cls, address: str, model: str) -> Grpc:
        return cls(address, model)

    def _request(self, prompt: str, tokens: int) -> bytes:
        message = pb.ModelInferRequest(model_name=self._model)
        for name, kind, raw in (
            ("text_input", "BYTES", packed(prompt)),
            ("stream", "BOOL", b"\1"),
            ("sampling_parameters", "BYTES", packed(sampling(tokens))),
        ):
            message.inputs.add(name=name, datatype=kind).shape.append(1)
            message.raw_input_contents.append(raw)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        data: bytes = message.SerializeToString()
        return data

    async def run(self, prompt: str, tokens: int) -> list[float]:
        try:
            return await self._run(prompt, tokens)
        except grpc.RpcError as error:
            raise WireError(f"the stream broke: {error.details()}") from error

    async def _run(self, prompt: str, tokens: int) -> list[float]:
        times: list[float] = []
        await self._call.write(self._request(prompt, tokens))
        while True:
            raw = await self._call.read()
            now = time.perf_counter()
            if raw is grpc.aio.EOF:
                raise WireError(f"the stream ended: {await self._call.details()}")
            message = pb.ModelStreamInferResponse.FromString(raw)
            if message.error_message:
                raise WireError(message.error_message)
            if message.infer_response.outputs:
                times.append(now)
            if message.infer_response.parameters["triton_final_response"].bool_param:
                return times

    async def close(self) -> None:
        await self._call.done_writing()
        await self._channel.close()


class Sse(asyncio.Protocol):
    """A keep-alive HTTP/1.1 client that counts the `data: ` events of a chunked answer."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._done: asyncio.Future[None] | None = None
        self._times: list[float] = []
        self._tail = b""
        self._head = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._head = (self._head + data)[:4096]
        joined = self._tail + data
        self._times.extend([now] * joined.count(b"data: "))
        self._tail = joined[-5:]
        if (data.endswith(b"\r\n0\r\n\r\n") or data == b"0\r\n\r\n") and self._done and not self._done.done():
            self._done.set_result(None)
        elif b"content-length:" in self._head[:512].lower() and self._done and not self._done.done():
            # Errors are not chunked.
            self._done.set_exception(WireError(self._head.decode(errors="replace").splitlines()[-1][:300]))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done and not self._done.done():
            self._done.set_exception(WireError(f"connection closed after {self._head[-200:]!r}"))

    async def post(self, path: str, body: dict[str, Any]) -> list[float]:
        self._times, self._tail, self._head = [], b"", b""
        self._done = asyncio.get_running_loop().create_future()
        payload = json.dumps(body).encode()
        self._transport.write(
            b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
            % (path.encode(), len(payload), payload)
        )
        await asyncio.wait_for(self._done, SILENCE_S)
        if b" 200 OK" not in self._head[:64]:
            raise WireError(self._head[:300].decode(errors="replace"))
        return self._times

    def close(self) -> None:
        self._transport.close()


async def _connect(address: str) -> Sse:
    host, _, port = address.rpartition(":")
    _, protocol = await asyncio.get_running_loop().create_connection(Sse, host, int(port))
    return protocol


class TritonHttp:
    """Triton's /generate_stream."""

    def __init__(self, sse: Sse, model: str) -> None:
        self._sse = sse
        self._path = f"/v2/models/{model}/generate_stream"

    @classmethod
    async def open(cls, address: str, model: str) -> TritonHttp:
        return cls(await _connect(address), model)

    async def run(self, prompt: str, tokens: int) -> list[float]:
        body = {"text_input": prompt, "stream": True, "sampling_parameters": sampling(tokens)}
        return await self._sse.post(self._path, body)

    async def close(self) -> None:
        self._sse.close()


class OpenAi:
    """/v1/completions of an OpenAI-compatible server."""

    def __init__(self, sse: Sse, model: str) -> None:
        self._sse = sse
        self._model = model

    @classmethod
    async def open(cls, address: str, model: str) -> OpenAi:
        return cls(await _connect(address), model)

    async def run(self, prompt: str, tokens: int) -> list[float]:
        body = {
            "model": self._model, "prompt": prompt, "stream": True,
            "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        times = await self._sse.post("/v1/completions", body)
        return times[:-1]  # the last event is [DONE]

    async def close(self) -> None:
        self._sse.close()


WIRES: dict[str, type[Grpc] | type[TritonHttp] | type[OpenAi]] = {
    "grpc": Grpc, "http": TritonHttp, "openai": OpenAi,
}  # fmt: skip
