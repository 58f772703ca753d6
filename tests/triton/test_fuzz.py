"""The request contract under random requests: never a crash, never INTERNAL, and a refusal names its field.

`FUZZ_REQUESTS` says how many (10,000 for issue 4); `make test` sends a few hundred.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from server import Server, fake_repository
from voltriton.host.sampling import CHECKS, NOT_OFFERED
from voltriton.stub.contract import INPUTS
from wire_client import WireClient, build

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "400"))
# At once on the stream: what is odd in one must not touch the others.
BATCH = 20

texts = st.one_of(
    st.text(max_size=30),
    st.binary(max_size=20),
    st.sampled_from(
        ["", "a b", " ", "\u0000", "[]", "{}", "null", "NaN", '{"a":', '"\\ud800"', "[" * 200, "1e999"]
    ),
)
values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10),
        st.sampled_from([0, 1, -1, 2**31, 2**63, 1e308, 0.5, "1", "true", "false", "0.5", "", "nan", [], {}]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
known = st.sampled_from([*CHECKS, *NOT_OFFERED])
valid = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 4), "max_tokens": st.integers(1, 9999), "temperature": st.floats(0, 2), "logprobs": st.integers(0, 5),
        "stop": st.lists(st.text("ab", min_size=1), max_size=2), "top_k": st.integers(-1, 50).filter(bool),
        "seed": st.integers(-(2**63), 2**63 - 1), "ignore_eos": st.sampled_from([True, False, "true", "false"]),
    },
)  # fmt: skip
sampling = st.one_of(
    texts,
    valid.map(json.dumps),
    valid.map(json.dumps),
    st.dictionaries(st.one_of(known, known, known, st.text(max_size=8)), values, max_size=3).map(json.dumps),
)
messages = st.one_of(
    texts,
    st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), values, max_size=3), max_size=2).map(
        json.dumps
    ),
    st.dictionaries(
        st.sampled_from(["messages", "tools", "tool_choice", "chat_template_kwargs", "documents", "x"]),
        values,
        max_size=3,
    ).map(json.dumps),
    st.just('[{"role": "user", "content": "hi"}]'),
)
objects = st.one_of(
    texts,
    st.dictionaries(st.sampled_from(["input", "pooling_params", "x"]), values, max_size=2).map(json.dumps),
)
int32, int64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "sampling_parameters": sampling,
    "messages": messages,
    "embedding_request": objects,
    "prompts": st.lists(st.text(max_size=10), min_size=1, max_size=3),
    "image": st.lists(st.text(max_size=10), min_size=1, max_size=3),
    "input_ids": st.lists(st.one_of(st.integers(0, 999), int64), min_size=1, max_size=5),
    "text_input": texts,
    "request_id": texts,
}
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "TYPE_BOOL": st.booleans(), "TYPE_INT32": st.one_of(st.integers(-1, 5000), int32), "TYPE_STRING": texts,
}  # fmt: skip
STRATEGIES = {
    tensor.name: SPECIAL[tensor.name] if tensor.name in SPECIAL else BY_TYPE[tensor.type] for tensor in INPUTS
}
PROMPTS = ("text_input", "input_ids", "messages", "prompts", "embedding_request")
parameters = st.dictionaries(
    st.one_of(
        known,
        st.just("priority_x"),
        st.text("abcxyz_", min_size=1, max_size=8),
    ),
    st.one_of(st.booleans(), int64, st.floats(allow_nan=False), st.text(max_size=8)),
    max_size=2,
)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly with one prompt, so that what is odd is met where it matters; up to four further tensors."""
    names = {draw(st.sampled_from(PROMPTS))} if draw(st.integers(0, 9)) else set()
    names |= draw(st.sets(st.sampled_from([name for name in STRATEGIES if name not in PROMPTS]), max_size=4))
    if not draw(st.integers(0, 9)):
        names.add(draw(st.sampled_from(PROMPTS)))
    inputs = {name: draw(STRATEGIES[name]) for name in sorted(names)}
    inputs["parameters"] = {} if draw(st.booleans()) else draw(parameters)
    return inputs


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fuzz")
    repository = fake_repository(folder / "repository", {"max_request_s": 20}, enable_lora=True)
    (repository / "vllm" / "1" / "multi_lora.json").write_text('{"a": "/loras/a"}')
    options = ("--model-control-mode=explicit", "--load-model=vllm")
    with Server(repository, folder / "log", *options) as server:
        yield server


def test_random_requests(fuzzed: Server) -> None:
    stub, host = fuzzed.stub_pid(), fuzzed.host_pid()
    counts = {"answered": 0, "refused": 0}

    @settings(
        max_examples=max(1, REQUESTS // BATCH),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        # Shrinking would send thousands of requests more; the odd request is in the assertion's message.
        phases=(Phase.generate,),
    )
    @given(st.lists(requests(), min_size=BATCH, max_size=BATCH))
    def run(batch: list[dict[str, Any]]) -> None:
        with WireClient(fuzzed.grpc_url) as client:
            answers = client.answers(*[build(id=str(i), **inputs) for i, inputs in enumerate(batch)])
        for i, inputs in enumerate(batch):
            answer = answers[str(i)]
            assert answer.finals == 1, inputs
            check(answer.error, inputs)
            counts["refused" if answer.error else "answered"] += 1

    run()
    print(counts)
    assert (fuzzed.stub_pid(), fuzzed.host_pid()) == (stub, host)
    assert min(counts.values()) > REQUESTS // 20
    assert "Traceback" not in fuzzed.log_text()


def check(error: str | None, inputs: dict[str, Any]) -> None:
    """Refused as the request's fault, and by the name of a field that it has, or that it lacks."""
    if error is None:
        return
    if error.startswith("DEADLINE_EXCEEDED: "):
        assert "timeout_ms" in inputs
        return
    assert error.startswith("INVALID_ARGUMENT: "), (error, inputs)
    fields = [*inputs, *inputs["parameters"], *PROMPTS, "prompt", "request parameters"]
    assert any(field in error for field in fields), (error, inputs)
