"""The kernels compiled and eager, what happens without a compiler, and what memory they take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dtensor_vocab.kernel import kernel
from dtensor_vocab.row_blocks import blocks
from tests.ops import OP, OPS, Op, check, draw, expect, observe, tp
from tests.oracle import assert_values

ROOT = Path(__file__).parent.parent


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, with an Inductor cache of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


# ------------------------------------------------------------------ compiled and eager


@pytest.mark.ranks(1)  # The memory tests on that rank use the same kernels.
@pytest.mark.parametrize("op", [OP["logprobs(K=3)"], OP["kl_div"]], ids=str)
def test_eager_kernels_give_the_same(op: Op, request: pytest.FixtureRequest) -> None:
    inputs = draw(op, (64,), 24, torch.bfloat16)
    grads = expect(op, inputs).grads
    compiled = observe(op, inputs, grads=grads)
    request.getfixturevalue("eager_kernels")
    eager = observe(op, inputs, grads=grads)
    for one, other in zip(compiled.outputs, eager.outputs, strict=True):
        assert_values(one.detach(), other.detach(), tolerance=1e-6)
    for name, grad in compiled.gradients.items():
        torch.testing.assert_close(grad, eager.gradients[name], rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    "rows, vocab, strided",
    [((7,), 10, False), ((3, 5), 10, True), ((2, 3), 100, True)],
    ids=["blocks of rows", "rows that no view flattens", "rows longer than a block"],
)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_eager_kernels_work_in_blocks(
    op: Op,
    rows: tuple[int, ...],
    vocab: int,
    strided: bool,
    eager_kernels: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dtensor_vocab.kernel.EAGER_BLOCK", 32)
    inputs = draw(op, rows, vocab)
    for name in op.logits if strided else ():
        dim = len(rows) - 1
        longer = torch.cat([inputs[name], inputs[name]], dim)
        inputs[name] = longer.narrow(dim, 0, rows[-1])
    check(op, inputs)


OPTIONS = {
    "beta": (OP["js_div(beta=0.3)"], [0.1, 0.5, 0.9]),
    "label_smoothing": (OP["cross_entropy(reduction=none)"], [0.1, 0.2, 1.0]),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_kernels_serve_all_values_of_an_option(option: str) -> None:
    """A schedule of an option compiles nothing after its first step."""
    op, values = OPTIONS[option]
    graphs = []
    for value in values:
        check(op, draw(op), **{option: value})
        graphs.append(unique_graphs())
    assert len(set(graphs)) == 1


SHARED = [OP["logprobs"], OP["kl_div"], OP["topk_logprobs(k=3)"]]


def graphs_compiled(call: Callable[[], object]) -> int:
    """Returns how many graphs a call compiles. An earlier call must have compiled one."""
    before = unique_graphs()
    call()
    return unique_graphs() - before


def unique_graphs() -> int:
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert count > 0, "torch counts no graphs under this name"
    return count


@pytest.mark.parametrize("op", SHARED[:2], ids=str)
def test_leading_shapes_share_kernels(op: Op) -> None:
    """Nothing is compiled for one row, for dims of size 1 or for more dims."""
    check(op, draw(op, (7,)))
    others = [(9,), (1,), (), (0,), (1, 1), (1, 5), (5, 1), (4, 6), (4, 1, 6)]
    assert graphs_compiled(lambda: [check(op, draw(op, rows)) for rows in others]) == 0
    transposed = {name: x.transpose(0, 1) for name, x in draw(op, (7, 1)).items()}
    assert graphs_compiled(lambda: check(op, transposed)) == 0


@pytest.mark.parametrize("op", SHARED, ids=str)
def test_callers_share_kernels(op: Op) -> None:
    """DTensors, inference mode, autocast and gradients of any strides compile nothing new."""
    check(op, draw(op, (7,)))
    inputs = list(draw(op, (7,)).values())

    def call_others() -> None:
        check(op, draw(op, (7,)), tp(1))
        with torch.inference_mode():
            op(*inputs)
            op(*[x.clone() for x in inputs])
        with torch.autocast("cpu", torch.bfloat16):
            op(*inputs)
        leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
        values = op(*inputs)[0]
        torch.autograd.grad(values.sum() if values.dim() == 1 else values.square().sum(), leaves)

    assert graphs_compiled(call_others) == 0


@pytest.mark.parametrize("op", SHARED[:2], ids=str)
def test_sliced_logits_share_kernels(op: Op) -> None:
    """Slices ``logits[..., :-1, :]`` may have any number of leading dims, some of size 1."""

    def call(*rows: int) -> None:
        inputs = draw(op, rows)
        for name in op.logits:
            inputs[name] = torch.cat([inputs[name]] * 2, -2).narrow(-2, 0, rows[-1])
        check(op, inputs)

    call(4, 7)
    others = [(6, 9), (1, 4, 7), (4, 1, 7), (4, 8, 7)]
    assert graphs_compiled(lambda: [call(*rows) for rows in others]) == 0


def test_lone_row_is_overwritten_by_its_gradient() -> None:
    """Compiled kernels compute on two copies of a lone row, and the first is copied back."""
    op = OP["logprobs"]
    observed = check(op, draw(op, (1,)), inplace_backward=True)
    assert observed.gradients["logits"].ne(0).any()


def test_blocks_have_a_bounded_number_of_rows() -> None:
    x = torch.arange(4 * 6 * 2).view(4, 6, 2)
    for most in (1, 4, 6, 13, 100):
        taken = [block for (block,) in blocks([x], most)]
        assert all(block[..., 0].numel() <= most for block in taken)
        assert torch.cat([block.reshape(-1, 2) for block in taken]).equal(x.view(-1, 2))


def test_last_block_of_one_row_is_not_compiled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OP["topk_logprobs(k=3)"]
    check(op, draw(op, (8,), 16))
    monkeypatch.setattr("dtensor_vocab.ops.topk_logprobs.SEARCH_BLOCK", 32)
    assert graphs_compiled(lambda: check(op, draw(op, (7,), 16))) == 0


# ------------------------------------------------------------------ no compiler

CALL_TWICE = """
import torch, dtensor_vocab as dv
for _ in range(2):
    logits = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 0.0]], requires_grad=True)
    loss = dv.logprobs(logits, torch.tensor([2, 0])).sum()
    loss.backward()
