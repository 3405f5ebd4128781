"""Declares an operator of a shard's statistics, on logits and on ``LinearLogits``."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtensor_vocab._private import overload
from dtensor_vocab.faults import coverage_of_shard
from dtensor_vocab.kernel import merge_kernel
from dtensor_vocab.layout import first_column
from dtensor_vocab.linear_blocks import Blocks, LocalLogits
from dtensor_vocab.linear_logits import LinearLogits, separate
from dtensor_vocab.operators import linear_arguments, linear_signature, operator, with_signature

__all__ = ["StatsOperator", "stats_operator"]


def stats_operator(
    signature: str, combine: Callable[..., Sequence[Tensor]], covered: int | None
) -> Callable[[Callable[..., Tensor]], StatsOperator]:
    """Registers ``fn(logits.., rows.., vocab_start, sizes, *options) -> stats [1, *, S]`` as an
    operator, and as ``<name>_linear`` its twin on ``LinearLogits``. The last option may be
    ``softcap``.

    The twin calls ``fn`` for blocks of columns and merges their statistics by
    ``combine(stats [rows, blocks, S], temperature, *options)``, which takes no ``softcap``, runs
    inside a kernel and returns columns ``[rows]`` and ``[rows, K]`` of the result ``[rows, S]``.
    ``covered`` is the position of the coverage among them, None if there is none.
    """

    def register(fn: Callable[..., Tensor]) -> StatsOperator:
        return StatsOperator(fn, signature, combine, covered)

    return register


class StatsOperator:
    """An operator of statistics. A call takes ``LinearLogits`` where the operator takes logits."""

    def __init__(
        self,
        fn: Callable[..., Tensor],
        signature: str,
        combine: Callable[..., Sequence[Tensor]],
        covered: int | None,
    ) -> None:
        parameters = inspect.signature(fn, eval_str=True).parameters
        args = {name: parameter.annotation for name, parameter in parameters.items()}
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        roles = re.findall(r"\w+", signature.split("->")[0])
        self._fn = fn
        self._logits, self._tensors = roles.count("logits"), len(roles)
        self._options = len(args) - len(roles) - 1 - ("softcap" in args)
        self._temperature = [*args].index("temperature") if "temperature" in args else None
        self._combine = _combine_kernel(combine, covered)
        names = [*args][: self._logits]
        twin = with_signature(
            self._by_blocks,
            f"{fn.__name__}_linear",
            linear_arguments(args, names),
            Tensor,
            defaults,
        )
        self.op = operator(signature)(fn)
        self.linear_op = operator(linear_signature(signature))(twin)
        self._overload, self._linear_overload = overload(self.op), overload(self.linear_op)

    def register_fake(self, fake: Callable[..., Tensor]) -> None:
        def fake_linear(*args: Any) -> Tensor:
            sides, args = self._sides(args)
            logits = [side.x.new_empty((*side.lead, side.columns)) for side in sides]
            return fake(*logits, *args)

        self.op.register_fake(fake)
        self.linear_op.register_fake(fake_linear)

    def __call__(self, *args: Any) -> Tensor:
        logits, args = args[: self._logits], args[self._logits :]
        if not any(isinstance(x, LinearLogits) for x in logits):
            return self._overload(*logits, *args)
        return self._linear_overload(*itertools.chain(*map(separate, logits)), *args)

    def _sides(self, args: tuple[Any, ...]) -> tuple[list[LocalLogits], tuple[Any, ...]]:
        """Splits the arguments of the twin into logits and all others."""
        end = 3 * self._logits
        return [LocalLogits(*args[i : i + 3]) for i in range(0, end, 3)], args[end:]

    def _by_blocks(self, *args: Any) -> Tensor:
        sides, args = self._sides(args)
        tensors = self._tensors - self._logits
        (*rows, vocab_start), (sizes, *options) = args[:tensors], args[tensors:]
        lead, columns = sides[0].lead, sides[0].columns
        blocks = Blocks(sides, vocab_start, len(sides))
        if blocks.is_empty or any(side.columns != columns or not side.fits for side in sides):
            # Where shards do not fit, logits of another width make every rank raise.
            widths = [side.columns + (not side.fits) for side in sides]
            shapes = [(*lead, width) for width in widths]
            logits = [x.x.new_zeros(()).expand(s) for x, s in zip(sides, shapes, strict=True)]
            return self._fn(*logits, *args)
        results: list[Tensor] = []
        for at in blocks:
            logits = [side.block(at) for side in sides]
            values = blocks.of_rows(at, *rows)
            # A block has not the width of the shard. The combination corrects its coverage.
            results.append(self._fn(*logits, *values, at.start, sizes, *options)[0])
            if blocks.by_columns and len(results) == 2:
                temperature = self._temperature_of(values)
                shard = first_column(vocab_start), columns, tuple(sizes)
                of_merge = options[: self._options]
                results = [self._combine(*results, temperature, *shard, *of_merge)]
        stats = torch.cat(results) if len(results) > 1 else results[0]
        return stats.view(1, *lead, stats.shape[-1])

    def _temperature_of(self, values: list[Tensor | None]) -> Tensor | None:
        if self._temperature is None:
            return None
        temperature = values[self._temperature - self._logits]
        if temperature is None or temperature.dim() == 0:
            return temperature
        return temperature.unsqueeze(-1)


def _combine_kernel(
    combine: Callable[..., Sequence[Tensor]], covered: int | None
) -> Callable[..., Tensor]:
    def combine_blocks(a, b, temperature, start, width, sizes, *options):
        # Select instead of stacking, which would be a kernel of its own on GPUs.
        first = torch.arange(2, device=a.device).unsqueeze(-1) == 0
        stats = torch.where(first, a.unsqueeze(1), b.unsqueeze(1))
        columns = list(combine(stats, temperature, *options))
        if covered is not None:
            columns[covered] = coverage_of_shard(columns[covered], start, width, sizes)
        return torch.cat([x.unsqueeze(-1) if x.dim() == 1 else x for x in columns], -1)

    return merge_kernel(combine_blocks)
