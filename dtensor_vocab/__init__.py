"""Per-token ops on logits that stay sharded over the vocabulary as PyTorch DTensors."""

from dtensor_vocab.linear_logits import LinearLogits
from dtensor_vocab.local_shards import logits_from_local
from dtensor_vocab.ops.argmax import argmax
from dtensor_vocab.ops.cross_entropy import cross_entropy
from dtensor_vocab.ops.entropy import entropy
from dtensor_vocab.ops.js_div import js_div
from dtensor_vocab.ops.kl_div import kl_div
from dtensor_vocab.ops.logprobs import logprobs
from dtensor_vocab.ops.logprobs_and_entropy import logprobs_and_entropy
from dtensor_vocab.ops.sample import sample
from dtensor_vocab.ops.topk_kl_div import topk_kl_div
from dtensor_vocab.ops.topk_logprobs import topk_logprobs

__all__ = [
    "LinearLogits",
    "argmax",
    "cross_entropy",
    "entropy",
    "js_div",
    "kl_div",
    "logits_from_local",
    "logprobs",
    "logprobs_and_entropy",
    "sample",
    "topk_kl_div",
    "topk_logprobs",
]
__version__ = "0.1.0"
