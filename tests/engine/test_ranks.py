"""Tensor parallelism through a real tritonserver: a tiny random Qwen3 in NVFP4, TP1 against TP2."""

from __future__ import annotations

from pathlib import Path

import make_tiny
import pytest
from repository import real_repository
from server import Server, shm_files, wait_for
from voltriton.processes import alive, shared_memory
from voltriton.triton import default_root
from wire_client import Answer, WireClient, build

PROMPTS = ["hello world", "this is a test of the tokenizer", "a b c d e f g", "zebra 12345 ?"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny.make(tmp_path_factory.mktemp("tiny") / "qwen3", "qwen3")


def greedy(folder: Path, model: Path, ranks: int, prompts: list[str] = PROMPTS) -> list[list[int]]:
    repository = real_repository(folder / f"tp{ranks}", model, tensor_parallel_size=ranks, max_model_len=256)
    with Server(repository, folder / f"log{ranks}", ready_s=1200) as server:
        requests = [
            build(
                text,
                id=str(i),
                return_token_ids=True,
                sampling_parameters={"temperature": 0, "max_tokens": 24, "ignore_eos": True},
            )
            for i, text in enumerate(prompts)
        ]
        with WireClient(server.grpc_url) as client:
            answers: dict[str, Answer] = client.answers(*requests)
        below = server.children()
        files = shared_memory(below)
        assert files
    wait_for(lambda: not any(map(alive, below)), 30, "all processes to be gone")
    assert not files & shm_files()
    return [answers[str(i)].last["token_ids"] for i in range(len(prompts))]


def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, tiny: Path) -> None:
    one = greedy(tmp_path, tiny / "ct_w4a16", 1)
    assert [len(ids) for ids in one] == [24] * 4
    assert greedy(tmp_path, tiny / "ct_w4a16", 2) == one


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_four_ranks_of_a_real_qwen_with_chinese_prompts(tmp_path: Path) -> None:
    """12 heads, 2 of them for keys and values, so ranks share those: a rank of four has 3 and a copy of one."""
    model = default_root() / "models" / "qwen1.5b-nvfp4"
    if not model.exists():
        pytest.skip(f"{model} is not there: voltriton fetch qwen1.5b --link qwen1.5b")
    prompts = ["用“聪明”造一个句子：", "北京是中国的首都，", "def quicksort(items):", "写一首关于春天的诗。"]
    one = greedy(tmp_path, model, 1, prompts)
    assert [len(ids) for ids in one] == [24] * 4
    assert greedy(tmp_path, model, 4, prompts) == one


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_four_ranks_give_the_tokens_of_one(tmp_path: Path, tiny: Path) -> None:
    assert greedy(tmp_path, tiny / "ct_w4a16", 4) == greedy(tmp_path, tiny / "ct_w4a16", 1)
