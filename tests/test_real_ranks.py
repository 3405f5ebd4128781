"""Faults of one rank alone, on real processes, where a wrong op would hang."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import dtensor_vocab as dv
from tests.ops import (
    OP,
    OPS,
    PAIRS,
    PATHS,
    WITH_IDS,
    Layout,
    Op,
    check,
    draw,
    expect,
    named,
    observe,
    place,
    tp,
)
from tests.oracle import assert_gradient, assert_values
from tests.ranks import World, distribute, from_parts, on_mesh, part, parts
from tests.step import compiled

two_ranks, four_ranks = pytest.mark.ranks(2), pytest.mark.ranks(4)
eager = pytest.mark.usefixtures("eager_kernels")

DP_TP = Layout((2, 2), (Shard(0), Shard(-1)))


def rank() -> int:
    return World.current.rank


def raised_everywhere(kind: type[Exception], call: Callable[[], object]) -> str:
    """The text of the error that the call raises, which is the same on every rank."""
    with pytest.raises(kind) as error:
        call()
    texts = World.current.gather(str(error.value))
    assert len(set(texts)) == 1, texts
    return str(error.value)


# ------------------------------------------------------------------ results and payloads


@two_ranks
@pytest.mark.parametrize("op", named("logprobs", "kl_div", "cross_entropy"), ids=str)
def test_two_ranks_with_compiled_kernels(op: Op) -> None:
    observed = check(op, draw(op, (3, 2), 7), tp(2))
    names = [collective.name for collective in observed.forward]
    assert World.current.gather(names) == [names] * 2


@four_ranks
@eager
@pytest.mark.parametrize("op", OPS, ids=str)
def test_four_ranks_match_the_oracle_and_send_the_same_payload(op: Op) -> None:
    """Some shards are empty, and all ranks have the same collectives with the same payload."""
    for vocab in (10, 5, 2):
        observed = check(op.within(vocab), draw(op, vocab=vocab), tp(4))
        mine = [(c.name, *c.payload.values()) for c in observed.forward + observed.backward]
        assert World.current.gather(mine) == [mine] * 4


@four_ranks
@eager
@pytest.mark.parametrize("op", OPS, ids=str)
def test_data_and_tensor_parallel(op: Op) -> None:
    """With one row, a data-parallel rank has none."""
    for rows in (6, 1, 0):
        observed = check(op, draw(op, (rows,)), DP_TP)
        names = [c.name for c in observed.forward]
        assert World.current.gather(names) == [names] * 4


@four_ranks
@eager
@pytest.mark.parametrize("op", WITH_IDS, ids=str)
def test_ids_all_ignored_on_one_data_parallel_rank(op: Op) -> None:
    inputs = draw(op)
    inputs[op.ids_name][:3] = -100
    check(op, inputs, DP_TP)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda out: out.sum(),
    "full_tensor": lambda out: out.full_tensor().sum(),
    "to_local": lambda out: out.to_local().sum(),
    "redistributed": lambda out: (
        out.redistribute(placements=[Replicate(), Replicate()]).sum().to_local()
    ),
}


@four_ranks
@eager
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_is_the_same_for_every_way_to_sum_the_result(loss: str) -> None:
    op = OP["logprobs"]
    inputs = draw(op)
    expected = expect(op, inputs, [torch.ones(6)]).gradients["logits"]
    with on_mesh(DP_TP.mesh) as mesh:
        placed = {name: place(name, x, mesh, DP_TP, inputs) for name, x in inputs.items()}
        logits = placed["logits"].requires_grad_()
        LOSSES[loss](op(*placed.values())[0]).backward()
        assert logits.grad.placements == (Shard(0), Shard(1))
        assert_gradient(logits.grad.full_tensor(), expected)


# ------------------------------------------------------------------ a fault of one rank alone


@two_ranks
@eager
@pytest.mark.parametrize("ids", ["plain", "DTensor"])
@pytest.mark.parametrize("op", WITH_IDS, ids=str)
def test_bad_id_on_one_rank(op: Op, ids: str) -> None:
    """All ranks raise, none waits, and the next call works."""
    inputs = draw(op)
    name = op.arguments[-1]
    for bad, grad in itertools.product((10, -1, 2**31), (True, False)):
        if rank() == 1:
            inputs[name][2] = bad
        with on_mesh((2,)) as mesh:
            placed = {n: place(n, x, mesh, tp(2), inputs) for n, x in inputs.items()}
            placed[name] = inputs[name] if ids == "plain" else placed[name]
            with torch.set_grad_enabled(grad):
                call = functools.partial(op, *placed.values())
                text = raised_everywhere(RuntimeError, call)
        assert text.startswith(f"{op.name}: expected ids in the range 0 <= id < 10")
    check(op, draw(op), tp(2))


@two_ranks
@eager
@pytest.mark.parametrize("op", [op for op in PATHS if op.name != "argmax"], ids=str)
def test_bad_temperature_on_one_rank(op: Op) -> None:
    inputs, temperature = draw(op), torch.full((6,), 0.5)
    for bad in (0.0, torch.nan):
        if rank() == 1:
            temperature[-1] = bad
        with on_mesh((2,)) as mesh:
            placed = [place(n, x, mesh, tp(2), inputs) for n, x in inputs.items()]
            call = functools.partial(op, *placed, temperature=temperature)
            text = raised_everywhere(RuntimeError, call)
        assert text.startswith(f"{op.name}: expected 0 < temperature < inf")


def check_bad_row(layout: Layout, reduction: str, call: Callable[..., Tensor]) -> None:
    """The reduction passes the fault to ranks with other rows, which would wait for the sum."""
    op = OP["cross_entropy(reduction=mean,z_loss=0.1)"].with_options(reduction=reduction)
    inputs = draw(op, (4,))
    inputs["target"][3] = 10 if rank() == dist.get_world_size() - 1 else 3
    with on_mesh(layout.mesh) as mesh:
        placed = [place(n, x, mesh, layout, inputs) for n, x in inputs.items()]
        text = raised_everywhere(RuntimeError, lambda: call(op)(*placed))
    assert "cross_entropy: expected ids in the range 0 <= id < 10" in text
    check(op, draw(op, (4,)), layout)


@two_ranks
@eager
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_bad_id_in_rows_of_one_rank(reduction: str) -> None:
    check_bad_row(Layout((2,), (Shard(0),)), reduction, lambda op: op)


@two_ranks
@eager
def test_bad_id_in_rows_of_one_rank_compiled() -> None:
    def call(op: Op) -> Callable[..., Tensor]:
        return compiled(lambda *inputs: op(*inputs)[0], backend="aot_eager")

    check_bad_row(Layout((2,), (Shard(0),)), "mean", call)


@four_ranks
@eager
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_bad_id_on_one_rank_of_dp_and_tp(reduction: str) -> None:
    check_bad_row(Layout((2, 2), (Shard(0), Shard(-1))), reduction, lambda op: op)


@two_ranks
@pytest.mark.parametrize("op", [OP["logprobs"]], ids=str)
def test_bad_id_on_one_rank_with_compiled_kernels(op: Op) -> None:
    logits, index = draw(op, vocab=7).values()
    if rank() == 1:
        index[2] = 7
    with on_mesh((2,)) as mesh:
        placed = distribute(logits, mesh, [Shard(-1)]).requires_grad_()
        text = raised_everywhere(RuntimeError, lambda: dv.logprobs(placed, index))
    assert "0 <= id < 7" in text


@two_ranks
@eager
@pytest.mark.parametrize("op", [OP["logprobs(K=3)"], OP["cross_entropy(reduction=none)"]], ids=str)
def test_another_ignore_index_on_one_rank(op: Op) -> None:
    """The ranks disagree only on ids equal to either, which are out of range on the other rank."""
    inputs = draw(op)
    ignored = -100 if rank() == 0 else -1
    check(op, inputs, tp(2), ignore_index=ignored)
    inputs[op.ids_name][2] = -100
    with on_mesh((2,)) as mesh:
        placed = [place(n, x, mesh, tp(2), inputs) for n, x in inputs.items()]
        with pytest.raises(
            RuntimeError, match=f"{op.name}: expected ids in the range 0 <= id < 10"
        ):
            op(*placed, ignore_index=ignored)
    check(op, draw(op), tp(2))


@two_ranks
@eager
@pytest.mark.parametrize("op", [op for op in PATHS if not op.constant], ids=str)
def test_payload_where_one_rank_alone_needs_a_gradient(op: Op) -> None:
    """Ranks send the same, whichever inputs they differentiate."""
    inputs = draw(op)
    observed = check(op, inputs, tp(2), needs=op.differentiable if rank() == 0 else ())
    sent = [(c.name, *c.payload.values()) for c in observed.forward]
    assert World.current.gather(sent) == [sent, sent]


@two_ranks
@eager
@pytest.mark.parametrize("op", PATHS, ids=str)
def test_half_precision_on_one_rank_alone(op: Op) -> None:
    """Shards of two dtypes with the same math dtype give the right values."""
    inputs = draw(op, dtype=torch.bfloat16)
    if rank() == 0:
        inputs = {n: x.float() if n in op.logits else x for n, x in inputs.items()}
    check(op, inputs, tp(2))


def submesh(names: tuple[str, ...]) -> DeviceMesh:
    """The tensor-parallel ranks of a mesh of dp x cp x tp, alone or beside dp and cp flattened."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    if names[0] == "rows":
        mesh["dp", "cp"]._flatten("rows")
    return mesh[names]


