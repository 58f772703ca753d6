"""Prompts of an exact number of tokens, by the model's own tokenizer: English, Chinese or mixed, with a shared prefix.

The texts are random sequences of common words, so they compress as ordinary text does and no two are alike; the
tokenizer is a local one (`tokenizer.json`), or the server itself (`render_only`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2_grpc
from voltriton_client.channel import Target
from voltriton_client.errors import from_rpc
from voltriton_client.request import Request, to_grpc
from voltriton_client.response import ResponseReader
from voltriton_client.tensors import pack

Count = Callable[[str], int]
COUNT_S = 60.0
# After so many repetitions in a row there are taken to be no more texts of the length.
MOST_REPEATED = 20

ENGLISH = (
    "the of and to in a is that for it was on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know river stone light"
)
CHINESE = (
    "我们 今天 学习 机器 模型 数据 城市 天气 问题 方法 时间 工作 生活 学校 老师 "
    "朋友 世界 历史 文化 科学 技术 经济 社会 发展 研究 系统 信息 网络 计算 语言 "
    "文字 图书 音乐 电影 运动 健康 食物 水果 春天 夏天 秋天 冬天 早上 晚上 山水 "
    "河流 森林 海洋 喜欢 需要 可以 应该 知道 认为 开始 继续 完成 提高 解决 使用 "
    "介绍 说明 因为 所以 但是 如果 虽然 而且"
)
# Small pieces, tried one after another when a text is a few tokens short.
FILLERS = (" a", " the", ".", " one", "。", "的", " 1", "\n", " x", "!", " of", " word", ",")
LANGUAGES = {"en": (ENGLISH.split(), " "), "zh": (CHINESE.split(), "")}


class InputError(Exception):
    """Prompts as asked for cannot be made: one line."""


@dataclass(frozen=True)
class Shape:
    """What the prompts are to be like."""

    tokens: int
    language: str = "en"
    # Part of the tokens, 0..1, that is the same in all prompts.
    shared: float = 0.0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InputError(f"prompt tokens: got {self.tokens}, allowed: 1 or more")
        if self.language not in (*LANGUAGES, "mixed"):
            raise InputError(f"language: got {self.language!r}, allowed: {', '.join(LANGUAGES)}, mixed")
        if not 0 <= self.shared <= 1:
            raise InputError(f"shared prefix: got {self.shared}, allowed: 0 to 1")


def local_counter(path: Path) -> Count:
    """Counts by a `tokenizer.json`, special tokens included. InputError where it cannot be read."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError("--tokenizer needs the package tokenizers: pip install tokenizers") from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{file}: no tokenizer: {error}") from None
    return lambda text: len(tokenizer.encode(text).ids)


def server_counter(address: str, model: str) -> Count:
    """Counts by the model that is served; each count is a short request that generates nothing."""
    stub = service_pb2_grpc.GRPCInferenceServiceStub(Target(address).open())

    def count(text: str) -> int:
        request = Request(model=model, prompt=text, stream=False, want=frozenset({"num_output_tokens"}))
        message = to_grpc(request)
        message.inputs.add(name="render_only", datatype="BOOL", shape=[1])
        message.raw_input_contents.append(pack("BOOL", [True]))
        reader = ResponseReader(request.request_id)
        tokens = 0
        try:
            for response in stub.ModelStreamInfer(iter([message]), timeout=COUNT_S, wait_for_ready=True):
                tokens += sum(chunk.num_tokens for chunk in reader.feed(response))
        except grpc.RpcError as error:
            raise from_rpc(error.code().name, error.details() or "", address) from error
        return tokens

    return count


def make_prompts(shape: Shape, number: int, seed: int, count: Count) -> list[str]:
    """`number` different prompts of exactly `shape.tokens` tokens. InputError where the tokenizer allows none."""
    rng = random.Random(f"{seed}/{shape}")
    words, joint = _vocabulary(shape.language, rng)
    prefix = ""
    if shape.shared > 0:
        prefix = (
            _exact("", max(1, round(shape.tokens * shape.shared)), rng, words, joint, count).text() + joint
        )
        if shape.shared == 1:
            return [prefix.removesuffix(joint) if joint else prefix] * number
    prompts: dict[str, None] = {}
    pattern = _exact(prefix, shape.tokens, rng, words, joint, count)
    repeated = 0
    while len(prompts) < number and repeated < MOST_REPEATED:
        # The same words in another order mostly have as many tokens: one count instead of a search.
        text = pattern.shuffled(rng).text()
        if text in prompts or count(text) != shape.tokens:
            pattern = _exact(prefix, shape.tokens, rng, words, joint, count)
            text = pattern.text()
        repeated = repeated + 1 if text in prompts else 0
        prompts[text] = None
    # Few tokens allow few texts: then these come again.
    return list(itertools.islice(itertools.cycle(prompts), number))


@dataclass(frozen=True)
class _Pattern:
    """A prompt in parts."""

    prefix: str
    words: tuple[str, ...]
    joint: str
    tail: str = ""

    def text(self) -> str:
        return self.prefix + self.joint.join(self.words) + self.tail

    def shuffled(self, rng: random.Random) -> _Pattern:
        return replace(self, words=tuple(rng.sample(self.words, len(self.words))))


def _vocabulary(language: str, rng: random.Random) -> tuple[list[str], str]:
    if language != "mixed":
        return LANGUAGES[language]
    words = [*LANGUAGES["en"][0], *LANGUAGES["zh"][0]]
    rng.shuffle(words)
    return words, " "


def _exact(
    prefix: str, tokens: int, rng: random.Random, words: list[str], joint: str, count: Count
) -> _Pattern:
    least = count(prefix.rstrip() + joint + words[0]) if prefix else count(words[0])
    if least > tokens:
        raise InputError(f"no prompt has as few as {tokens} tokens here: one word alone is {least}")
    for _ in range(8):
        drawn = [rng.choice(words) for _ in range(tokens)]
        pattern = _Pattern(prefix, tuple(_longest(prefix, drawn, joint, tokens, count)), joint)
        text = pattern.text()
        if (filled := _filled(text, tokens, count)) is not None:
            return replace(pattern, tail=filled.removeprefix(text))
    raise InputError(f"no prompt of exactly {tokens} tokens was found; ask for another length")


def _longest(prefix: str, drawn: list[str], joint: str, tokens: int, count: Count) -> list[str]:
    """As many of the words as stay within the tokens, behind the prefix."""
    low, high = 0, len(drawn)
    while low < high:
        middle = (low + high + 1) // 2
        if count(prefix + joint.join(drawn[:middle])) <= tokens:
            low = middle
        else:
            high = middle - 1
    return drawn[:low]


def _filled(text: str, tokens: int, count: Count) -> str | None:
    missing = tokens - count(text)
    for _ in range(64):
        if missing == 0:
            return text
        for filler in FILLERS:
            left = tokens - count(text + filler)
            if 0 <= left < missing:
                text, missing = text + filler, left
                break
        else:
            return None
    return None
