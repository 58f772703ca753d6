"""Streaming text after a prompt that ends inside a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

REPLACEMENT = "\ufffd"
# UTF-8 has at most four bytes a character, so at most three tokens are an unfinished end.
MOST_UNFINISHED = 3


def primed(
    make_stream: Callable[..., Any],
    tokenizer: Any,
    prompt_ids: Sequence[int] | None,
    skip_special_tokens: bool,
) -> Any:
    """A DecodeStream whose first step gives generated text only.

    `tokenizers` takes the decoded prompt as known text only where it ends with a whole character; otherwise its
    first step repeats the whole prompt. So it is given the prompt up to the last whole character, and walks over the
    rest: the character that the first generated token completes is then the first text.
    """
    ids = list(prompt_ids or ())
    unfinished = 0
    while unfinished < min(MOST_UNFINISHED, len(ids)) and _ends_inside(
        tokenizer, ids[: len(ids) - unfinished]
    ):
        unfinished += 1
    if unfinished and _ends_inside(tokenizer, ids[: len(ids) - unfinished]):
        # Not an unfinished character but a token that decodes to the replacement character itself.
        unfinished = 0
    stream = make_stream(ids=ids[: len(ids) - unfinished], skip_special_tokens=skip_special_tokens)
    for token_id in ids[len(ids) - unfinished :]:
        stream.step(tokenizer, token_id)
    return stream


def _ends_inside(tokenizer: Any, ids: list[int]) -> bool:
    # The last few tokens decide; decoding a long prompt whole would cost more than the prefix is worth.
    tail: str = tokenizer.decode(ids[-8:], skip_special_tokens=False)
    return tail.endswith(REPLACEMENT)
