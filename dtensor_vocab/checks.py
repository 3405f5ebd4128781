"""Checks the public functions' arguments from global metadata and converts them to one form.

All ranks see the same metadata, so all raise the same error before any communication. The exception
is a DTensor whose global shape differs from rank to rank, such as ``from_local`` of uneven shards
makes without ``shape=``: an argument that is invalid on some ranks only, for example
``vocab_size``, then raises only there.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_vocab.layout import (
    Vocabulary,
    local_tensor,
    place_vocabulary,
    replicated,
    shards_vocab,
)
from dtensor_vocab.linear_logits import (
    LinearLogits,
    Logits,
    cast_by_autocast,
    is_dtensor,
)
from dtensor_vocab.numerics import math_dtype

__all__ = [
    "check_bool",
    "check_ids",
    "check_ignore_index",
    "check_inplace_backward",
    "check_int",
    "check_k",
    "check_logits",
    "check_logprobs",
    "check_seed",
    "check_softcap",
    "check_teacher",
    "check_temperature",
    "check_weight",
    "placed_by_row",
    "saveable",
]

MAX_COLUMNS = 1 << 24
LOGITS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_logits(
    function: str, logits: Logits, vocab_size: int | None, name: str = "logits"
) -> tuple[Logits, Vocabulary]:
    """Checks ``logits [*, V]`` and ``vocab_size``.

    Returns the logits in a form that autograd can save, and the layout of the vocabulary.
    """
    logits, vocab_dim = _check_one(function, logits, name)
    columns = logits.shape[-1]
    if torch.jit.is_tracing():  # Tracing makes sizes tensors (torch 2.11 to 2.14).
        columns = int(columns)
    vocab_size = (
        columns
        if vocab_size is None
        else check_int(function, vocab_size, "vocab_size", "an int or None")
    )
    if not 0 < vocab_size <= columns:
        raise ValueError(
            f"{function}: expected 0 < vocab_size <= {columns}, the columns of {name}, "
            f"got {vocab_size}"
        )
    return logits, place_vocabulary(logits, vocab_dim, columns, vocab_size)


def _check_one(function: str, logits: Logits, name: str) -> tuple[Logits, int | None]:
    """Checks logits. Returns them, and the mesh dim that shards the vocabulary or None."""
    if isinstance(logits, LinearLogits):
        logits = _check_operands(function, logits, name)
    else:
        _check_tensor(function, logits, name)
        _check_dtype(function, logits, name)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"{function}: expected {name} of shape [*, V] with V > 0, got {tuple(logits.shape)}"
        )
    if logits.shape[-1] > MAX_COLUMNS and logits.dtype != torch.float64:
        raise ValueError(
            f"{function}: expected {name} of at most {MAX_COLUMNS} columns unless they are fp64, "
            f"because fp32 cannot hold larger ids, got {logits.shape[-1]}"
        )
    if isinstance(logits, LinearLogits):
        return logits, _vocab_mesh_dim_of_weight(function, logits, name)
    return saveable(logits), _vocab_mesh_dim(function, logits, name)


def _check_dtype(function: str, x: Tensor, name: str) -> None:
    if x.dtype not in LOGITS_DTYPES:
        wanted = "of dtype float16, bfloat16, float32 or float64"
        raise TypeError(f"{function}: expected {name} {wanted}, got {x.dtype}")


def _vocab_mesh_dim(function: str, logits: Tensor, name: str) -> int | None:
    """The mesh dim that shards the vocabulary, or None. Raises if placements are unsupported."""
    if not isinstance(logits, DTensor):
        return None
    found = None
    for mesh_dim, placement in enumerate(logits.placements):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            cure = "redistribute Partial logits to Shard(-1) or Replicate()"
        elif not isinstance(placement, Shard):
            cure = f"redistribute {placement} to Shard or Replicate()"
        elif not shards_vocab(placement, logits):
            continue
        elif found is not None:
            cure = "redistribute one of the two mesh dims of the vocabulary to Replicate()"
        else:
            found = mesh_dim
            continue
        raise ValueError(
            f"{function}: expected {name} placed as Shard(-1) on at most one mesh dim and as "
            "Replicate() or Shard(d) of a leading dim d on the others, got "
            f"{_placed(logits)}; {cure}"
        )
    return found


def _placed(x: Any) -> str:
    return f"{tuple(x.placements)} on {x.device_mesh}"


# ---- operands of LinearLogits


def _check_operands(function: str, logits: LinearLogits, name: str) -> LinearLogits:
    """Checks operands. Returns them as ``F.linear`` would cast them under autocast."""
    for field, x in logits._asdict().items():
        if field != "bias" or x is not None:
            _check_tensor(function, x, f"{name}.{field}")
            _check_dtype(function, x, f"{name}.{field}")
    hidden, weight, bias = logits = cast_by_autocast(logits)
    if hidden.dim() == 0 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{function}: expected {name}.hidden of shape [*, H] and {name}.weight of shape "
            f"[V, H], got {list(hidden.shape)} and {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{function}: expected {name}.bias of shape {list(weight.shape[:1])} for {name}.weight "
            f"of shape {list(weight.shape)}, got {list(bias.shape)}"
        )
    _check_alike(function, f"{name}.hidden", hidden, f"{name}.weight", weight)
    if bias is not None:
        _check_alike(function, f"{name}.weight", weight, f"{name}.bias", bias)
    bias = bias if bias is None else saveable(bias)
    return LinearLogits(saveable(hidden), saveable(weight), bias)


def _check_alike(function: str, name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    """Checks that two operands have the same dtype, device and mesh."""
    names = f"{name} and {other_name}"
    if x.dtype != other.dtype:
        raise TypeError(
            f"{function}: expected {names} of the same dtype, got {x.dtype} and {other.dtype}"
        )
    facts = [("device", x.device, other.device), ("kind", _kind(x), _kind(other))]
    if isinstance(x, DTensor) and isinstance(other, DTensor):
        facts.append(("mesh", x.device_mesh, other.device_mesh))
    for fact, mine, its in facts:
        if mine != its:
            cure = "" if fact == "device" else _CURE_OF_KIND
            raise ValueError(
                f"{function}: expected {names} of the same {fact}, got {mine} and {its}{cure}"
            )


_CURE_OF_KIND = (
    "; wrap a hidden state with DTensor.from_local, and use a weight that FSDP2 shards only inside "
    "the forward of a module that holds it"
)


def _vocab_mesh_dim_of_weight(function: str, logits: LinearLogits, name: str) -> int | None:
    """The mesh dim that shards the vocabulary, or None. Raises if placements are unsupported."""
    hidden, weight, bias = logits
    if not isinstance(hidden, DTensor):
        return None
    found = None
    for mesh_dim, (of_hidden, of_weight) in enumerate(
        zip(hidden.placements, weight.placements, strict=True)  # type: ignore[attr-defined]
    ):
        if isinstance(of_weight, Shard) and of_weight.dim % 2 == 0:
            if found is not None:
                cure = f"redistribute {name}.weight to Replicate() on one of two mesh dims"
            elif not of_hidden.is_replicate():
                cure = f"redistribute {name}.hidden to Replicate() on mesh dim {mesh_dim}"
            else:
                found = mesh_dim
                continue
        elif not of_weight.is_replicate():
            cure = f"redistribute {name}.weight to Shard(0) or Replicate()"
        elif of_hidden.is_replicate() or (
            isinstance(of_hidden, Shard) and not shards_vocab(of_hidden, hidden)
        ):
            continue
        else:
            cure = f"redistribute {name}.hidden to Replicate() or Shard(d) of a leading dim d"
        raise ValueError(
            f"{function}: expected {name}.weight placed as Shard(0) on at most one mesh dim, where "
            f"{name}.hidden is Replicate(), and as Replicate() on the others, where {name}.hidden "
            f"is Replicate() or Shard(d) of a leading dim d, got weight {tuple(weight.placements)} "  # type: ignore[attr-defined]
            f"and hidden {_placed(hidden)}; {cure}"
        )
    if bias is not None and bias.placements != weight.placements:  # type: ignore[attr-defined]
        raise ValueError(
            f"{function}: expected {name}.bias placed like {name}.weight, "
            f"{_placed(weight)}, got {_placed(bias)}"
        )
    return found


def check_teacher(function: str, teacher: Logits, student: Logits) -> Logits:
    """Checks that a teacher's logits have the student's shape, device, mesh and placements.

    Returns them in a form that autograd can save.
    """
    checked, _ = _check_one(function, teacher, "teacher")
    facts: list[tuple[str, Any, Any]] = [
        ("shape", tuple(student.shape), tuple(teacher.shape)),
        ("device", student.device, teacher.device),
        ("kind", _kind(student), _kind(teacher)),
    ]
    if is_dtensor(student) and is_dtensor(teacher):
        facts.append(("mesh", student.device_mesh, teacher.device_mesh))
        facts.append(("placements", tuple(student.placements), tuple(teacher.placements)))
    for fact, mine, other in facts:
        if mine != other:
            cure = ""
            if fact == "shape" and mine[:-1] == other[:-1]:
                cure = (
                    "; where only the padding of the vocabulary differs, pass the first "
                    f"{min(mine[-1], other[-1])} columns of the wider one, and vocab_size"
                )
            raise ValueError(
                f"{function}: expected student and teacher of the same {fact}, "
                f"got {mine} and {other}{cure}"
            )
    return checked


def _kind(x: Logits) -> str:
    return "DTensor" if is_dtensor(x) else "Tensor"


def saveable(x: Tensor) -> Tensor:
    """``x`` as a tensor that autograd can save. A tensor made under ``torch.inference_mode``
    becomes an alias of its memory.
    """
    if not _is_inference(x):
        return x
    local = local_tensor(x)
    if type(local) is not Tensor:  # The memory of a subclass may be elsewhere.
        return x.clone()
    alias = torch.empty(0, dtype=x.dtype, device=x.device)
    alias.set_(local.untyped_storage(), local.storage_offset(), local.shape, local.stride())
    if not isinstance(x, DTensor):
        return alias
    return DTensor.from_local(
        alias, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def _is_inference(x: Tensor) -> bool:
    """Whether ``x`` or its local tensor was made under ``torch.inference_mode``, and is used
    outside of it.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    return x.is_inference() or local_tensor(x).is_inference()


