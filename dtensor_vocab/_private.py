"""Every private name of torch that this package uses, in one place.

``register_sharding``, the public API for a DTensor strategy, does not accept empty shards: with
fewer columns than ranks, DTensor silently gathers the logits (torch 2.11 to 2.14). The underlying
registry of operators uses the placements unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor.placement_types import Placement
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

__all__ = [
    "DTensorSpec",
    "alike_to_guards",
    "assert_async",
    "compile_errors",
    "compiler_obstacle",
    "compiles_nothing_new",
    "in_func_transform",
    "is_flattened",
    "is_traced_for_a_graph",
    "non_view",
    "options_that_exist",
    "overload",
    "register_placements",
    "run_without_dynamo",
    "tensor_arguments",
]


def assert_async(condition: Tensor, message: str) -> None:
    """Raises if the 0-d ``condition`` is false, on a GPU later, since the host does not wait."""
    torch._assert_async(condition, message)


Placements = Sequence[tuple[Placement, ...] | None]
PlacementRule = Callable[
    [Sequence[DTensorSpec | None]], tuple[Placements, Sequence[tuple[Placement, ...]]]
]


def overload(op: torch.library.CustomOpDef) -> torch._ops.OpOverload:
    """The ``OpOverload``, because Dynamo fails to trace a ``CustomOpDef`` in a closure (seen on
    torch 2.13).
    """
    return op._opoverload


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

    # DTensor keys its output-shape cache on the arguments from this index on. Start at the first
    # non-tensor so that every argument that changes a shape is part of the key.
    info = RuntimeSchemaInfo(is_tensor.index(False) if False in is_tensor else len(is_tensor))
    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(op._opoverload, strategy, info)


def run_without_dynamo(op: torch.library.CustomOpDef) -> None:
    """Lets ``op`` run where Dynamo has not been imported.

    torch wraps the operator's function in ``torch._dynamo.disable``, which imports Dynamo at the
    first call (torch 2.11 to 2.14). Until something else imports Dynamo, the unwrapped function is
    run.
    """

    def unless_imported(disabled: Any) -> Callable[..., Any]:
        fn = disabled.__wrapped__

        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            return (disabled if "torch._dynamo" in sys.modules else fn)(*args, **kwargs)

        return run

    for device, disabled in op._backend_fns.items():
        op._backend_fns[device] = unless_imported(disabled)


def compiler_obstacle() -> str | None:
    """Why ``torch.compile`` would not give Inductor's code, where that is known before a call.

    Dynamo takes half a second to import, and its import raises where its cache directory can't be
    made (seen on torch 2.11 to 2.14). So it is imported here, for the first kernel.
    """
    fault = _import_dynamo()
    if fault is not None:
        return fault
    if torch._dynamo.config.disable:
        return "torch.compile is disabled"
    stance = torch._dynamo.eval_frame._stance
    if stance.backend not in (None, "inductor") or stance.stance == "aot_eager_then_compile":
        backend = "aot_eager" if stance.backend is None else stance.backend
        return f"torch.compiler.set_stance selects the backend {backend}"
    return None


@functools.cache
def _import_dynamo() -> str | None:
    """Imports Dynamo once and returns the error, if any. A second try would fail for another
    reason.
    """
    try:
        importlib.import_module("torch._dynamo")
    except Exception as error:
        return f"torch.compile can't be imported: {error}"
    return None


def options_that_exist(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of Inductor that this torch has; ``torch.compile`` raises for others.

    torch 2.11 lacks ``max_complex_pointwise_cat_inputs``, which torch 2.13 split from
    ``max_pointwise_cat_inputs``.
    """
    known = torch._inductor.config.get_config_copy()
    return {name: value for name, value in options.items() if name in known}


def compiles_nothing_new() -> bool:
    """Whether a first compilation raises: ``torch.compiler.set_stance("fail_on_recompile")``."""
    return torch._dynamo.eval_frame._stance.stance == "fail_on_recompile"


def compile_errors() -> tuple[type[Exception], ...]:
    """The errors that ``torch.compile(fullgraph=True)`` raises when it cannot make a kernel."""
    exceptions = torch._dynamo.exc
    return exceptions.TorchDynamoException, exceptions.FailOnRecompileLimitHit, OSError


def alike_to_guards() -> contextlib.AbstractContextManager[None]:
    """Makes Dynamo's guards treat tensors of the same dtype and strides as equal.

    Otherwise it compiles separately for plain tensors, inference tensors and the local tensors of
    DTensors, which differ in this dispatch key (torch 2.11 to 2.14).
    """
    return torch._C._ExcludeDispatchKeyGuard(_ADINPLACE_OR_VIEW)


_ADINPLACE_OR_VIEW = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def is_flattened(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> bool:
    """Whether these mesh dims have been flattened into one, over which DTensor then communicates
    once (from torch 2.13 on).
    """
    query = getattr(_redistribute, "_get_flattened_mesh_by_layout_impl", None)
    return query is not None and query(mesh, mesh_dims) is not None


# torch.compiler.assume_constant_result does this, but imports Dynamo.
is_flattened._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_traced_for_a_graph() -> bool:
    """Whether FX or ``torch.jit.trace`` records operators, where Dynamo refuses to compile."""
    return torch.jit.is_tracing() or is_fx_symbolic_tracing()


def in_func_transform() -> bool:
    """Whether a ``torch.func`` transform is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def non_view(x: Tensor) -> Tensor:
    """``x``, which must have no other owner, as a tensor that is not a view."""
    return torch.ops.aten._unsafe_view(x, x.shape)