@four_ranks
@eager
@pytest.mark.parametrize("names", [("tp",), ("rows", "tp"), ("cp", "tp")], ids="-".join)
@pytest.mark.parametrize("op", named("logprobs", "kl_div", "cross_entropy"), ids=str)
def test_submesh_matches_the_oracle(op: Op, names: tuple[str, ...]) -> None:
    """Each copy of the submesh has its own rows, unless the submesh shards the rows."""
    mesh = submesh(names)
    seed = 0 if names[0] == "rows" else rank() // 2
    inputs = draw(op, seed=seed)
    layout = Layout(tuple(mesh.shape), (Shard(0), Shard(-1))[-len(names) :])
    expected = expect(op, inputs)
    observed = observe(op, inputs, mesh, layout, expected.grads)
    for out, value in zip(observed.outputs, expected.outputs, strict=True):
        placements = layout.rows(2) if value.dim() else layout.nowhere
        assert_values(parts(out)[rank()], part(value, mesh.shape, placements, rank()))
    for name, gradient in expected.gradients.items():
        local = part(gradient, mesh.shape, layout.placements, rank())
        assert_gradient(parts(observed.gradients[name])[rank()], local)


@two_ranks
@eager
@pytest.mark.parametrize("op", PATHS, ids=str)
def test_ranks_that_disagree_on_the_vocabulary(op: Op) -> None:
    """The shards have 3 and 2 columns, and each rank takes V for twice its own share."""
    inputs = draw(op, vocab=5)
    for name in op.arguments:  # in range for every rank's idea of V
        if name not in op.logits and not inputs[name].is_floating_point():
            inputs[name] %= 4
    with on_mesh((2,)) as mesh:
        placed = [
            from_parts({rank(): x.split([3, 2], -1)[rank()].contiguous()}, mesh, [Shard(-1)])
            if name in op.logits
            else x
            for name, x in inputs.items()
        ]
        text = raised_everywhere(RuntimeError, lambda: op(*placed))
    assert text.startswith(f"{op.name}: expected each rank to hold the torch.chunk share")
    check(op, draw(op, vocab=5), tp(2))