K_AXIS = ((), ("K",))
"""The dims that ids may have after those of the rows: none for one id per row, or K."""


def check_ids(
    function: str,
    index: Tensor,
    logits: Logits,
    name: str = "index",
    trailing: tuple[tuple[str, ...], ...] = K_AXIS,
) -> Tensor:
    """Checks ids ``[*]`` or ``[*, K]`` and places them like the rows of the logits."""
    _check_tensor(function, index, name)
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{function}: expected {name} of dtype int32 or int64, got {index.dtype}")
    return check_row_values(function, index, logits, name, trailing)


def check_logprobs(function: str, logprobs: Tensor, ids: Tensor, logits: Logits) -> Tensor:
    """Checks the teacher's log-probabilities ``[*, K]`` that belong to ``ids``."""
    name = "teacher_logprobs"
    _check_tensor(function, logprobs, name)
    if logprobs.dtype not in LOGITS_DTYPES:
        wanted = f"{name} of a floating dtype"
        raise TypeError(f"{function}: expected {wanted}, got {logprobs.dtype}")
    if logprobs.shape != ids.shape:
        raise ValueError(
            f"{function}: expected {name} of the shape of teacher_ids, {tuple(ids.shape)}, "
            f"got {tuple(logprobs.shape)}"
        )
    return check_row_values(function, logprobs, logits, name, (("K",),))


