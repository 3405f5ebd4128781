"""``softcap``: c tanh(x / c) in place of the logits, inside the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.testing import assert_close

import dtensor_vocab as dv
from dtensor_vocab import linear_blocks
from tests.ops import LINEAR_PATHS, OP, OPS, PATHS, Layout, Op, check, draw, expect, named, tp

eager = pytest.mark.usefixtures("eager_kernels")

DP_TP = Layout((2, 2), (Shard(0), Shard(-1)))
INPLACE = named("logprobs", "entropy", "logprobs_and_entropy", "cross_entropy")
DIFFERENTIABLE = [op for op in OPS if not op.constant]


def cap(x: Tensor, c: float) -> Tensor:
    return c * torch.tanh(x / c)


@eager
@pytest.mark.parametrize("layout", [None, DP_TP], ids=str)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_softcap_comes_before_temperature_and_padding(op: Op, layout: Layout | None) -> None:
    options: dict[str, Any] = {} if op.name == "argmax" else {"temperature": 0.7}
    inputs = draw(op)
    check(op, inputs, layout, softcap=1.5)
    if op.ids_name:
        inputs[op.ids_name].clamp_(max=7)
    if op.ids_name != "teacher_ids":  # They must differ.
        check(op, inputs, layout, softcap=2, vocab_size=8, **options)


@eager
@pytest.mark.parametrize("op", LINEAR_PATHS, ids=str)
def test_softcap_of_linear_logits(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_blocks, "BLOCK_BYTES", 1)
    for layout in (None, tp(2)):
        check(op, draw(op, (6,), 50), layout, softcap=2.0)


@pytest.mark.parametrize("op", [op for op in PATHS if op.name != "entropy"], ids=str)
def test_compiled_kernels_cap(op: Op) -> None:
    for c in (2.0, 30.0):  # One kernel serves both.
        check(op, draw(op, (5,), 40), softcap=c)


@eager
@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=str)
def test_masked_logits_are_capped_too(op: Op) -> None:
    """By the formula -inf becomes -c: masks go after the cap."""
    inputs = draw(op)
    for name in op.logits:
        inputs[name][:, ::3] = -torch.inf
        inputs[name][2] = -torch.inf
    for layout in (None, tp(2)):
        check(op, inputs, layout, softcap=2.0)


@eager
@pytest.mark.parametrize("op", named("logprobs", "kl_div"), ids=str)
def test_nan_stays_nan_and_inf_is_capped(op: Op) -> None:
    inputs = draw(op)
    inputs[op.logits[0]][1, 3] = torch.nan
    inputs[op.logits[0]][2, 4] = torch.inf
    check(op, inputs, softcap=2.0)


@eager
@pytest.mark.parametrize("op", PATHS, ids=str)
def test_shard_of_padding_has_no_mass(op: Op) -> None:
    """Padding stays -inf, although the cap of -inf is finite."""
    inputs = draw(op)
    for name in op.logits:
        inputs[name][:3] = -1e6
    if op.ids_name != "teacher_ids":
        if op.ids_name:
            inputs[op.ids_name].clamp_(max=3)
        check(op, inputs, tp(2), softcap=200.0, vocab_size=4)


@eager
@pytest.mark.parametrize("op", OPS, ids=str)
def test_empty_shard_has_no_mass(op: Op) -> None:
    """The last of 4 ranks owns nothing of V = 5."""
    check(op, draw(op, vocab=5), tp(4), softcap=3.0)


SCALES = {"far below c": 1e-4, "around c": 1.0, "far above c": 2.0}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["logprobs", "entropy", "kl_div", "js_div(beta=0.3)"])
def test_values_and_gradients_keep_their_digits(name: str, scale: str) -> None:
    """Each entry of a gradient has a small relative error, also where the tanh is near 1."""
    op, c = OP[name], 1e4
    temperature = min(SCALES[scale], 1) * c / 4
    inputs = draw(op, (64,), 33)
    for logits in op.logits:
        inputs[logits] = inputs[logits] / 2 * SCALES[scale] * c
    expected = expect(op, inputs, softcap=c, temperature=temperature)
    leaves = [inputs[logits].requires_grad_() for logits in op.logits]
    (out,) = op(*inputs.values(), softcap=c, temperature=temperature)
    assert_close(out.double(), expected.outputs[0], rtol=2e-6, atol=2e-6)
    grads = torch.autograd.grad(out, leaves, expected.grads[0].float())
    for logits, grad in zip(op.logits, grads, strict=True):
        exact = expected.gradients[logits]
        # What the softmax alone loses is relative to the largest entry before the cap.
        slope = 1 / torch.cosh(inputs[logits].detach().double() / c).square()
        allowed = 1e-4 * slope * (exact / slope).abs().max()
        assert ((grad - exact).abs() <= allowed).all()


@eager
@pytest.mark.parametrize("op", INPLACE, ids=str)
def test_gradient_in_place_of_the_logits(op: Op) -> None:
    gradients = []
    for inplace in (False, True):
        inputs = draw(op)
        logits = inputs["logits"].requires_grad_()
        out = op(*inputs.values(), softcap=2.0, inplace_backward=inplace)
        gradients.append(torch.autograd.grad(out[0].sum(), logits)[0])
    assert gradients[0].equal(gradients[1])


@eager
def test_argmax_is_not_changed_by_saturation() -> None:
    """The tanh of different logits may round to the same number. Their order is known."""
    logits = torch.tensor([[1e3, 2e3, 1.5e3], [-torch.inf, -1e6, -2e6]])
    assert dv.argmax(logits, softcap=1.0).tolist() == [1, 1]
    log_p, ids = dv.topk_logprobs(logits, 3, softcap=1.0)
    assert ids.tolist() == [[1, 2, 0], [1, 2, 0]]
    assert_close(log_p, torch.full((2, 3), 1 / 3).log())


@eager
@pytest.mark.parametrize("s", [0.0625, 16.0])
def test_scale_of_a_model_is_a_temperature(s: float) -> None:
    """Models that multiply their logits by s, such as Cohere and Granite."""
    op = OP["logprobs"]
    inputs = draw(op)
    logits = inputs["logits"].requires_grad_()
    outputs = (
        dv.logprobs(logits, inputs["index"], temperature=1 / s),
        dv.logprobs(logits * s, inputs["index"]),
    )
    assert_close(*outputs)
    assert_close(*(torch.autograd.grad(out.sum(), logits)[0] for out in outputs))


BAD = [
    (0.0, ValueError, "0 < softcap < inf, .*got 0.0"),
    (-30, ValueError, "0 < softcap < inf, .*got -30"),
    (torch.inf, ValueError, "0 < softcap < inf, .*got inf"),
    (torch.nan, ValueError, "0 < softcap < inf, .*got nan"),
    (1e-60, ValueError, "0 < softcap < inf, a normal number in float32, got 1e-60"),
    ("30", TypeError, "softcap to be a float or None, got str"),
    (True, TypeError, "softcap to be a float or None, got bool"),
    (torch.tensor(30.0), TypeError, "softcap to be a float or None, got Tensor"),
]


@pytest.mark.parametrize("value, kind, text", BAD, ids=str)
def test_invalid_softcaps_are_refused(value: Any, kind: type[Exception], text: str) -> None:
    for name in {op.name: op for op in OPS}:
        op = named(name)[0]
        with pytest.raises(kind, match=f"^{name}: expected {text}"):
            op(*draw(op).values(), softcap=value)
