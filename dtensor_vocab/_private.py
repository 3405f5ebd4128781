"""Every private name of torch that this package uses, in one place.

``register_sharding``, the public way to give an operator a DTensor strategy, refuses shards of
size zero: with fewer columns than ranks it gathers the logits without a word. The registry
below it takes placements as they are given, on torch 2.11 to 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch._dynamo
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "CompileError",
    "DTensorSpec",
    "assert_async",
    "compile_is_disabled",
    "in_func_transform",
    "non_view",
    "register_placements",
    "tensor_arguments",
]


def assert_async(condition: Tensor, message: str) -> None:
    """Raises where ``condition`` (0-d) is false: on a GPU later, without the host waiting."""
    torch._assert_async(condition, message)


CompileError = torch._dynamo.exc.TorchDynamoException
"""What ``torch.compile(fullgraph=True)`` raises when it can't make a kernel."""

Placements = Sequence[tuple[Placement, ...] | None]
PlacementRule = Callable[
    [Sequence[DTensorSpec | None]], tuple[Placements, Sequence[tuple[Placement, ...]]]
]


def tensor_arguments(op: torch.library.CustomOpDef) -> list[bool]:
    """Which arguments of an operator are tensors."""
    return ["Tensor" in str(argument.type) for argument in op._opoverload._schema.arguments]


def register_placements(op: torch.library.CustomOpDef, rule: PlacementRule) -> None:
    """Registers ``rule`` as the one sharding strategy of ``op``.

    ``rule`` maps the specs of the tensor arguments (None for one left out) to the placements
    that these must have and to those of the outputs.
    """
    is_tensor = tensor_arguments(op)

    def strategy(schema: OpSchema) -> OpStrategy:
        given = [
            arg.strategies[0].output_spec if isinstance(arg, OpStrategy) else None
            for arg, wanted in zip(schema.args_schema, is_tensor, strict=False)
            if wanted
        ]
        inputs, outputs = rule(given)
        mesh = next(spec.mesh for spec in given if spec is not None)
        needed = [
            DTensorSpec(mesh, placements, tensor_meta=spec.tensor_meta)
            for placements, spec in zip(inputs, given, strict=True)
            if placements is not None and spec is not None
        ]
        produced = tuple(DTensorSpec(mesh, placements) for placements in outputs)
        return OpStrategy(
            [
                OpSpec(
                    output_specs=produced if len(produced) != 1 else produced[0],
                    input_specs=needed,
                    redistribute_cost=[[0.0] for _ in needed],
                )
            ]
        )

    # DTensor caches outputs' shapes by the arguments from here on: by all that are no tensors, so
    # that none which changes a shape is missed.
    info = RuntimeSchemaInfo(is_tensor.index(False) if False in is_tensor else len(is_tensor))
    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(op._opoverload, strategy, info)


def compile_is_disabled() -> bool:
    """Whether ``torch.compile`` hands functions back as they are (``TORCH_COMPILE_DISABLE=1``)."""
    return torch._dynamo.config.disable


def in_func_transform() -> bool:
    """Whether a ``torch.func`` transform is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def non_view(x: Tensor) -> Tensor:
    """``x``, which nobody else holds, as a tensor that is no view."""
    return torch.ops.aten._unsafe_view(x, x.shape)
