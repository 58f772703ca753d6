"""Other people's tools against the gateway: the client litellm, and schemathesis with the OpenAPI document.

They live in a folder of their own, for they would bring much into the product's environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from kserve import FakeServer
from serving import gateway

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(os.environ.get("VOLTRITON_CLIENT_TOOLS", ROOT / ".voltriton" / "client-tools"))
INSTALL = f"pip install --target {TOOLS} litellm schemathesis"


def need(package: str) -> None:
    if not (TOOLS / package).is_dir():
        pytest.skip(f"{package} is not there: {INSTALL}")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with FakeServer() as server, gateway(server.address) as url:
        yield url


def run(*argv: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(TOOLS), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout_s)


LITELLM = """
import json, sys
import litellm
litellm.telemetry = False
options = {"api_base": sys.argv[1] + "/v1", "api_key": "any", "num_retries": 0}
user = lambda text: [{"role": "user", "content": text}]
tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
model = "openai/vllm"
whole = litellm.completion(model, user("hello you"), temperature=0, max_tokens=5, **options)
stream = list(litellm.completion(model, user("a b c"), stream=True, stream_options={"include_usage": True}, **options))
tool = litellm.completion(model, user("!tool"), tools=tools, **options)
think = litellm.completion(model, user("!think"), **options)
text = litellm.text_completion(model="text-completion-openai/vllm", prompt="x y", max_tokens=5, **options)
vectors = litellm.embedding(model, input=["abc"], encoding_format="float", **options)
found = {}
for name, prompt in {"bad": "!error INVALID_ARGUMENT top_p: got 2", "full": "!error UNAVAILABLE full"}.items():
    try:
        litellm.completion(model, user(prompt), max_retries=0, **options)
    except Exception as error:
        found[name] = [type(error).__name__, error.status_code]
print(json.dumps({
    "whole": [whole.choices[0].message.content, whole.usage.completion_tokens],
    "stream": "".join(event.choices[0].delta.content or "" for event in stream if event.choices),
    "usage": [event.usage.completion_tokens for event in stream if getattr(event, "usage", None)],
    "tool": tool.choices[0].message.tool_calls[0].function.arguments,
    "think": think.choices[0].message.reasoning_content,
    "text": text.choices[0].text,
    "vector": vectors.data[0]["embedding"],
    **found,
}))
"""


def test_litellm(url: str) -> None:
    need("litellm")
    done = run(sys.executable, "-c", LITELLM, url)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "whole": ["hello you", 2],
        "stream": "a b c",
        "usage": [3],
        "tool": '{"city": "Bern"}',
        "think": "Two and two. ",
        "text": "x y",
        "vector": [3, 0.5, -0.25],
        "bad": ["BadRequestError", 400],
        "full": ["ServiceUnavailableError", 503],
    }


def test_schemathesis(url: str, tmp_path: Path) -> None:
    """Made-up requests, right and wrong: no server error, and only answers that the document promises."""
    need("schemathesis")
    document = httpx.get(f"{url}/openapi.json").json()
    for name in ("ChatRequest", "CompletionRequest", "EmbeddingRequest"):
        # Else nearly all requests would end at an unknown model.
        document["components"]["schemas"][name]["properties"]["model"] = {"type": "string", "enum": ["vllm"]}
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
        "response_schema_conformance,negative_data_rejection,unsupported_method"
    )
    done = run(
        sys.executable, "-m", "schemathesis.cli", "run", str(tmp_path / "openapi.json"), "--url", url,
        "--checks", checks, "--max-examples", "12", "--seed", "7", "--no-color", "--phases", "examples,coverage,fuzzing",
        timeout_s=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    assert "5 selected" in done.stdout or "5 tested" in done.stdout, done.stdout[-3000:]
