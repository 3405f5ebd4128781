"""Generates the Triton code of the kernels without a GPU, and prints how it accesses the logits.

    python -m tests.triton_code                                 all ops
    python -m tests.triton_code logprobs "js_div(beta=0.3)"     these ops alone

Each line of the output describes one call in JSON.

The ops run forward and backward on fake tensors whose device is a GPU. Inductor generates kernels
for that GPU, and the script compiles them but never launches one. It needs Triton, and g++ if torch
is built without CUDA.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch._dynamo import device_interface
from torch._inductor import config
from torch._inductor.constant_folding import ConstantFolder
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._library.custom_ops import OPDEFS
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from tests.ops import LOGITS, OP, OPS, Op
from tests.rank_zero import place_part
from tests.test_no_sync import NoWaiting, without_engine

ROWS, VOCAB, K, WIDTH = 8192, 16032, 64, 512
CAPABILITY = (9, 0)
PROPERTIES = SimpleNamespace(
    name="a fake GPU",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    total_memory=1 << 37,
    L2_cache_size=50 << 20,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
)


# ------------------------------------------------------------------ a fake GPU


class Launch:
    """One launch of a Triton kernel with its arguments."""

    def __init__(self, kernel: Any, args: tuple[Any, ...]) -> None:
        self.kernel = kernel
        self.args = dict(zip(kernel.fn.arg_names, args, strict=False))


launches: list[Launch | str] = []
"""Triton kernels and the names of other operators that launch a kernel, in order of launch."""


def fake_a_gpu() -> None:
    """Makes torch, Inductor and Triton find a GPU, but allocates and launches nothing on it."""
    if not torch.backends.cuda.is_built():
        load_device_guard()
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "get_device_properties": PROPERTIES,
        "get_device_capability": CAPABILITY,
        "is_current_stream_capturing": False,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    interface = device_interface.CudaInterface
    for name, answer in answers.items():
        setattr(torch.cuda, name, always(answer))
        if hasattr(interface, name):
            setattr(interface, name, staticmethod(always(answer)))
    torch.accelerator.is_available = always(False)
    torch._C._cuda_getCurrentRawStream = always(0)
    FakeTensorMode.avoid_device_init = property(always(True))
    fake_tensor.init_gpu_context = always(None)

    allocate = torch._C._dynamo.guards
    allocate._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda"
    )
    allocate._reinterpret_tensor = lambda x, size, stride, offset=0: x.as_strided(
        size, stride, x.storage_offset() + offset
    )
    allocate.copy_if_misaligned = lambda x: x
    fold = ConstantFolder.run

    def fold_on_the_cpu(*args: Any, **kwargs: Any) -> Any:
        with OnTheCpu():  # Constant folding computes real values.
            return fold(*args, **kwargs)

    ConstantFolder.run = fold_on_the_cpu
    config.compile_threads, config.use_static_triton_launcher = 1, False
    config.force_disable_caches = True

    target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], PROPERTIES.warp_size)
    triton_helpers.set_driver_to_gpu = always(None)
    triton.runtime.driver.set_active(
        SimpleNamespace(get_current_target=always(target), get_current_device=always(0))
    )
    autotuner = triton_heuristics.CachingAutotuner
    autotuner.precompile = always(None)
    autotuner.run = lambda self, *args, **kwargs: launches.append(Launch(self, args))


def always(answer: Any) -> Any:
    return lambda *args, **kwargs: answer


def load_device_guard() -> None:
    """Registers the device guard for CUDA that a build of torch without CUDA lacks."""
    root, folder = Path(torch.__file__).parent, tempfile.mkdtemp()
    code = """
    #include <c10/core/impl/DeviceGuardImplInterface.h>
    C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
    """
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{root}/include", "-xc++", "-"]
    command += [f"-L{root}/lib", "-lc10", "-o", f"{folder}/guard.so"]
    subprocess.run(command, input=code, text=True, check=True)
    ctypes.CDLL(f"{folder}/guard.so")


class OnTheCpu(TorchDispatchMode):
    """Makes operators that take a device create their tensor on the CPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **{**kwargs, "device": "cpu"} if "device" in kwargs else kwargs)