def check_ignore_index(function: str, ignore_index: int | None) -> int | None:
    if ignore_index is None:
        return None
    return _check_int64(function, ignore_index, "ignore_index", "an int or None")


def check_weight(function: str, value: float, name: str, most: float | None = None) -> float:
    """Checks a weight that is at least 0 and finite."""
    if not _is_real(value):
        got = type(value).__name__
        raise TypeError(f"{function}: expected {name} to be a float, got {got}")
    if not (0 <= value < math.inf and (most is None or value <= most)):
        bound = f"<= {most}" if most is not None else "< inf"
        raise ValueError(f"{function}: expected 0 <= {name} {bound}, got {value}")
    return float(value)


def check_bool(function: str, value: bool, name: str) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{function}: expected {name} to be a bool, got {type(value).__name__}")


def check_k(function: str, k: int, vocabulary: Vocabulary) -> int:
    k = check_int(function, k, "k")
    most = vocabulary.sizes.vocab_size
    if not 0 <= k <= most:
        raise ValueError(
            f"{function}: expected 0 <= k <= {most}, the size of the vocabulary, got {k}"
        )
    return k


def check_inplace_backward(function: str, inplace_backward: bool, logits: Logits) -> None:
    check_bool(function, inplace_backward, "inplace_backward")
    if isinstance(logits, LinearLogits):
        if inplace_backward:
            raise ValueError(
                f"{function}: expected inplace_backward=False for LinearLogits, which have no "
                "logits to overwrite, got True"
            )
        return
    if torch.compiler.is_compiling():
        return  # Compiled code makes a new gradient.
    if inplace_backward and _may_overlap(logits):
        raise ValueError(
            f"{function}: expected logits without overlapping memory for inplace_backward=True, "
            f"got shape {tuple(logits.shape)} with strides {tuple(logits.stride())}"
        )