@four_ranks
@eager
@pytest.mark.parametrize("vocab", [10, 7], ids=["one less", "one for several"])
@pytest.mark.parametrize("op", PAIRS, ids=str)
def test_shards_of_other_sizes(op: Op, vocab: int) -> None:
    """One or both of the logits are split by ``torch.tensor_split``, or in its reverse order."""
    inputs = draw(op, vocab=vocab)
    sizes = [len(chunk) for chunk in torch.arange(vocab).tensor_split(4)]
    if vocab == 7:  # 1, 2, 2, 2, where torch.chunk gives 2, 2, 2, 1
        sizes.reverse()
    for dtype, which in itertools.product((torch.float32, torch.float64), ((0,), (1,), (0, 1))):
        inputs["teacher"] = inputs["teacher"].to(dtype)
        with on_mesh((4,)) as mesh:
            placed = {name: distribute(x, mesh, [Shard(-1)]) for name, x in inputs.items()}
            for name in (op.logits[i] for i in which):
                local = inputs[name].split(sizes, -1)[rank()].contiguous()
                placed[name] = from_parts({rank(): local}, mesh, [Shard(-1)], (6, vocab))
            text = raised_everywhere(RuntimeError, functools.partial(op, *placed.values()))
        assert text.startswith(f"{op.name}: expected each rank to hold the torch.chunk share")


