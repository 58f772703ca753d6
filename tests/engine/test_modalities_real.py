"""Adapters, embeddings and images through a real tritonserver and a real engine; the reference is transformers.

Tiny random models in float32, so that vLLM and transformers agree to the token.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import make_tiny
import openai
import pytest
import torch
import transformers
import voltriton_client as vc
from PIL import Image
from repository import real_repository
from safetensors.torch import save_file
from server import Server
from serving import gateway
from wire_client import WireClient, ask, build

PROMPT = "hello world this is a test"
NEW_TOKENS = 16
# Of the adapters; large enough that each changes the answers.
RANK, ALPHA = 4, 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny.make(tmp_path_factory.mktemp("tiny") / "qwen3", "qwen3")


def generated(server: Server, text: str, **inputs: Any) -> list[int]:
    parameters = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    parameters |= inputs.pop("sampling_parameters", {})
    answer = ask(server.grpc_url, text, return_token_ids=True, sampling_parameters=parameters, **inputs)
    assert answer.error is None, answer.error
    ids: list[int] = answer.last["token_ids"]
    return ids


def reference(model: Any, ids: list[int], **inputs: Any) -> list[int]:
    """Greedy tokens of transformers."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            **inputs,
        )
    return [int(i) for i in out[0, len(ids) :]]


def make_adapter(folder: Path, model: Any, seed: int) -> dict[str, torch.Tensor]:
    """A PEFT adapter on q_proj and down_proj; returns what it adds to each weight, [out, in]."""
    torch.manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    added: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            a = torch.randn(RANK, weight.shape[1]) * 0.1
            b = torch.randn(weight.shape[0], RANK) * 0.1
            tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
            added[name] = b @ a * (ALPHA / RANK)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "down_proj"]}
    config |= {"base_model_name_or_path": "tiny", "bias": "none", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added


def with_adapter(path: Path, added: dict[str, torch.Tensor]) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, change in added.items():
            weights[name] += change
    return model


def test_adapters_on_nvfp4_weights_by_list_and_by_request(tmp_path: Path, tiny: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny / "deq", dtype=torch.float32)
    adapters = {name: make_adapter(tmp_path / "loras" / name, base, seed) for seed, name in enumerate("ab")}
    repository = real_repository(
        tmp_path / "repository",
        tiny / "ct_w4a16",
        {"lora_folder": str(tmp_path / "loras")},
        max_model_len=256,
        dtype="float32",
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        max_num_seqs=1,
        scheduling_policy="priority",
    )
    (repository / "vllm" / "1" / "multi_lora.json").write_text(
        json.dumps({"a": str(tmp_path / "loras" / "a")})
    )
    ids = transformers.AutoTokenizer.from_pretrained(tiny / "deq")(PROMPT).input_ids
    expected = {name: reference(with_adapter(tiny / "deq", added), ids) for name, added in adapters.items()}
    with Server(repository, tmp_path / "log", ready_s=600) as server:
        plain = generated(server, PROMPT)
        assert plain == reference(base, ids)
        assert generated(server, PROMPT, sampling_parameters={"lora_name": "a"}) == expected["a"] != plain
        refused = ask(server.grpc_url, PROMPT, sampling_parameters={"lora_name": "b"})
        assert "LoRA b is not supported, we currently support ['a']" in (refused.error or "")

        loaded = ask(server.grpc_url, lora_request={"load": "b"})
        assert json.loads(loaded.text) == ["a", "b"]
        assert generated(server, PROMPT, sampling_parameters={"lora_name": "b"}) == expected["b"]
        assert expected["b"] not in (plain, expected["a"])
        missing = ask(server.grpc_url, lora_request={"load": "c"})
        assert "'c'" in (missing.error or "")

        ask(server.grpc_url, lora_request={"unload": "b"})
        refused = ask(server.grpc_url, PROMPT, sampling_parameters={"lora_name": "b"})
        assert "LoRA b is not supported" in (refused.error or "")
        assert generated(server, PROMPT) == plain
        check_priorities(server)


def check_priorities(server: Server) -> None:
    """One sequence at a time: of those that wait, the lowest number goes first, whoever came first."""
    parameters = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}
    requests = [
        build(PROMPT, id=str(i), priority=priority, return_timing=True, sampling_parameters=parameters)
        for i, priority in enumerate((0, 9, 5, 1))
    ]
    with WireClient(server.grpc_url) as client:
        answers = client.answers(*requests)
    waited = [json.loads(answers[str(i)].last["timing"][0])["queue_ms"] for i in range(4)]
    assert waited[3] < waited[2] < waited[1]