print(loss.item(), logits.grad.tolist())
"""


def value_and_gradient() -> tuple[float, torch.Tensor]:
    logits = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 0.0]], requires_grad=True)
    loss = logits.log_softmax(-1).gather(-1, torch.tensor([[2], [0]])).sum()
    loss.backward()
    return loss.item(), logits.grad


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "environment",
    [{"TORCH_COMPILE_DISABLE": "1"}, {"CXX": "/nowhere/to/be/found"}],
    ids=["compile disabled", "no compiler"],
)
def test_without_a_compiler(environment: dict[str, str], tmp_path: Path) -> None:
    """The result is right, and one warning names the reason."""
    result = run_python(CALL_TWICE, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), **environment)
    assert result.returncode == 0, result.stderr
    value, grad = result.stdout.split(" ", 1)
    loss, expected = value_and_gradient()
    assert abs(float(value) - loss) < 1e-6
    torch.testing.assert_close(torch.tensor(json.loads(grad)), expected)
    assert result.stderr.count("kernels run eagerly") == 1, result.stderr


@pytest.mark.ranks(1)
def test_eager_by_request_imports_no_compiler_and_does_not_warn(tmp_path: Path) -> None:
    dynamo = "import sys; assert 'torch._dynamo' not in sys.modules"
    result = run_python(
        f"import dtensor_vocab\n{dynamo}\n{CALL_TWICE}",
        DTENSOR_VOCAB_KERNELS="eager",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
    )
    assert result.returncode == 0, result.stderr
    assert "kernels run eagerly" not in result.stderr
    assert not any(tmp_path.iterdir())


UNUSABLE_CACHES = {
    "cannot be made": "/dev/null/inductor",  # Not even root can create a directory in a file.
    "cannot be written": "/proc",
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "directory, kernels",
    [
        ("cannot be made", "inductor"),
        ("cannot be made", "eager"),
        ("cannot be written", "inductor"),
    ],
)
def test_without_a_cache_directory(directory: str, kernels: str) -> None:
    """The import works, and the first call falls back to eager kernels with the warning."""
    result = run_python(
        CALL_TWICE,
        TORCHINDUCTOR_CACHE_DIR=UNUSABLE_CACHES[directory],
        HOME="/dev/null/home",
        DTENSOR_VOCAB_KERNELS=kernels,
    )
    assert result.returncode == 0, result.stderr
    assert abs(float(result.stdout.split(" ")[0]) - value_and_gradient()[0]) < 1e-6
    assert result.stderr.count("kernels run eagerly") == (kernels == "inductor"), result.stderr


# ------------------------------------------------------------------ torch.compile steps aside


class Recorded:
    """A kernel that records the row counts which it runs uncompiled on."""

    def __init__(self) -> None:
        self.uncompiled: list[int] = []

        def total(logits: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_dynamo_compiling():
                self.uncompiled.append(len(logits))
            return logits.sum(-1)

        self._kernel = kernel(total)

    def check(self) -> None:
        logits = torch.randn(10, 16)
        torch.testing.assert_close(self._kernel(logits), logits.sum(-1))


@pytest.fixture
def blocks_of_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtensor_vocab.kernel.EAGER_BLOCK", 32)
    monkeypatch.setattr("dtensor_vocab.kernel._warned", [])


def stance(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: torch.compiler.set_stance(*args, **options)


def dynamo(**options: Any) -> Callable[[], Any]:
    return lambda: torch._dynamo.config.patch(**options)


NOT_COMPILED = {
    "force_eager": stance("force_eager"),
    "another backend": stance("default", force_backend="eager"),
    "aot_eager_then_compile": stance("aot_eager_then_compile"),
    "disabled": dynamo(disable=True),
}
NOT_COMPILED_AT_FIRST = {
    "eager_on_recompile": stance("eager_on_recompile"),
    "eager_then_compile": stance("eager_then_compile"),
    "fail_on_recompile": stance("fail_on_recompile"),
    "no recompilation": dynamo(recompile_limit=0),
}


@pytest.mark.parametrize("how", NOT_COMPILED | NOT_COMPILED_AT_FIRST)
def test_uncompiled_kernel_runs_in_blocks(how: str, blocks_of_two_rows: None) -> None:
    """torch.compile can return its function uncompiled, which must not run on all rows at once."""
    recorded = Recorded()
    with (NOT_COMPILED | NOT_COMPILED_AT_FIRST)[how](), pytest.warns(match="run eagerly") as warned:
        recorded.check()
    assert recorded.uncompiled == [2] * 5
    assert len(warned) == 1


@pytest.mark.parametrize("how", NOT_COMPILED)
def test_warm_kernel_runs_in_blocks_under_a_stance(how: str, blocks_of_two_rows: None) -> None:
    recorded = Recorded()
    recorded.check()
    with NOT_COMPILED[how](), pytest.warns(match="run eagerly"):
        recorded.check()
    assert recorded.uncompiled == [2] * 5
    recorded.check()
    assert recorded.uncompiled == [2] * 5


HARMLESS_ONCE_WARM = {
    **NOT_COMPILED_AT_FIRST,
    "no guards": stance("default", skip_guard_eval_unsafe=True),
    "suppressed errors": dynamo(suppress_errors=True),
}


@pytest.mark.parametrize("how", HARMLESS_ONCE_WARM)
def test_warm_kernel_stays_compiled(how: str) -> None:
    recorded = Recorded()
    recorded.check()
    with HARMLESS_ONCE_WARM[how]():
        recorded.check()
        torch.compiler.disable(recorded.check)()
    assert recorded.uncompiled == []


def test_kernel_that_fails_to_compile_is_tried_once(
    blocks_of_two_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def compile_nothing(fn: Callable[..., Any], options: object) -> Callable[..., Any]:
        def fail(*args: Any) -> None:
            tried.append(args)
            raise OSError("no compiler")

        return fail

    monkeypatch.setattr("dtensor_vocab.kernel._compile", compile_nothing)
    recorded = Recorded()
    with pytest.warns(match="because OSError: no compiler"):
        recorded.check()
    recorded.check()
    assert len(tried) == 1


def test_kernels_ignore_the_default_backend() -> None:
    if not hasattr(torch.compiler, "set_default_backend"):
        pytest.skip("torch has no such setting before 2.13")
    torch.compiler.set_default_backend("no such backend")
    try:
        Recorded().check()
    finally:
        torch.compiler.set_default_backend(None)


# ------------------------------------------------------------------ memory

MEASURE_PEAKS = """
import json
import torch
from bench.measure.peak import peak_above_inputs, return_freed_blocks
from tests.test_kernel import MEMORY_CASES

