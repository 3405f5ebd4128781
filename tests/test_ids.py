"""Ids: range, shard edges, dtypes, strides and placements, K ids per row, ignored ids, no rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dtensor_vocab.ids import sum_equal
from tests.ops import OP, OPS, WITH_IDS, Layout, Op, check, draw, expect, named, place, tp
from tests.oracle import assert_values
from tests.ranks import Collectives, distribute, on_mesh, part, parts

pytestmark = pytest.mark.usefixtures("eager_kernels")

R, S0 = Replicate(), Shard(0)
DP_TP = Layout((2, 2), (S0, Shard(-1)))
PLAIN_OR_MESH = pytest.mark.parametrize("layout", [None, DP_TP], ids=str)


def k_ids(op: Op, k: int) -> Op:
    """An op that takes [*, K] ids, for this K."""
    return Op(op.name, op.arguments, ids=(k,), options=op.options)


MANY = [op for op in named("logprobs") if op.ids]
PATHS_WITH_IDS = list({op.name: op for op in WITH_IDS}.values())


# ------------------------------------------------------------------ out of range

BAD = {
    "V": (10, -100),
    "-1": (-1, -100),
    "another ignored": (-100, -1),
    "nothing ignored": (-100, None),
    "2**31": (2**31, -100),
    "-2**40": (-(2**40), -100),
}


@PLAIN_OR_MESH
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("op", PATHS_WITH_IDS, ids=str)
def test_id_out_of_range_is_an_error(op: Op, bad: str, layout: Layout | None) -> None:
    """The error names the function and the range, and the next call works."""
    inputs = draw(op)
    bad_id, ignore_index = BAD[bad]
    options = {"ignore_index": ignore_index}
    inputs[op.ids_name][4] = bad_id
    text = f"{op.name}: expected ids in the range 0 <= id < 10"
    if ignore_index is not None:
        text += f" or id == ignore_index ({ignore_index})"
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError) as error:
            call(op, inputs, layout, **options)
        assert str(error.value).startswith(f"{text}, got")
    check(op, draw(op), layout)


@PLAIN_OR_MESH
@pytest.mark.parametrize("op", WITH_IDS, ids=str)
def test_id_of_padding_is_an_error(op: Op, layout: Layout | None) -> None:
    inputs = draw(op, vocab=8)
    inputs[op.logits[0]] = torch.nn.functional.pad(inputs[op.logits[0]], (0, 2))
    check(op, inputs, layout, vocab_size=8)
    inputs[op.ids_name][5] = 8
    with pytest.raises(RuntimeError, match=r"0 <= id < 8\b"):
        call(op, inputs, layout, vocab_size=8)


def call(op: Op, inputs: dict[str, Tensor], layout: Layout | None, **options: Any) -> None:
    if layout is None:
        op(*inputs.values(), **options)
        return
    with on_mesh(layout.mesh) as mesh:
        op(*(place(name, x, mesh, layout, inputs) for name, x in inputs.items()), **options)


# ------------------------------------------------------------------ which shard owns an id


@pytest.mark.parametrize("op", WITH_IDS, ids=str)
@pytest.mark.parametrize("vocab, ranks", [(7, 2), (3, 4)])
def test_every_id_over_shard_edges(op: Op, vocab: int, ranks: int) -> None:
    inputs = draw(op, (vocab,), vocab)
    ids = inputs[op.ids_name]
    first = torch.arange(vocab) if ids.dim() == 1 else torch.arange(vocab).unsqueeze(-1)
    ids.copy_((first + torch.arange(ids.shape[-1] if ids.dim() > 1 else 1)) % vocab)
    check(op, inputs, tp(ranks))


@PLAIN_OR_MESH
@pytest.mark.parametrize("op", PATHS_WITH_IDS, ids=str)
def test_int32_ids(op: Op, layout: Layout | None) -> None:
    inputs = draw(op)
    inputs[op.ids_name] = inputs[op.ids_name].int()
    check(op, inputs, layout)


STRIDED = {
    "transposed": lambda ids: ids.transpose(0, 1).contiguous().transpose(0, 1),
    "every other": lambda ids: ids.repeat_interleave(2, dim=1)[:, ::2],
    "expanded": lambda ids: ids[:1].expand(ids.shape),
}


@PLAIN_OR_MESH
@pytest.mark.parametrize("strided", STRIDED)
@pytest.mark.parametrize("op", PATHS_WITH_IDS, ids=str)
def test_strided_ids(op: Op, strided: str, layout: Layout | None) -> None:
    inputs = draw(op, (4, 3))
    ids = STRIDED[strided](inputs[op.ids_name])
    assert not ids.is_contiguous()
    check(op, {**inputs, op.ids_name: ids}, layout)


@pytest.mark.parametrize("op", WITH_IDS, ids=str)
def test_plain_ids_are_the_global_ones_on_every_rank(op: Op) -> None:
    inputs = draw(op)
    expected = expect(op, inputs)
    with on_mesh((2,)) as mesh:
        logits = place(op.logits[0], inputs[op.logits[0]], mesh, tp(2), inputs)
        outputs = op(logits, *list(inputs.values())[1:])
    for local in parts(outputs[0]).values():
        assert_values(local, expected.outputs[0])


@pytest.mark.parametrize("op", PATHS_WITH_IDS, ids=str)
@pytest.mark.parametrize("placements", [(S0, S0), (R, S0), (R, R)], ids=str)
def test_ids_with_other_placements_are_redistributed_once(
    op: Op, placements: tuple[Placement, ...]
) -> None:
    inputs = draw(op, (8,))
    (expected, *_) = expect(op, inputs).outputs
    with on_mesh((2, 2)) as mesh:
        logits = distribute(inputs[op.logits[0]], mesh, DP_TP.placements).requires_grad_()
        rows = [distribute(x, mesh, placements) for x in list(inputs.values())[1:]]
        with Collectives() as of_rows:
            for x in rows:
                x.redistribute(placements=(S0, R))
        with Collectives() as forward:
            (out, *_) = op(logits, *rows)
        with Collectives() as backward:
            out.sum().backward()
    sums = 1 if op.reduces_rows else 0
    assert len(forward.seen) == len(of_rows.seen) + len(op.numbers) + sums
    assert not backward.seen
    wanted = (S0, R) if expected.dim() else (R, R)
    for rank, local in parts(out).items():
        assert_values(local.detach(), part(expected, (2, 2), wanted, rank))


@pytest.mark.parametrize("ignore_index", [2**32, -(2**63)])
def test_ignore_index_beyond_int32_matches_no_int32_id(ignore_index: int) -> None:
    op, inputs = OP["logprobs"], draw(OP["logprobs"])
    inputs["index"] = torch.zeros(6, dtype=torch.int32)
    check(op, inputs, ignore_index=ignore_index)


# ------------------------------------------------------------------ K ids per row


@PLAIN_OR_MESH
@pytest.mark.parametrize("op", MANY, ids=str)
def test_zero_ids_per_row(op: Op, layout: Layout | None) -> None:
    op = k_ids(op, 0)
    observed = check(op, draw(op), layout)
    assert observed.outputs[0].shape == (6, 0)
    assert observed.outputs[0].requires_grad


@PLAIN_OR_MESH
@pytest.mark.parametrize("op", MANY, ids=str)
def test_repeated_ids_add_up(op: Op, layout: Layout | None) -> None:
    op = k_ids(op, 3)
    inputs = draw(op, (2,), 8)
    inputs["index"] = torch.tensor([[1, 1, 6], [5, 5, 5]])
    check(op, inputs, layout)


@PLAIN_OR_MESH
@pytest.mark.parametrize("op", MANY, ids=str)
def test_equal_sizes_of_rows_ids_and_vocabulary(op: Op, layout: Layout | None) -> None:
    op = k_ids(op, 2)
    check(op, draw(op, (2, 2), 2), layout)


@PLAIN_OR_MESH
@pytest.mark.parametrize("op", MANY, ids=str)
def test_some_of_the_ids_ignored(op: Op, layout: Layout | None) -> None:
    op = k_ids(op, 4)
    inputs = draw(op)
    inputs["index"][:, 1] = -100
    inputs["index"][2, :3] = -100
    inputs["index"][4] = -100
    check(op, inputs, layout)
    inputs["index"][inputs["index"] == -100] = 3
    check(op, inputs, layout, ignore_index=3)


@PLAIN_OR_MESH
@pytest.mark.parametrize("k", [64, 200])
@pytest.mark.parametrize("op", MANY, ids=str)
def test_more_ids_than_tokens(op: Op, k: int, layout: Layout | None) -> None:
    """64 ids are compared with each other, 200 are sorted."""
    op = k_ids(op, k)
    check(op, draw(op), layout)


@pytest.mark.parametrize("k", [3, 200], ids=["compared", "sorted"])
def test_small_sums_of_equal_ids_survive_large_ones(k: int) -> None:
    ids = torch.arange(k).unsqueeze(0)
    values = torch.ones(1, k)
    values[0, 0] = 1e9
    (sums,) = sum_equal(ids, values)
    assert sums.equal(values)


# ------------------------------------------------------------------ no rows, no ids


@PLAIN_OR_MESH
@pytest.mark.parametrize("rows", [(0,), (2, 0)], ids=str)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_zero_rows_give_empty_results(op: Op, rows: tuple[int, ...], layout: Layout | None) -> None:
    observed = check(op, draw(op, rows), layout)
    if not op.constant:
        assert observed.outputs[0].requires_grad


@PLAIN_OR_MESH
@pytest.mark.parametrize("op", WITH_IDS, ids=str)
def test_result_is_zero_where_all_ids_are_ignored(op: Op, layout: Layout | None) -> None:
    inputs = draw(op)
    inputs[op.ids_name].fill_(-100)
    observed = check(op, inputs, layout)
    assert observed.outputs[0].requires_grad
    assert all((local == 0).all() for local in parts(observed.outputs[0]).values())


@pytest.mark.parametrize("op", WITH_IDS, ids=str)
def test_ignored_ids_on_one_data_parallel_rank_keep_the_collectives(op: Op) -> None:
    inputs = draw(op)
    full = check(op, inputs, DP_TP)
    inputs[op.ids_name][:3] = -100
    half = check(op, inputs, DP_TP)
    assert half.forward == full.forward
