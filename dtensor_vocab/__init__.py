"""Per-token ops on logits that stay sharded over the vocabulary as DTensors."""

from dtensor_vocab.ops.logprobs import logprobs

__all__ = ["logprobs"]
