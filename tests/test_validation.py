"""Invalid arguments raise the same error on every rank before any communication."""

from __future__ import annotations

import numbers
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import dtensor_vocab as dv
from dtensor_vocab.checks import check_logits
from tests.ops import AT_IDS, OP, OPS, PAIRS, PATHS, WITH_IDS, Op, draw, named
from tests.ranks import Collectives, distribute, from_parts, on_mesh, ranks_here

pytestmark = pytest.mark.usefixtures("eager_kernels")

ONE_EACH = list({op.name: op for op in OPS}.values())
NOT_ARGMAX = [op for op in ONE_EACH if op.name != "argmax"]
INPLACE = named("logprobs", "entropy", "logprobs_and_entropy", "cross_entropy")


def refused(
    kind: type[Exception], text: str, call: Callable[..., Any], *inputs: Any, **options: Any
) -> None:
    """Checks that a call raises an error of this type and text, and sends nothing."""
    with Collectives() as collectives, pytest.raises(kind, match=text) as error:
        call(*inputs, **options)
    assert type(error.value) is kind
    assert collectives.seen == []


def with_input(op: Op, name: str, value: Any) -> list[Any]:
    return list({**draw(op), name: value}.values())


# ------------------------------------------------------------------ types, dtypes and shapes


@pytest.mark.parametrize(
    "value, kind, got",
    [
        ([[1.0, 2.0]], TypeError, "to be a Tensor or DTensor, got list"),
        (
            torch.zeros(6, 10, dtype=torch.int64),
            TypeError,
            "bfloat16, float32 or float64, got torch.int64",
        ),
        (torch.zeros(6, 10, dtype=torch.complex64), TypeError, "got torch.complex64"),
        (torch.zeros(6, 10).to_sparse(), TypeError, "a dense tensor, got torch.sparse_coo"),
        (
            torch.nested.nested_tensor([torch.zeros(6, 10)], layout=torch.jagged),
            TypeError,
            "a dense tensor, got a nested tensor",
        ),
        (torch.zeros(()), ValueError, "of shape [*, V] with V > 0, got ()"),
        (torch.zeros(6, 0), ValueError, "of shape [*, V] with V > 0, got (6, 0)"),
    ],
    ids=["list", "int64", "complex", "sparse", "nested", "0-d", "no column"],
)
def test_invalid_logits_are_refused(value: Any, kind: type[Exception], got: str) -> None:
    for op in ONE_EACH:
        for name in op.logits:
            text = rf"^{op.name}: expected {name} .*{re.escape(got)}"
            refused(kind, text, op, *with_input(op, name, value))


IDS = [(op, op.arguments[-1]) for op in (*WITH_IDS[:6:2], OP["topk_kl_div(K=3)"])]


@pytest.mark.parametrize(
    "value, kind, got",
    [
        ([0] * 6, TypeError, "to be a Tensor or DTensor, got list"),
        (torch.zeros(6, 3, dtype=torch.bool), TypeError, "of dtype int32 or int64, got torch.bool"),
        (torch.zeros(6, 3), TypeError, "of dtype int32 or int64, got torch.float32"),
        (
            torch.zeros(6, 3, dtype=torch.int16),
            TypeError,
            "of dtype int32 or int64, got torch.int16",
        ),
        (torch.zeros(5, dtype=torch.int64), ValueError, "for logits of shape [6, 10], got [5]"),
        (torch.zeros(1, 3, dtype=torch.int64), ValueError, "got [1, 3]"),
        (torch.zeros(6, 1, 1, dtype=torch.int64), ValueError, "got [6, 1, 1]"),
        (torch.zeros((), dtype=torch.int64), ValueError, "got []"),
        (torch.zeros(6, 3, dtype=torch.int64, device="meta"), ValueError, "device"),
    ],
    ids=["list", "bool", "float", "int16", "too few", "one", "two axes", "0-d", "device"],
)
def test_invalid_ids_are_refused(value: Any, kind: type[Exception], got: str) -> None:
    for op, name in IDS:
        text = rf"^{op.name}: expected {name} .*{re.escape(got)}"
        if isinstance(value, Tensor) and value.shape == (6, 3) and not op.ids:
            refused(kind, text, op, *with_input(op, name, value[:, 0]))
        else:
            refused(kind, text, op, *with_input(op, name, value))