def _may_overlap(x: Tensor) -> bool:
    """Whether two elements may share memory. No two do if each stride exceeds the extent that all
    smaller strides span.
    """
    within = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= within:
                return True
            within += (size - 1) * stride
    return False


def check_temperature(function: str, temperature: float | Tensor, logits: Logits) -> Tensor | None:
    """Checks a temperature. Returns it as a tensor, 0-d or ``[*]``, or None if it is 1."""
    if isinstance(temperature, Tensor):
        _check_tensor(function, temperature, "temperature")
        if not temperature.dtype.is_floating_point:
            wanted = "temperature of a floating dtype"
            raise TypeError(f"{function}: expected {wanted}, got {temperature.dtype}")
        if temperature.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{function}: expected temperature without a gradient, got requires_grad=True; "
                "detach it"
            )
        return check_row_values(function, temperature, logits, "temperature", one_for_all=True)
    number = _check_positive(function, temperature, "temperature", "a float or a Tensor", logits)
    if number == 1:
        return None
    scalar = torch.full((), number, dtype=torch.float64, device=logits.device)
    return replicated(scalar, logits) if is_dtensor(logits) else scalar


def check_softcap(function: str, softcap: float | None, logits: Logits) -> float | None:
    if softcap is None:
        return None
    return _check_positive(function, softcap, "softcap", "a float or None", logits)


def _check_positive(function: str, value: Any, name: str, wanted: str, logits: Logits) -> float:
    """Checks a positive normal number in the dtype of the math."""
    if not _is_real(value):
        got = type(value).__name__
        raise TypeError(f"{function}: expected {name} to be {wanted}, got {got}")
    limits = torch.finfo(math_dtype(logits))  # A number below tiny may count as 0 in the math.
    if not limits.tiny <= value <= limits.max:
        raise ValueError(
            f"{function}: expected 0 < {name} < inf, a normal number in {limits.dtype}, got {value}"
        )
    return float(value)


def check_seed(function: str, seed: int | Tensor, logits: Logits) -> Tensor:
    """Checks a seed. Returns it as an int64 tensor ``[]``."""
    if not isinstance(seed, Tensor):
        number = _check_int64(function, seed, "seed", "an int or a Tensor")
        scalar = torch.full((), number, dtype=torch.int64, device=logits.device)
        return replicated(scalar, logits) if is_dtensor(logits) else scalar
    _check_tensor(function, seed, "seed")
    if seed.dtype != torch.int64:
        raise TypeError(f"{function}: expected seed of dtype int64, got {seed.dtype}")
    if seed.dim() != 0:
        raise ValueError(f"{function}: expected seed of shape [], got {list(seed.shape)}")
    return check_row_values(function, seed, logits, "seed", one_for_all=True)


