"""The graphs that a step is compiled to, as Inductor gets them from AOT autograd."""

from __future__ import annotations

from typing import Any

from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx
from torch._dynamo.backends.common import aot_autograd


class Graphs:
    """``compiled(step, backend=graphs.backend)`` keeps them here and runs them as they are."""

    def __init__(self) -> None:
        self.forward, self.backward = fx.Graph(), fx.Graph()
        self.backend = aot_autograd(
            fw_compiler=self._keep_as("forward"),
            bw_compiler=self._keep_as("backward"),
            inference_compiler=self._keep_as("forward"),
            partition_fn=min_cut_rematerialization_partition,
        )

    def _keep_as(self, name: str) -> Any:
        def compiler(module: fx.GraphModule, example_inputs: Any) -> Any:
            setattr(self, name, module.graph)
            return make_boxed_func(module.forward)

        return compiler

    @property
    def both(self) -> tuple[fx.Graph, fx.Graph]:
        return self.forward, self.backward

    def __str__(self) -> str:
        """Returns the names of the package's operators and collectives. Others vary by version."""
        return "\n".join(
            [
                "forward:",
                *(f"  {operator}" for operator in ours(self.forward)),
                "backward:",
                *(f"  {operator}" for operator in ours(self.backward)),
            ]
        )


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def short_name(node: fx.Node) -> str:
    """Returns an operator's name without namespace and overload."""
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0]


def ours(graph: fx.Graph) -> list[str]:
    return [
        short_name(node)
        for node in calls(graph)
        if getattr(node.target, "namespace", None) in ("dtensor_vocab", "_c10d_functional")
    ]
