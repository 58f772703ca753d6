"""The first text after a prompt is generated text, wherever the prompt ends."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from voltriton_vllm.detokenizer import primed


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


@pytest.mark.parametrize("text", ["Hi 聪明", "é", "a👩‍🔬b", "plain", "聪" * 20])
def test_joined_text_is_what_the_prompt_does_not_have_at_every_cut(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text).ids
    data = text.encode()
    for cut in range(len(ids)):
        stream = primed(decoders.DecodeStream, tokenizer, ids[:cut], True)
        joined = "".join(stream.step(tokenizer, i) or "" for i in ids[cut:])
        # The character that the cut goes through is completed by generated tokens: it is theirs.
        known = data[:cut].decode(errors="ignore")
        assert joined == text[len(known) :]


def test_no_prompt(tokenizer: Any) -> None:
    stream = primed(decoders.DecodeStream, tokenizer, None, True)
    assert stream.step(tokenizer, tokenizer.encode("a").ids[0]) == "a"