def test_ids_move_after_all_checks() -> None:
    with on_mesh((2,)) as mesh:
        logits = distribute(torch.randn(4, 6), mesh, [Shard(-1)])
        ids = distribute(torch.zeros(4, dtype=torch.int64), mesh, [Shard(0)])
        with Collectives() as collectives:
            with pytest.raises(ValueError, match="temperature"):
                dv.logprobs(logits, ids, temperature=-1)
            assert not collectives.seen
            dv.logprobs(logits, ids)
        assert len(collectives.seen) == 2  # of the ids and of the statistics


def test_only_logprobs_takes_k_ids() -> None:
    target = torch.zeros(6, 3, dtype=torch.int64)
    text = r"^cross_entropy: expected target of shape \[6\] for .*, got \[6, 3\]"
    refused(ValueError, text, dv.cross_entropy, torch.zeros(6, 10), target)


@pytest.mark.parametrize("op", WITH_IDS, ids=str)
def test_invalid_ignore_index_is_refused(op: Op) -> None:
    for value, got in ((-100.0, "float"), ("x", "str"), (True, "bool")):
        text = rf"^{op.name}: expected ignore_index to be an int or None, got {got}"
        refused(TypeError, text, op, *draw(op).values(), ignore_index=value)
    for value in (2**63, -(2**63) - 1):
        text = rf"^{op.name}: expected ignore_index to fit in 64 bits, got {value}"
        refused(ValueError, text, op, *draw(op).values(), ignore_index=value)


@pytest.mark.parametrize(
    "value, kind, got",
    [
        ("1", TypeError, "to be a float or a Tensor, got str"),
        (None, TypeError, "got NoneType"),
        (True, TypeError, "got bool"),
        (0, ValueError, "got 0"),
        (-1.5, ValueError, "got -1.5"),
        (float("nan"), ValueError, "got nan"),
        (float("inf"), ValueError, "got inf"),
        (1e-60, ValueError, "a normal number in float32, got 1e-60"),
        (torch.ones(6, dtype=torch.int64), TypeError, "of a floating dtype, got torch.int64"),
        (torch.ones(6).to_sparse(), TypeError, "a dense tensor, got torch.sparse_coo"),
        (
            torch.ones(6, 1),
            ValueError,
            "of shape [6] or [] for logits of shape [6, 10], got [6, 1]",
        ),
        (torch.ones(6, requires_grad=True), ValueError, "detach"),
    ],
    ids=[
        "str",
        "None",
        "bool",
        "0",
        "-",
        "NaN",
        "inf",
        "underflow",
        "int64",
        "sparse",
        "shape",
        "grad",
    ],
)
def test_invalid_temperature_is_refused(value: Any, kind: type[Exception], got: str) -> None:
    for op in NOT_ARGMAX:
        text = rf"^{op.name}: expected .*temperature.*{re.escape(got)}"
        refused(kind, text, op, *draw(op).values(), temperature=value)


@pytest.mark.parametrize(
    "value, kind, got",
    [
        (10.0, TypeError, "to be an int or None, got float"),
        (True, TypeError, "got bool"),
        (0, ValueError, "<= 10, the columns of"),
        (-3, ValueError, "got -3"),
        (11, ValueError, "got 11"),
    ],
    ids=["float", "bool", "0", "negative", "too many"],
)
def test_invalid_vocab_size_is_refused(value: Any, kind: type[Exception], got: str) -> None:
    for op in ONE_EACH:
        text = rf"^{op.name}: expected .*vocab_size.*{re.escape(got)}"
        refused(kind, text, op, *draw(op).values(), vocab_size=value)


