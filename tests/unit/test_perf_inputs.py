from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from voltriton_perf import inputs
from voltriton_perf.inputs import InputError, Shape, make_prompts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE as real models have it: words are several tokens, Chinese characters are cut."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([inputs.ENGLISH[:200], inputs.CHINESE[:80]], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.mark.parametrize("language", ["en", "zh", "mixed"])
@pytest.mark.parametrize("tokens", [8, 100, 1000])
def test_exactly_so_many_tokens(tokenizer: Path, language: str, tokens: int) -> None:
    count = inputs.local_counter(tokenizer.parent)
    prompts = make_prompts(Shape(tokens, language), 3, seed=1, count=count)
    assert [count(p) for p in prompts] == [tokens] * 3
    assert len(set(prompts)) == 3


def test_languages_are_what_they_say(tokenizer: Path) -> None:
    count = inputs.local_counter(tokenizer)
    english, chinese = (make_prompts(Shape(300, name), 1, 1, count)[0] for name in ("en", "zh"))
    assert not re.search(r"[\u4e00-\u9fff]", english[:-4])
    assert len(re.findall(r"[\u4e00-\u9fff]", chinese)) > 0.9 * len(chinese) - 4


def test_a_shared_prefix_is_shared_and_the_rest_is_not(tokenizer: Path) -> None:
    count = inputs.local_counter(tokenizer)
    a, b = make_prompts(Shape(200, "en", shared=0.5), 2, 1, count)
    common = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    assert 0.4 <= count(a[:common]) / 200 <= 0.6
    whole = make_prompts(Shape(50, "en", shared=1.0), 3, 1, count)
    assert len(set(whole)) == 1 and count(whole[0]) == 50


def test_the_same_seed_gives_the_same_prompts(tokenizer: Path) -> None:
    count = inputs.local_counter(tokenizer)
    once, again, other = (make_prompts(Shape(40), 2, seed, count) for seed in (1, 1, 2))
    assert once == again != other


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((0,), "got 0, allowed: 1 or more"),
        ((5, "fr"), "got 'fr'"),
        ((5, "en", 1.5), "got 1.5, allowed: 0 to 1"),
    ],
)
def test_shapes_that_cannot_be(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Shape(*arguments)  # type: ignore[arg-type]


def test_fewer_tokens_than_a_word_has() -> None:
    with pytest.raises(InputError, match="one word alone is 5"):
        make_prompts(Shape(3), 1, 1, count=lambda text: 5 * len(text.split()))


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tokenizer"):
        inputs.local_counter(tmp_path)


def test_few_possible_texts_come_again() -> None:
    def count(text: str) -> int:
        return 1 if text in ("river", "stone") else 2 * len(text.split())

    # "one word alone" is asked of the first word of the vocabulary, which has two tokens here.
    with pytest.raises(InputError):
        make_prompts(Shape(1), 5, 1, count)
    prompts = make_prompts(Shape(1), 150, 1, count=lambda text: len(text.split()))
    assert len(prompts) == 150 and len(set(prompts)) < 150


def test_counting_is_asked_seldom(tokenizer: Path) -> None:
    """Each count of a served model is a round trip."""
    asked = []
    inner = inputs.local_counter(tokenizer)
    prompts = make_prompts(Shape(64), 50, 1, lambda text: asked.append(text) or inner(text))  # type: ignore[func-returns-value]
    assert len(set(prompts)) == 50
    assert len(asked) < 50 * 8