torch.set_num_threads(1)
return_freed_blocks()
peaks = {}
for name, case in MEMORY_CASES.items():
    call = case.prepare()
    call()  # compiles
    # The first of two calls may also allocate memory that the op keeps.
    peaks[name] = min(peak_above_inputs(call, torch.device("cpu")) for _ in range(2))
print(json.dumps(peaks))
"""
ROWS, VOCAB, K = 2048, 16032, 64
MIB = 1 << 20


@dataclass(frozen=True)
class MemoryCase:
    """A call forward and backward at 2048 x 16032 bf16, and how many gradients it makes."""

    op: Op
    needs: tuple[str, ...]
    gradients: int
    results: int = 0
    """Bytes of the results, where they are K numbers per row."""
    sliced: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        needs = "+".join(self.needs) or "no_grad"
        return "-".join([str(self.op), needs, *self.options, *["sliced"] * self.sliced])

    def prepare(self) -> Callable[[], None]:
        rows = (8, ROWS // 8) if self.sliced else (ROWS,)
        inputs = {name: self.draw(name, rows) for name in self.op.arguments}
        for name in self.needs:
            inputs[name].requires_grad_()

        def call() -> None:
            outputs = self.op(*inputs.values(), **self.options)
            if self.needs:
                sums = [o.sum() for o in outputs if o.requires_grad]
                torch.autograd.grad(sums, [inputs[name] for name in self.needs])

        return call

    def draw(self, name: str, rows: tuple[int, ...]) -> torch.Tensor:
        if name in self.op.logits:
            longer = (*rows[:-1], rows[-1] + self.sliced)
            return torch.randn(*longer, VOCAB, dtype=torch.bfloat16).narrow(-2, 0, rows[-1])
        if name == "teacher_logprobs":
            return torch.full((*rows, K), 1 / VOCAB).log()
        # The ids of a row are distinct, and rows have different ids.
        first = torch.randint(VOCAB, (*rows, *[1] * len(self.op.ids)))
        return (first + torch.arange(*self.op.ids) if self.op.ids else first) % VOCAB


ONE, BOTH, IN_PLACE = ("logits",), ("student", "teacher"), {"inplace_backward": True}
AT_K_IDS = replace(OP["logprobs"], ids=(K,))
MEMORY_CASES = {
    str(case): case
    for case in (
        MemoryCase(OP["logprobs"], ONE, 1),
        MemoryCase(OP["logprobs"], ONE, 0, options=IN_PLACE),
        MemoryCase(OP["logprobs"], ONE, 1, options={"softcap": 30.0}),
        MemoryCase(AT_K_IDS, ONE, 1),
        MemoryCase(AT_K_IDS, ONE, 0, options=IN_PLACE),
        MemoryCase(OP["kl_div"], BOTH, 2),
        MemoryCase(OP["kl_div"], BOTH[:1], 1, options={"softcap": 30.0}),
        MemoryCase(OP["kl_div"], BOTH[:1], 1, sliced=True),
        MemoryCase(OP["js_div(beta=0.3)"], BOTH, 2, options={"softcap": 30.0}),
        MemoryCase(OP["js_div(beta=0.3)"], BOTH, 2),
        MemoryCase(OP["cross_entropy(reduction=none)"], ONE, 1),
        MemoryCase(OP["topk_logprobs(k=3)"].with_options(k=K), ONE, 1, results=ROWS * K * (4 + 8)),
        MemoryCase(replace(OP["topk_kl_div(tail=True,K=3)"], ids=(K,)), ("student",), 1),
    )
}


@pytest.fixture(scope="module")
def peaks() -> dict[str, int]:
    result = run_python(MEASURE_PEAKS)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.ranks(1)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("case", MEMORY_CASES)
def test_peak_is_the_gradients(case: str, peaks: dict[str, int]) -> None:
    """The op allocates no copy of the logits, and no gradient that is not needed."""
    made = MEMORY_CASES[case].gradients * ROWS * VOCAB * 2 + MEMORY_CASES[case].results
    assert made <= peaks[case] + MIB and peaks[case] <= made + 2 * MIB