@pytest.mark.parametrize(
    "name, options, kind, text",
    [
        ("js_div", {"beta": -0.1}, ValueError, "expected 0 <= beta <= 1, got -0.1"),
        ("js_div", {"beta": 1.5}, ValueError, "expected 0 <= beta <= 1, got 1.5"),
        ("js_div", {"beta": "0"}, TypeError, "expected beta to be a float, got str"),
        ("cross_entropy", {"reduction": "max"}, ValueError, "expected reduction .*got 'max'"),
        (
            "cross_entropy",
            {"label_smoothing": 1.1},
            ValueError,
            "expected 0 <= label_smoothing <= 1",
        ),
        ("cross_entropy", {"label_smoothing": None}, TypeError, "expected .* to be a float"),
        ("cross_entropy", {"z_loss": -1.0}, ValueError, "expected 0 <= z_loss .*got -1.0"),
        ("topk_logprobs", {"k": 11}, ValueError, "expected 0 <= k <= 10, .*got 11"),
        ("topk_logprobs", {"k": -1}, ValueError, "expected 0 <= k <= 10, .*got -1"),
        ("topk_logprobs", {"k": 3, "vocab_size": 2}, ValueError, "expected 0 <= k <= 2, .*got 3"),
        ("topk_logprobs", {"k": 2.0}, TypeError, "expected k to be an int, got float"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(
    name: str, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    op = named(name)[0]
    refused(kind, rf"^{name}: {text}", op, *draw(op).values(), **options)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_inplace_backward_must_be_a_bool(value: Any) -> None:
    for op in INPLACE:
        text = rf"^{op.name}: expected inplace_backward to be a bool"
        refused(TypeError, text, op, *draw(op).values(), inplace_backward=value)


@pytest.mark.parametrize(
    "value, kind, got",
    [
        ([0.0], TypeError, "got list"),
        (torch.zeros(6, 3, dtype=torch.int64), TypeError, "got torch.int64"),
        (torch.zeros(6, 2), ValueError, "got"),
    ],
    ids=["list", "int64", "shape"],
)
def test_invalid_teacher_logprobs_are_refused(value: Any, kind: type[Exception], got: str) -> None:
    op = OP["topk_kl_div(K=3)"]
    text = rf"^topk_kl_div: expected teacher_logprobs .*{got}"
    refused(kind, text, op, *with_input(op, "teacher_logprobs", value))


def test_teacher_ids_have_a_k_axis() -> None:
    student, ids = torch.zeros(6, 10), torch.zeros(6, dtype=torch.int64)
    text = r"^topk_kl_div: expected teacher_ids of shape \[6, K\]"
    refused(ValueError, text, dv.topk_kl_div, student, torch.zeros(6), ids)


# ------------------------------------------------------------------ placements

LAYOUTS: dict[str, tuple[tuple[int, ...], list[Placement], str]] = {
    "Partial": ((2,), [Partial()], "redistribute Partial logits"),
    "Partial beside Shard": ((2, 2), [Partial(), Shard(-1)], "redistribute Partial logits"),
    "two mesh dims": ((2, 2), [Shard(1), Shard(-1)], "two mesh dims"),
    "_StridedShard": ((2, 2), [_StridedShard(1, split_factor=2), Replicate()], "_StridedShard"),
    "_StridedShard of rows": (
        (2, 2),
        [_StridedShard(0, split_factor=2), Shard(1)],
        "_StridedShard",
    ),
}


def zeros(mesh: DeviceMesh) -> dict[int, Tensor]:
    return {rank: torch.zeros(4, 4) for rank in ranks_here(mesh)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unsupported_placements_are_refused(layout: str) -> None:
    """The message names the function, the placements, the mesh and the cure."""
    shape, placements, problem = LAYOUTS[layout]
    for op in ONE_EACH:
        with on_mesh(shape) as mesh:
            given = [
                from_parts(zeros(mesh), mesh, placements, (8, 8))
                if name in op.logits
                else distribute(x, mesh, [Replicate()] * mesh.ndim)
                for name, x in draw(op, (8,), 8).items()
            ]
            text = rf"^{op.name}: expected (?=.*{problem}).*redistribute"
            with pytest.raises(ValueError, match=re.escape(str(mesh))):
                op(*given)
            refused(ValueError, text, op, *given)


@pytest.mark.parametrize("op", AT_IDS, ids=str)
def test_plain_rows_beside_sharded_ones_are_ambiguous(op: Op) -> None:
    inputs = draw(op)
    with on_mesh((2, 2)) as mesh:
        logits = distribute(inputs["logits"], mesh, [Shard(0), Shard(-1)])
        ids = inputs[op.ids_name]
        text = rf"^{op.name}: expected {op.ids_name} to be a DTensor.*from_local"
        refused(ValueError, text, op, logits, ids)
        refused(ValueError, text, op, logits, ids[:3])


@pytest.mark.parametrize("op", NOT_ARGMAX, ids=str)
def test_plain_temperature_beside_sharded_rows_is_ambiguous(op: Op) -> None:
    inputs = draw(op)
    temperature = torch.ones(6)
    with on_mesh((2,)) as mesh:
        given = [distribute(x, mesh, [Shard(0)]) for x in inputs.values()]
        text = rf"^{op.name}: expected temperature to be a DTensor"
        refused(ValueError, text, op, *given, temperature=temperature)


@pytest.mark.parametrize("op", AT_IDS, ids=str)
def test_ids_of_another_kind_or_mesh_are_refused(op: Op) -> None:
    inputs = draw(op)
    ids = inputs[op.ids_name]
    with on_mesh((2, 2)) as mesh:
        on_plane = distribute(ids, mesh, [Replicate(), Replicate()])
    with on_mesh((4,)) as mesh:
        logits = distribute(inputs["logits"], mesh, [Shard(-1)])
        text = rf"^{op.name}: expected {op.ids_name} .*mesh"
        refused(ValueError, text, op, logits, on_plane)
        refused(ValueError, rf"^{op.name}: expected", op, inputs["logits"], on_plane)


# ------------------------------------------------------------------ pairs of inputs that differ


@pytest.mark.parametrize("op", PAIRS[:3], ids=str)
@pytest.mark.parametrize(
    "teacher, got",
    [
        (torch.zeros(6, 12), "shape"),
        (torch.zeros(1, 10), "shape"),
        (torch.zeros(6, 10, device="meta"), "device"),
    ],
    ids=["columns", "rows", "device"],
)
def test_plain_pairs_that_differ_are_refused(op: Op, teacher: Tensor, got: str) -> None:
    text = rf"^{op.name}: expected student and teacher of the same {got}"
    refused(ValueError, text, op, torch.zeros(6, 10), teacher)


@pytest.mark.parametrize("op", PAIRS[:3], ids=str)
def test_pairs_that_differ_on_meshes_are_refused(op: Op) -> None:
    """Logits of another V, mesh or placement, or plain ones, are refused before any collective."""
    inputs = draw(op, (8,), 8)
    student, teacher = inputs.values()
    text = rf"^{op.name}: expected student and teacher of the same "
    with on_mesh((2, 2)) as mesh:
        on_plane = distribute(student, mesh, [Replicate(), Shard(-1)])
        other = distribute(teacher, mesh, [Shard(-1), Replicate()])
        refused(ValueError, text + "placements", op, on_plane, other)
        refused(ValueError, text, op, on_plane, teacher)
        refused(ValueError, text, op, student, other)
    with on_mesh((4,)) as mesh:
        on_line = distribute(student, mesh, [Shard(-1)])
        refused(ValueError, text + "mesh", op, on_line, other)
        wider = distribute(torch.zeros(8, 16), mesh, [Shard(-1)])
        refused(ValueError, text + "shape", op, on_line, wider)
        replicated = distribute(teacher, mesh, [Replicate()])
        refused(ValueError, text + "placements", op, on_line, replicated)


@pytest.mark.parametrize("op", PAIRS[:3], ids=str)
def test_equal_meshes_need_not_be_the_same_object(op: Op) -> None:
    student, teacher = draw(op).values()
    with on_mesh((2,)) as mesh:
        again = torch.distributed.DeviceMesh("cpu", torch.arange(2))
        assert again is not mesh
        op(distribute(student, mesh, [Shard(-1)]), distribute(teacher, again, [Shard(-1)]))
        op(distribute(student, mesh, [Shard(-1)]), distribute(teacher, again, [Shard(1)]))


def test_temperature_that_requires_grad_is_accepted_without_grad() -> None:
    logits, index = draw(OP["logprobs"]).values()
    temperature = torch.full((6,), 0.5, requires_grad=True)
    with torch.no_grad():
        expected = dv.logprobs(logits, index, temperature=temperature.detach())
        assert dv.logprobs(logits, index, temperature=temperature).equal(expected)


def test_largest_vocabularies_are_accepted() -> None:
    """fp32 can hold ids up to 2**24, and fp64 more."""
    for dtype, columns in [(torch.float32, 2**24), (torch.float64, 2**24 + 1)]:
        logits = torch.zeros(1, 1, dtype=dtype).expand(1, columns)
        assert check_logits("entropy", logits, None)[1].sizes.columns == columns


@pytest.mark.parametrize("op", ONE_EACH, ids=str)
def test_vocabularies_with_ids_beyond_fp32_are_refused(op: Op) -> None:
    """Ids travel in the dtype of the math, which must hold each of them exactly."""
    inputs = draw(op, (1,))
    for name in op.logits:
        inputs[name] = torch.zeros(1, 1).expand(1, 2**24 + 1)
    refused(
        ValueError, rf"^{op.name}: expected \w+ of at most 16777216 columns", op, *inputs.values()
    )


# ------------------------------------------------------------------ numbers of other libraries


@numbers.Integral.register
class Int64:
    """An integer that, like NumPy's, is not an int."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __int__(self) -> int:
        return self.value


@numbers.Real.register
class Float32:
    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value

    def __lt__(self, other: float) -> bool:
        return self.value < other

    __le__ = __lt__

    def __gt__(self, other: float) -> bool:
        return self.value > other

    __ge__ = __gt__

    def __eq__(self, other: object) -> bool:
        return self.value == other

    __hash__ = None


@pytest.mark.parametrize(
    "name, option, value",
    [
        ("logprobs", "vocab_size", Int64(9)),
        ("logprobs", "ignore_index", Int64(3)),
        ("logprobs", "temperature", Float32(0.5)),
        ("logprobs", "softcap", Float32(0.5)),
        ("topk_logprobs", "k", Int64(2)),
        ("topk_kl_div", "ignore_index", Int64(3)),
        ("cross_entropy", "label_smoothing", Float32(0.25)),
        ("cross_entropy", "z_loss", Float32(0.25)),
        ("js_div", "beta", Float32(0.25)),
    ],
)
def test_numbers_of_other_libraries_are_numbers(name: str, option: str, value: Any) -> None:
    op = named(name)[0]
    inputs = draw(op, vocab=9)
    own = int(value) if isinstance(value, Int64) else float(value)
    expected = op(*inputs.values(), **{option: own})
    for actual, wanted in zip(op(*inputs.values(), **{option: value}), expected, strict=True):
        assert actual.equal(wanted)


@pytest.mark.parametrize("op", PAIRS[:3], ids=str)
def test_wider_teacher_is_refused_with_the_way_out(op: Op) -> None:
    inputs = draw(op)
    wider = torch.nn.functional.pad(inputs["teacher"], (0, 6))
    text = rf"^{op.name}: expected student and teacher of the same shape.*first 10 columns"
    refused(ValueError, text, op, inputs["student"], wider)
    expected = op(*inputs.values())[0]
    assert op(inputs["student"], wider[..., :10])[0].equal(expected)


@pytest.mark.parametrize("op", PATHS, ids=str)
def test_jit_trace_runs_on_other_values(op: Op) -> None:
    """The trace keeps the sizes of its inputs as constants."""
    inputs = tuple(draw(op).values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda *inputs: op(*inputs), inputs, check_trace=False)
    again = tuple(draw(op, seed=1).values())
    for actual, wanted in zip(traced(*again), op(*again), strict=True):
        assert actual.equal(wanted)