def check_row_values(
    function: str,
    values: Tensor,
    logits: Logits,
    name: str,
    trailing: tuple[tuple[str, ...], ...] = ((),),
    one_for_all: bool = False,
) -> Tensor:
    """Checks values per row, ``[*]`` plus ``trailing`` dims.

    A plain tensor beside DTensor logits is taken for the same global tensor on all ranks.
    ``one_for_all`` allows a 0-d tensor, one value for all rows.
    """
    single = one_for_all and values.dim() == 0
    if (
        is_dtensor(logits)
        and not isinstance(values, DTensor)
        and not single
        and any(p.is_shard() and not shards_vocab(p, logits) for p in logits.placements)
    ):
        raise ValueError(
            f"{function}: expected {name} to be a DTensor, since the logits shard a leading dim "
            f"({_placed(logits)}), got a Tensor, which may be the "
            "local or the global one; wrap it with DTensor.from_local or distribute_tensor"
        )
    rows, shape = tuple(logits.shape[:-1]), tuple(values.shape)
    lengths = [len(rows) + len(dims) for dims in trailing]
    if not single and (len(shape) not in lengths or shape[: len(rows)] != rows):
        allowed = [(*rows, *dims) for dims in trailing] + [()] * (one_for_all and bool(rows))
        wanted = " or ".join(f"[{', '.join(map(str, dims))}]" for dims in allowed)
        raise ValueError(
            f"{function}: expected {name} of shape {wanted} for logits of shape "
            f"{list(logits.shape)}, got {list(shape)}"
        )
    if values.device != logits.device:
        raise ValueError(
            f"{function}: expected {name} on the device of the logits, {logits.device}, "
            f"got {values.device}"
        )
    if _is_inference(values):
        values = values.clone()
    if not is_dtensor(logits):
        if isinstance(values, DTensor):
            raise ValueError(
                f"{function}: expected {name} to be a Tensor like the logits, got a DTensor "
                f"on {values.device_mesh}"
            )
        return values
    if not isinstance(values, DTensor):
        return replicated(values, logits)
    if values.device_mesh != logits.device_mesh:
        raise ValueError(
            f"{function}: expected {name} on the mesh of the logits, {logits.device_mesh}, "
            f"got {values.device_mesh}"
        )
    return values


def placed_by_row(logits: Logits, *values: Tensor | None) -> tuple[Any, ...]:
    """Checked values placed like the rows of the logits, which may communicate.

    Moved here, after all checks, values are moved once, not by each operator that takes them.
    """
    return tuple(value if value is None else _placed_by_row(logits, value) for value in values)


def _placed_by_row(logits: Logits, values: Tensor) -> Tensor:
    if not is_dtensor(logits) or not isinstance(values, DTensor):
        return values
    single = values.dim() == 0
    placements = tuple(
        Replicate() if single or shards_vocab(p, logits) else p for p in logits.placements
    )
    return values if values.placements == placements else values.redistribute(placements=placements)


def _check_tensor(function: str, value: Any, name: str) -> None:
    if not isinstance(value, Tensor):
        got = type(value).__name__
        raise TypeError(f"{function}: expected {name} to be a Tensor or DTensor, got {got}")
    if value.layout != torch.strided or value.is_nested:
        got = "a nested tensor" if value.is_nested else str(value.layout)
        raise TypeError(f"{function}: expected {name} to be a dense tensor, got {got}")


def check_int(function: str, value: Any, name: str, wanted: str = "an int") -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt, numbers.Integral)):
        got = type(value).__name__
        raise TypeError(f"{function}: expected {name} to be {wanted}, got {got}")
    return value if isinstance(value, (int, torch.SymInt)) else int(value)


def _check_int64(function: str, value: Any, name: str, wanted: str) -> Any:
    value = check_int(function, value, name, wanted)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{function}: expected {name} to fit in 64 bits, got {value}")
    return value


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float, numbers.Real)) and not isinstance(value, bool)
