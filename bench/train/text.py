"""Real text that comes with Python, as word ids: the topics of ``help()``."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import Tensor

__all__ = ["UNKNOWN", "text_ids", "text_words", "windows"]

UNKNOWN = 0
"""The id of every word that is too rare to be in the vocabulary."""


@functools.cache
def text_words() -> list[str]:
    """Words and punctuation of the text."""
    return re.findall(r"\w+|[^\w\s]", "\n".join(topics[topic] for topic in sorted(topics)))


def text_ids(vocab: int) -> Tensor:
    """The text as ids below ``vocab``: the most frequent words and punctuation from 1 on."""
    counts = Counter(text_words())
    if len(counts) < vocab:
        raise ValueError(
            f"text_ids: expected a vocabulary of at most {len(counts)} words, got {vocab}"
        )
    ids = {word: i for i, (word, _) in enumerate(counts.most_common(vocab - 1), start=1)}
    return torch.tensor([ids.get(word, UNKNOWN) for word in text_words()])


def windows(text: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """``rows`` random pieces of the text, ``[rows, length]``."""
    starts = torch.randint(len(text) - length + 1, (rows, 1), generator=generator)
    return text[starts + torch.arange(length)]