def test_embeddings_are_those_of_transformers(tmp_path: Path, tiny: Path) -> None:
    repository = real_repository(
        tmp_path / "repository",
        tiny / "ct_w4a16",
        max_model_len=256,
        dtype="float32",
        runner="pooling",
        convert="embed",
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny / "deq", dtype=torch.float32).model
    ids = transformers.AutoTokenizer.from_pretrained(tiny / "deq")(PROMPT).input_ids
    with torch.no_grad():
        last = model(torch.tensor([ids])).last_hidden_state[0, -1]
    expected = last / last.norm()
    with Server(repository, tmp_path / "log", ready_s=600) as server:
        for source in (PROMPT, ids):
            answer = ask(server.grpc_url, embedding_request={"input": source}, return_num_input_tokens=True)
            assert answer.error is None, answer.error
            assert torch.allclose(torch.tensor(json.loads(answer.text)), expected, atol=1e-4)
            assert answer.last["num_input_tokens"] == [len(ids)]
        refused = ask(server.grpc_url, PROMPT)
        assert "embed" in (refused.error or "")
        assert ask(server.grpc_url, embedding_request={"input": ""}).error
        with vc.Client(server.grpc_url) as client:
            assert torch.allclose(torch.tensor(client.embed(PROMPT)), expected, atol=1e-4)
        with (
            gateway(server.grpc_url) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
        ):
            # The package asks for base64 by itself.
            made = client.embeddings.create(model="vllm", input=[PROMPT, PROMPT])
            assert all(torch.allclose(torch.tensor(e.embedding), expected, atol=1e-4) for e in made.data)
            assert len(made.data) == 2 and made.usage.prompt_tokens == 2 * len(ids)
            with pytest.raises(openai.BadRequestError, match="embed"):
                client.chat.completions.create(model="vllm", messages=[{"role": "user", "content": "x"}])


def make_vision_model(folder: Path, tokenizer_from: Path) -> tuple[Any, Any]:
    """Idefics3 (what SmolVLM is): one of the families that vLLM runs without torchvision."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_from)
    marks = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {
        "vocab_size": 520, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.08, "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.Idefics3Config(
        vision_config=vision | {"image_size": 56, "patch_size": 14},
        text_config=transformers.LlamaConfig(**text),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
    )
    model = transformers.Idefics3ForConditionalGeneration(config).float().eval()
    model.save_pretrained(folder)
    pictures = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 56}, do_image_splitting=False
    )
    processor = transformers.Idefics3Processor(pictures, tokenizer, image_seq_len=4)
    processor.save_pretrained(folder)
    return model, processor


def picture(color: tuple[int, int, int]) -> Image.Image:
    image = Image.new("RGB", (40, 32), color)
    image.paste((255, 255, 255), (5, 5, 20, 20))
    return image


def encoded(image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def test_images_reach_the_model(tmp_path: Path, tiny: Path) -> None:
    model, processor = make_vision_model(tmp_path / "vision", tiny / "deq")
    repository = real_repository(
        tmp_path / "repository", tmp_path / "vision", max_model_len=256, dtype="float32"
    )
    text = "hello <image> world"
    expected = []
    for color in ((255, 0, 0), (0, 0, 200)):
        inputs = processor(images=picture(color), text=text, return_tensors="pt")
        expected.append(reference(model, inputs.input_ids[0].tolist(), pixel_values=inputs.pixel_values))
    assert expected[0] != expected[1]
    with Server(repository, tmp_path / "log", ready_s=600) as server:
        for color, ids in zip(((255, 0, 0), (0, 0, 200)), expected, strict=True):
            assert generated(server, text, image=[encoded(picture(color))]) == ids
        for bad in ("not base64!", base64.b64encode(b"no picture").decode()):
            refused = ask(server.grpc_url, text, image=[bad])
            assert "image[0]: not a base64 image" in (refused.error or "")
        refused = ask(server.grpc_url, "no placeholder", image=[encoded(picture((0, 0, 0)))])
        assert "INVALID_ARGUMENT: image: got 1, and the prompt must hold" in (refused.error or "")
        assert generated(server, text, image=[encoded(picture((255, 0, 0)))]) == expected[0]