@two_ranks
@eager
def test_uneven_shards_with_the_global_shape_are_exact() -> None:
    op = OP["logprobs"]
    inputs = draw(op, vocab=5)
    with on_mesh((2,)) as mesh:
        local = inputs["logits"].split([3, 2], -1)[rank()].contiguous()
        logits = from_parts({rank(): local}, mesh, [Shard(-1)], (6, 5))
        out = dv.logprobs(logits, inputs["index"])
    assert_values(parts(out)[rank()], expect(op, inputs).outputs[0])


@two_ranks
@eager
@pytest.mark.parametrize("op", PATHS, ids=str)
def test_invalid_arguments_raise_the_same_error_on_every_rank(op: Op) -> None:
    """Partial logits and a wrong vocab_size raise the same text, and no rank waits."""
    inputs = draw(op)
    with on_mesh((2,)) as mesh:
        partial = [
            from_parts({rank(): x}, mesh, [Partial()], x.shape) if name in op.logits else x
            for name, x in inputs.items()
        ]
        assert "Partial" in raised_everywhere(ValueError, lambda: op(*partial))
        sharded = [
            distribute(x, mesh, [Shard(-1)]) if name in op.logits else x
            for name, x in inputs.items()
        ]
        raised_everywhere(ValueError, lambda: op(*sharded, vocab_size=11))


# ------------------------------------------------------------------ a column-parallel LM head


def train_head(head: nn.Module, hidden: Tensor, index: Tensor, teacher: Tensor) -> list[Tensor]:
    """Returns a loss of several ops, and the gradients of the head and of its input."""
    logits = head(hidden)
    loss = (
        -dv.logprobs(logits, index).mean()
        - 0.1 * dv.entropy(logits).mean()
        + dv.kl_div(logits, teacher, reverse=True).mean()
    )
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    loss.backward()
    return [loss.detach(), head.weight.grad, hidden.grad]


def train_like_one_process(ranks: int) -> None:
    """Gradients equal those of one process, without a factor of the number of ranks."""
    torch.manual_seed(1)
    weight, teacher = torch.randn(11, 8), torch.randn(5, 11)
    index = torch.randint(11, (5,))
    hidden = torch.randn(5, 8)

    def fresh() -> tuple[nn.Linear, Tensor]:
        head = nn.Linear(8, 11, bias=False)
        head.weight.data.copy_(weight)
        return head, hidden.clone().requires_grad_()

    expected = train_head(*fresh(), index, teacher)
    with on_mesh((ranks,)) as mesh:
        head, leaf = fresh()
        style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        head = parallelize_module(head, mesh, style)
        loss, to_weight, to_hidden = train_head(
            head, leaf, index, distribute(teacher, mesh, [Shard(-1)])
        )
        to_weight = to_weight.full_tensor()
    for actual, wanted in zip((loss, to_weight, to_hidden), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


@two_ranks
@eager
def test_column_parallel_head_on_two_ranks() -> None:
    train_like_one_process(2)


@four_ranks
@eager
def test_column_parallel_head_on_four_ranks() -> None:
    train_like_one_process(4)