class Watch(NoWaiting):
    """Raises if the host would wait or copy, and records operators that launch a kernel."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # Otherwise Dynamo compiles nothing.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls the op on local tensors, which come here.
        compiling = torch._guards.TracingContext.try_get() is not None
        if compiling or func.namespace == "dtensor_vocab":
            return func(*args, **kwargs or {})
        name = func._opname
        if func.namespace == "aten" and not func.is_view and not name.startswith(NO_KERNEL):
            launches.append(name)
        return super().__torch_dispatch__(func, types, args, kwargs)


def run_operators_on_fake_tensors() -> None:
    """Makes the package's operators run their real functions on fake tensors.

    DTensor still runs the operators' fakes to find the shapes of results.
    """
    call, propagator = torch._ops.OpOverload.__call__, DTensor._op_dispatcher.sharding_propagator
    query = propagator._propagate_tensor_meta_non_cached

    def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.namespace != "dtensor_vocab" or any(isinstance(x, DTensor) for x in args):
            return call(self, *args, **kwargs)
        return OPDEFS[self.name().partition(".")[0]]._init_fn(*args, **kwargs)

    def query_fakes(schema: Any) -> Any:
        with mock.patch.object(torch._ops.OpOverload, "__call__", call):
            return query(schema)

    torch._ops.OpOverload.__call__ = run
    propagator._propagate_tensor_meta_non_cached = query_fakes


NO_KERNEL = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "detach", "sym_")


# ------------------------------------------------------------------ accesses of a kernel


def passes(launch: Launch, access: str, size: int) -> int:
    """Counts a kernel's loads, or stores, of tensors of at least this size, from its source.

    Accesses in different loops count separately. Accesses at indices that the kernel computes
    (``tmp``) do not count, since they touch few elements.
    """
    loop, seen = 0, set()
    text = launch.kernel.fn.src.split("def triton_", 1)[1]
    for line in text.splitlines():
        loop += "for r0_offset in" in line
        for name, where in re.findall(rf"tl\.{access}\((\w+_ptr\d+) \+ \((.*?)\), ", line):
            x = launch.args[name]
            if isinstance(x, Tensor) and x.numel() >= size and "tmp" not in where:
                seen.add((loop, name, where))
    return len(seen)


@functools.cache
def best_code(kernel: Any) -> dict[str, int]:
    """Returns the bytes of the widest load and of spilled registers of one of Inductor's choices.

    It is the first choice that spills nothing and loads vectors, or the last if there is none.
    """
    for code in compile_choices(kernel):
        if code["spilled"] == 0 and code["widest"] >= 8:
            break
    return code


def compile_choices(kernel: Any) -> Iterator[dict[str, int]]:
    """Compiles a kernel with each of Inductor's choices of block sizes and warps."""
    for choice in kernel.configs:
        meta = kernel._create_compile_meta(choice)
        source = triton.compiler.ASTSource(
            kernel.fn, meta["signature"], meta["constants"], meta["configs"][0]
        )
        options = {"num_warps": choice.num_warps, "num_stages": choice.num_stages}
        target = triton.runtime.driver.active.get_current_target()
        asm = triton.compile(source, target=target, options=options).asm
        loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[bufs](\d+) ", asm["ptx"])
        yield {
            "widest": max(int(count or 1) * int(bits) // 8 for count, bits in loads),
            "spilled": spilled(asm["cubin"]),
        }


def spilled(cubin: bytes) -> int:
    """Returns the bytes of local memory, which holds spilled registers."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"LOCAL:(\d+)", usage)[1])


# ------------------------------------------------------------------ ops

TESTED = [
    OP[name]
    for name in (
        "logprobs",
        "kl_div",
        "js_div(beta=0.3)",
        "topk_logprobs(k=3)",
        "argmax",
        "sample(seed=11)",
        "topk_kl_div(tail=True,K=3)",
    )
]
"""Ops with kernels of their own."""
TESTED += [OP[name].with_options(softcap=30.0) for name in ("logprobs", "kl_div")]
LINEAR = OP["logprobs"].linear()
BLOCKS = 8
"""The number of its blocks of columns, of 32 MiB or less."""
LEAST_IN_BLOCK = ROWS * VOCAB * 9 // (10 * BLOCKS)
SHARDED = [OP["logprobs"], LINEAR]
"""Those that run on DTensors too."""


def arguments(op: Op, mesh: DeviceMesh | None) -> list[Tensor]:
    operands = {"hidden": (ROWS, WIDTH), "weight": (VOCAB, WIDTH), "bias": (VOCAB,)}
    made = []
    for name in op.arguments:
        operand = name.partition(".")[2]
        last = (VOCAB,) if name in LOGITS else (K,) if op.ids else ()
        bf16 = name in LOGITS or operand
        dtype = torch.bfloat16 if bf16 else torch.int64
        dtype = torch.float32 if name == "teacher_logprobs" else dtype
        full = torch.empty(operands.get(operand, (ROWS, *last)), dtype=dtype, device="cuda")
        placement = Shard(-1) if name in LOGITS else Replicate()
        placement = Shard(0) if operand in ("weight", "bias") else placement
        made.append(full if mesh is None else place_part(full, mesh, [placement]))
    return made


def call_twice(op: Op, applied: list[Any], mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """Calls the op forward and backward twice, and returns a report of the second call."""
    name = str(op)
    if "k" in op.options:
        op = op.with_options(k=K)
    first, forward, backward = [], [], []
    for _ in range(2):
        first = [x.kernel for x in forward + backward if isinstance(x, Launch)]
        applied.clear()
        launches.clear()
        op(*arguments(op, mesh))
        forward = list(launches)
        launches.clear()
        for function, context, outputs in applied:
            grads = [torch.empty_like(x) if x.is_floating_point() else None for x in outputs[:-1]]
            launches.clear()
            function.backward(context, *grads, None)
        backward = list(launches)
    kernels = [x for x in forward + backward if isinstance(x, Launch)]
    size = LEAST_IN_BLOCK if op is LINEAR else ROWS * VOCAB
    large = [] if mesh else [x for x in kernels if passes(x, "load", size)]
    return {
        "op": name,
        "sharded": mesh is not None,
        "compiled by the second call": len({id(x.kernel) for x in kernels} - set(map(id, first))),
        "launches": [len(forward), len(backward)],
        "operators": sorted({x for x in forward + backward if isinstance(x, str)}),
        "kernels": [
            {
                "forward": x in forward,
                "loads": passes(x, "load", size),
                "stores": passes(x, "store", size),
                **best_code(x.kernel),
            }
            for x in large
        ],
    }


class Patches:
    """Sets attributes like pytest's ``monkeypatch``, but never restores them."""

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)


MODE = FakeTensorMode(allow_non_fake_inputs=True)


def main() -> None:
    os.environ["DTENSOR_VOCAB_KERNELS"] = "inductor"
    fake_a_gpu()
    applied = without_engine(Patches())
    run_operators_on_fake_tensors()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cuda", (2,))
    all_ops = [*OPS, *TESTED[-2:], LINEAR]
    for op in [op for op in all_ops if str(op) in sys.argv[1:]] or all_ops:
        with MODE, Watch():
            print(json.dumps(call_twice(op, applied)), flush=True)
            if op in SHARDED:
                print(json.dumps(call_twice(op, applied, mesh)), flush=True)


if __name__ == "__main__":
    main()
