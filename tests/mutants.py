# ruff: noqa: E501
"""Plants one fault at a time in the package and runs the test that is known to catch it.

    python -m tests.mutants                every fault with its test
    python -m tests.mutants -k softmax     the faults in modules whose path contains "softmax"
    python -m tests.mutants --all          every fault with the whole suite, up to the first failure

A fault replaces one piece of text, which occurs once in its module. Faults that their tests do not
catch are marked MISSED, and the exit status is then 1. pytest does not collect this file.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 1800


class Fault(NamedTuple):
    module: str
    """Path inside of the package."""
    sound: str
    faulty: str
    test: str
    """The test that fails for it: a file of the tests and a function."""


# fmt: off
FAULTS = [
    Fault("layout.py", "if len(partial) > 1 and not", "if False and not", "test_communication.py::test_sums_over_two_mesh_dims_of_rows_log_no_warning"),
    Fault("layout.py", "shard_size = -(-columns // shards)", "shard_size = columns // shards", "test_options.py::test_ties_go_to_the_lower_id"),
    Fault("layout.py", "torch.full((1,), rank * shard_size,", "torch.full((1,), rank * (columns // shards),", "test_options.py::test_ties_go_to_the_lower_id"),
    Fault("layout.py", "Vocabulary(start, Sizes(columns, shard_size, vocab_size))", "Vocabulary(start, Sizes(columns, shard_size, columns))", "test_options.py::test_padding_has_no_mass"),
    Fault("layout.py", "\"gathered\": (Replicate(), Shard(dim + 1))", "\"gathered\": (Shard(0), Shard(dim + 1))", "test_options.py::test_temperature_divides_all_logits"),
    Fault("layout.py", "\"sums\": (Replicate(), Partial())", "\"sums\": (Replicate(), Replicate())", "test_options.py::test_temperature_divides_all_logits"),
    Fault("layout.py", "\"rows\": (Replicate(), Shard(dim))", "\"rows\": (Replicate(), Replicate())", "test_options.py::test_temperature_divides_all_logits"),
    Fault("layout.py", "\"start\": (Shard(0), Replicate())", "\"start\": (Replicate(), Replicate())", "test_options.py::test_temperature_divides_all_logits"),
    Fault("layout.py", "0 if mesh_dim is None or coordinate is None else", "0 if mesh_dim is None else", "test_layouts.py::test_rank_outside_of_the_mesh_gets_empty_results"),
    Fault("layout.py", "\"hidden_grad\": (Partial(), Shard(dim))", "\"hidden_grad\": (Replicate(), Shard(dim))", "test_linear_logits.py::test_meshes"),
    Fault("layout.py", "dims = [_VOCAB if shard else dim for dim, shard", "dims = [dim for dim, shard", "test_linear_logits.py::test_meshes"),
    Fault("linear_blocks.py", "starts = starts if self._start is None else starts + self._start", "starts = starts if self._start is None else starts", "test_linear_logits.py::test_even_uneven_and_empty_shards"),
    Fault("linear_blocks.py", "range(0, length - 1, step)", "range(0, length, step)", "test_linear_logits.py::test_no_block_has_one_column"),
    Fault("linear_blocks.py", "not all(map(_has_flat_view, given))", "False", "test_linear_logits.py::test_logits_without_a_view_as_rows_are_divided_by_columns"),
    Fault("linear_blocks.py", "sum_of_x = blocks.several and blocks.by_columns", "sum_of_x = False", "test_linear_logits.py::test_blocks_of_columns_and_of_rows"),
    Fault("linear_blocks.py", "sum_of_weight = blocks.several and not blocks.by_columns", "sum_of_weight = False", "test_linear_logits.py::test_blocks_of_columns_and_of_rows"),
    Fault("linear_blocks.py", "        if not written:\n            result.zero_()\n", "", "test_linear_logits.py::test_gradients_without_rows_are_zero"),
    Fault("linear_blocks.py", "dtype=torch.float32 if half else None", "dtype=None", "test_linear_logits.py::test_gradients_are_as_accurate_as_those_of_f_linear"),
    Fault("linear_blocks.py", "                if exact:", "                if False:", "test_linear_logits.py::test_gradients_are_as_accurate_as_those_of_f_linear"),
    Fault("softmax_gradient.py", "torch.where(owned, 0, entry).to(block.dtype)", "entry.to(block.dtype)", "test_linear_logits.py::test_gradients_are_as_accurate_as_those_of_f_linear"),
    Fault("linear_blocks.py", "column + at.columns.start, columns)", "column, columns)", "test_linear_logits.py::test_gradients_are_as_accurate_as_those_of_f_linear"),
    Fault("shard_stats.py", "columns[covered] = coverage_of_shard(columns[covered], start, width, sizes)", "pass", "test_linear_logits.py::test_blocks_of_columns_and_of_rows"),
    Fault("linear_logits.py", "or x.dtype == torch.float64:", ":", "test_linear_logits.py::test_autocast_leaves_fp64_alone"),
    Fault("autograd.py", "kept.append(LinearLogits(*operands[:3]))", "kept.append(operands[0])", "test_linear_logits.py::test_blocks_of_columns_and_of_rows"),
    Fault("checks.py", "elif not of_hidden.is_replicate():", "elif False:", "test_linear_logits.py::test_refused_placements_name_the_cure"),
    Fault("checks.py", "if not 0 < vocab_size <= columns:", "if not 0 <= vocab_size <= columns:", "test_validation.py::test_invalid_vocab_size_is_refused"),
    Fault("checks.py", "if logits.dim() == 0 or logits.shape[-1] == 0:", "if logits.dim() == 0:", "test_validation.py::test_invalid_logits_are_refused"),
    Fault("checks.py", "> MAX_COLUMNS and logits.dtype != torch.float64", "> MAX_COLUMNS", "test_validation.py::test_largest_vocabularies_are_accepted"),
    Fault("checks.py", "> MAX_COLUMNS and logits.dtype", "> 4 * MAX_COLUMNS and logits.dtype", "test_validation.py::test_vocabularies_with_ids_beyond_fp32_are_refused"),
    Fault("checks.py", "if placement.is_partial():", "if False:", "test_validation.py::test_unsupported_placements_are_refused"),
    Fault("checks.py", "elif found is not None:", "elif False:", "test_validation.py::test_unsupported_placements_are_refused"),
    Fault("checks.py", "facts.append((\"placements\", tuple(student.placements), tuple(teacher.placements)))", "pass", "test_validation.py::test_pairs_that_differ_on_meshes_are_refused"),
    Fault("checks.py", "facts.append((\"mesh\", student.device_mesh, teacher.device_mesh))", "pass", "test_validation.py::test_pairs_that_differ_on_meshes_are_refused"),
    Fault("checks.py", "(\"shape\", tuple(student.shape), tuple(teacher.shape))", "(\"shape\", student.dim(), teacher.dim())", "test_validation.py::test_plain_pairs_that_differ_are_refused"),
    Fault("checks.py", "    if not _is_inference(x):", "    if True:", "test_composition.py::test_inference_mode_inputs_allow_gradients_of_the_others"),
    Fault("checks.py", "if type(local) is not Tensor:", "if False:", "test_composition.py::test_teacher_of_inference_mode_on_simulated_ranks"),
    Fault("checks.py", "    if _is_inference(values):", "    if False:", "test_composition.py::test_inference_mode_inputs_allow_gradients_of_the_others"),
    Fault("checks.py", "any(p.is_shard() and not shards_vocab(p, logits) for p in logits.placements)", "False", "test_validation.py::test_plain_rows_beside_sharded_ones_are_ambiguous"),
    Fault("checks.py", "if values.device != logits.device:", "if False:", "test_validation.py::test_invalid_ids_are_refused"),
    Fault("checks.py", "not -(2**63) <= value < 2**63", "False", "test_validation.py::test_invalid_ignore_index_is_refused"),
    Fault("checks.py", "(most is None or value <= most)", "True", "test_validation.py::test_invalid_options_are_refused"),
    Fault("checks.py", "temperature.requires_grad and torch.is_grad_enabled()", "False", "test_validation.py::test_invalid_temperature_is_refused"),
    Fault("checks.py", "temperature.requires_grad and torch.is_grad_enabled()", "temperature.requires_grad", "test_validation.py::test_temperature_that_requires_grad_is_accepted_without_grad"),
    Fault("checks.py", "if not limits.tiny <= value <= limits.max:", "if not 0 <= temperature <= limits.max:", "test_validation.py::test_invalid_temperature_is_refused"),
    Fault("checks.py", "if stride <= within:", "if stride < within:", "test_inplace_backward.py::test_rows_that_share_memory_are_refused"),
    Fault("checks.py", "within += (size - 1) * stride", "within = (size - 1) * stride", "test_inplace_backward.py::test_rows_that_share_memory_are_refused"),
    Fault("checks.py", "most = vocabulary.sizes.vocab_size", "most = vocabulary.sizes.columns", "test_validation.py::test_invalid_options_are_refused"),
    Fault("checks.py", "if logprobs.shape != ids.shape:", "if logprobs.dim() != ids.dim():", "test_validation.py::test_invalid_teacher_logprobs_are_refused"),
    Fault("checks.py", "shape[: len(rows)] != rows", "False", "test_validation.py::test_invalid_ids_are_refused"),
    Fault("checks.py", "Replicate() if single or shards_vocab(p, logits) else p for p", "p for p", "test_edits.py::test_dtensor_is_edited"),
    Fault("checks.py", "isinstance(value, bool) or not isinstance(value, (int,", "not isinstance(value, (int,", "test_validation.py::test_invalid_ignore_index_is_refused"),
    Fault("faults.py", "torch.where(expected == width,", "torch.where(expected >= 0,", "test_real_ranks.py::test_shards_of_other_sizes"),
    Fault("numerics.py", "(end - start).clamp(0, width)", "(end - start).clamp_max(width)", "test_options.py::test_ties_go_to_the_lower_id"),
    Fault("faults.py", "(index < sizes[2])", "(index <= sizes[2])", "test_ids.py::test_id_out_of_range_is_an_error"),
    Fault("faults.py", "(index < sizes[2])", "(index < sizes[0])", "test_ids.py::test_id_of_padding_is_an_error"),
    Fault("faults.py", "(index >= 0)", "(index >= -1)", "test_ids.py::test_id_out_of_range_is_an_error"),
    Fault("faults.py", "torch.where(bad.any(-1), -torch.inf", "torch.where(bad.all(-1), -torch.inf", "test_ids.py::test_zero_ids_per_row"),
    Fault("faults.py", "not_ignored(index, ignore_index) & ~in_range", "~in_range", "test_ids.py::test_some_of_the_ids_ignored"),
    Fault("faults.py", "(value >= limits.tiny)", "(value >= 0)", "test_options.py::test_temperature_tensor_out_of_range_is_an_error"),
    Fault("faults.py", "(value <= limits.max)", "(value >= 0)", "test_options.py::test_temperature_tensor_out_of_range_is_an_error"),
    Fault("faults.py", "(covered != covered[..., :1])", "(covered != covered)", "test_real_ranks.py::test_ranks_that_disagree_on_the_vocabulary"),
    Fault("faults.py", "        fit,", "        fit | True,", "test_real_ranks.py::test_ranks_that_disagree_on_the_vocabulary"),
    Fault("ids.py", "index.long() != ignore_index", "index != ignore_index", "test_ids.py::test_ignore_index_beyond_int32_matches_no_int32_id"),
    Fault("ids.py", "(local < width)", "(local <= width)", "test_ids.py::test_id_out_of_range_is_an_error"),
    Fault("ids.py", "(local >= 0)", "(local > 0)", "test_ids.py::test_id_out_of_range_is_an_error"),
    Fault("ids.py", "torch.where(owned, capped(picked, softcap), 0)", "capped(picked, softcap)", "test_ids.py::test_id_out_of_range_is_an_error"),
    Fault("ids.py", "keys, right=True", "keys", "test_ids.py::test_more_ids_than_tokens"),
    Fault("ids.py", "keys.unsqueeze(-1) == keys.unsqueeze(-2)", "keys.unsqueeze(-1) >= keys.unsqueeze(-2)", "test_ids.py::test_id_out_of_range_is_an_error"),
    Fault("ids.py", "value.double().gather", "value.gather", "test_ids.py::test_small_sums_of_equal_ids_survive_large_ones"),
    Fault("ids.py", "local.clamp(0, max(width - 1, 0))", "local.clamp(0, width - 1)", "test_ids.py::test_every_id_over_shard_edges"),
    Fault("numerics.py", "column < vocab_size - start", "column <= vocab_size - start", "test_options.py::test_padding_has_no_mass"),
    Fault("numerics.py", "column < vocab_size - start", "column < vocab_size", "test_options.py::test_padding_has_no_mass"),
    Fault("numerics.py", "scaled(x - torch.where(maximum == -torch.inf, 0, maximum), temperature)", "scaled(x - maximum, temperature)", "test_numbers.py::test_special_rows"),
    Fault("numerics.py", "(shift.exp() * s).sum(-1)", "s.sum(-1)", "test_numbers.py::test_special_rows"),
    Fault("numerics.py", "mass * shift.clamp_min(least_exponent(shift.dtype))", "mass * shift", "test_numbers.py::test_special_rows"),
    Fault("numerics.py", "torch.where(weight == 0, 0, weight * x)", "weight * x", "test_numbers.py::test_special_rows"),
    Fault("numerics.py", "torch.where((a == 0) | (b == 0), 0, a * b)", "torch.where(a == 0, 0, a * b)", "test_numbers.py::test_ignored_ids_give_zero_for_any_row"),
    Fault("numerics.py", "terms.sum(-1, dtype=torch.float64).to(terms.dtype)", "terms.sum(-1)", "test_accuracy.py::test_error_is_at_most_that_of_plain_torch"),
    Fault("numerics.py", "math.log(finfo.tiny * finfo.eps) - 1", "math.log(finfo.tiny) / 2", "test_numbers.py::test_gradient_of_tiny_probabilities_keeps_its_digits"),
    Fault("numerics.py", "return scaled(x - maximum, temperature) - log_sum", "return scaled(x, temperature) - scaled(maximum, temperature) - log_sum", "test_numbers.py::test_common_offset_loses_no_precision"),
    Fault("numerics.py", "any(x.dtype == torch.float64 for x in logits)", "all(x.dtype == torch.float64 for x in logits)", "test_numbers.py::test_student_and_teacher_of_two_dtypes"),
    Fault("kernel.py", "return first.shape[0] == 1 and first.device.type == \"cpu\"", "return False", "test_kernel.py::test_leading_shapes_share_kernels"),
    Fault("kernel.py", "args[0].copy_(twice[0][:1])", "pass", "test_kernel.py::test_lone_row_is_overwritten_by_its_gradient"),
    Fault("kernel.py", "if not torch.compiler.is_dynamo_compiling():", "if False:", "test_kernel.py::test_uncompiled_kernel_runs_in_blocks"),
    Fault("kernel.py", "    if not _warned:", "    if True:", "test_kernel.py::test_without_a_compiler"),
    Fault("kernel.py", "torch.autocast(args[0].device.type, enabled=False)", "torch.enable_grad()", "test_kernel.py::test_callers_share_kernels"),
    Fault("kernel.py", "if compiles_nothing_new():", "if False:", "test_kernel.py::test_uncompiled_kernel_runs_in_blocks"),
    Fault("kernel.py", "with alike_to_guards():", "if True:", "test_kernel.py::test_callers_share_kernels"),
    Fault("kernel.py", "fn, args, EAGER_BLOCK // args[0].shape[-1])", "fn, args, 1 << 30)", "test_kernel.py::test_uncompiled_kernel_runs_in_blocks"),
    Fault("kernel.py", "    variants[key] = refuse\n", "", "test_kernel.py::test_kernel_that_fails_to_compile_is_tried_once"),
    Fault("kernel.py", "type(arg) is float:", "False:", "test_kernel.py::test_eager_kernels_work_in_blocks"),
    Fault("kernel.py", "if args[0].numel() == 0:", "if False:", "test_kernel.py::test_leading_shapes_share_kernels"),
    Fault("row_blocks.py", "-torch.inf) for x in logits)", "0.0) for x in logits)", "test_numbers.py::test_empty_shards"),
    Fault("row_blocks.py", "values.contiguous() if k == 1 and values.device.type == \"cpu\" else values", "values", "test_kernel.py::test_callers_share_kernels"),
    Fault("row_blocks.py", "if entries == 1 and arg.dim()", "if arg.dim()", "test_gradients.py::test_strided_logits"),
    Fault("row_blocks.py", "arg[first * rows : (first + entries) * rows]", "arg[first : first + entries]", "test_gradients.py::test_strided_logits"),
    Fault("row_blocks.py", "step = rows // inner", "step = rows", "test_kernel.py::test_blocks_have_a_bounded_number_of_rows"),
    Fault("row_blocks.py", "        if size == 1:\n            continue\n", "", "test_kernel.py::test_leading_shapes_share_kernels"),
    Fault("row_blocks.py", "if sizes and last == tuple(size * stride for stride in strides):", "if sizes:", "test_gradients.py::test_strided_logits"),
    Fault("row_blocks.py", "if sizes and last == tuple(size * stride for stride in strides):", "if False:", "test_kernel.py::test_leading_shapes_share_kernels"),
    Fault("operators.py", "_without_views(fn), mutates_args", "fn, mutates_args", "test_gradients.py::test_results_may_be_edited_in_place"),
    Fault("operators.py", "per_example == 0 and lead != ()", "per_example == 0", "test_composition.py::test_vmap_over_any_inputs"),
    Fault("operators.py", "if any(isinstance(arg, DTensor) for arg in args):", "if False:", "test_composition.py::test_vmap_over_dtensors_is_refused"),
    Fault("operators.py", "arg.movedim(dim, batch_dim)", "arg.movedim(dim, 0)", "test_composition.py::test_vmap_equals_a_loop_over_examples"),
    Fault("operators.py", "ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))", "pass", "test_operators.py::test_opcheck_of_inputs_that_require_grad"),
    Fault("autograd.py", "ctx.save_for_backward(*tensors, *_local_versions(tensors))", "ctx.save_for_backward(*tensors)", "test_edits.py::test_local_tensor_is_edited"),
    Fault("autograd.py", "if torch.compiler.is_compiling() or not torch.is_grad_enabled():", "if True:", "test_gradients.py::test_second_backward_is_an_error"),
    Fault("autograd.py", "torch.empty_like(logits, memory_format=torch.contiguous_format)", "torch.empty_like(logits)", "test_gradients.py::test_gradient_of_strided_logits_is_contiguous"),
    Fault("autograd.py", "torch.autograd.graph.increment_version(local_tensor(logits))", "pass", "test_inplace_backward.py::test_op_that_saved_the_local_tensor_raises"),
    Fault("autograd.py", "return torch.compiler.is_compiling() or in_func_transform()", "return torch.compiler.is_compiling()", "test_inplace_backward.py::test_transforms_make_a_new_gradient"),
    Fault("softmax.py", "masked_product(shift.exp(), w + s * shift)", "masked_product(shift.exp(), w)", "test_numbers.py::test_empty_shards"),
    Fault("softmax.py", "(t + masked_product(share, shift)).sum(-1)", "t.sum(-1)", "test_numbers.py::test_empty_shards"),
    Fault("softmax.py", "t = torch.where(column < tokens, shifted, 0).sum(-1)", "t = shifted.sum(-1)", "test_options.py::test_label_smoothing_excludes_padding"),
    Fault("softmax.py", "t = torch.where(column < tokens, shifted, 0).sum(-1)", "t = shifted.nan_to_num(neginf=0).sum(-1)", "test_numbers.py::test_special_rows"),
    Fault("softmax.py", "torch.where(maximum == -torch.inf, 0, mass.sum(-1, keepdim=True))", "mass.sum(-1, keepdim=True)", "test_numbers.py::test_empty_shards"),
    Fault("softmax.py", "columns_before(Sizes(*sizes).vocab_size, start", "columns_before(Sizes(*sizes).columns, start", "test_options.py::test_padding_has_no_mass"),
    Fault("softmax.py", "torch.where(not_ignored(index, ignore_index), softmax.log_p, 0)", "softmax.log_p", "test_numbers.py::test_ignored_ids_give_zero_for_any_row"),
    Fault("softmax.py", "picked = stats[..., 4 + 2 * summed :].sum(-2)", "picked = stats[..., 4 + 2 * summed :].amax(-2)", "test_numbers.py::test_empty_shards"),
    Fault("softmax_gradient.py", "c = torch.where(owned, terms.c, 0)", "c = terms.c", "test_ids.py::test_id_out_of_range_is_an_error"),
    Fault("softmax_gradient.py", "        (c,) = sum_equal(local, c)\n", "        pass\n", "test_ids.py::test_id_out_of_range_is_an_error"),
    Fault("softmax_gradient.py", "named = count > 0", "named = count >= 0", "test_ids.py::test_id_out_of_range_is_an_error"),
    Fault("softmax_gradient.py", "gradient + without_padding(terms.u, 0, start, sizes, column)", "gradient + terms.u", "test_ids.py::test_id_of_padding_is_an_error"),
    Fault("softmax_gradient.py", "torch.where(live & (maximum != -torch.inf), gradient, 0)", "torch.where(live, gradient, 0)", "test_numbers.py::test_special_rows"),
    Fault("softmax_gradient.py", "torch.where(live & (maximum != -torch.inf), gradient, 0)", "torch.where(maximum != -torch.inf, gradient, 0)", "test_numbers.py::test_every_id_of_special_rows"),
    Fault("softmax_gradient.py", "live = live | (terms.u != 0)", "pass", "test_options.py::test_z_loss_that_cancels_the_softmax_leaves_the_smoothing"),
    Fault("softmax_gradient.py", "live = live | (terms.c != 0).any(-1, keepdim=True)", "pass", "test_numbers.py::test_every_id_of_special_rows"),
    Fault("softmax_gradient.py", "torch.where(log_p < least_exponent(log_p.dtype), 0, log_p.exp() * slope)", "log_p.exp() * slope", "test_ids.py::test_id_of_padding_is_an_error"),
    Fault("softmax_gradient.py", "(owned & counts)", "owned", "test_options.py::test_ignored_ids_pad_a_list_to_k"),
    Fault("softmax_gradient.py", "(owned & counts)", "counts", "test_ids.py::test_id_out_of_range_is_an_error"),
    Fault("softmax_gradient.py", "slope = torch.where(named, slope_named, slope)", "pass", "test_ids.py::test_id_out_of_range_is_an_error"),
    Fault("softmax_gradient.py", "or not ctx.inplace_backward or is_functional():", "or not ctx.inplace_backward:", "test_inplace_backward.py::test_transforms_make_a_new_gradient"),
    Fault("softmax_gradient.py", "return gradient.scatter(-1, column.long(), entry)", "return gradient", "test_ids.py::test_id_out_of_range_is_an_error"),
    Fault("pair.py", "if b.shape != a.shape:", "if False:", "test_real_ranks.py::test_shards_of_other_sizes"),
    Fault("pair.py", "2.0**-24", "1.0", "test_numbers.py::test_finite_mask_where_the_other_has_mass_gives_a_finite_divergence"),
    Fault("pair.py", "gap = a / 2 - b / 2", "gap = a - b", "test_numbers.py::test_large_logits_are_not_taken_for_masks"),
    Fault("pair.py", "torch.where(mass > 0, mass * (x - y), without_mass)", "mass * (x - y)", "test_numbers.py::test_special_rows"),
    Fault("pair.py", "torch.where(mass > 0, mass * (x - y), without_mass)", "torch.where(mass > 0, mass * (x - y), 0)", "test_numbers.py::test_special_rows"),
    Fault("pair.py", "terms.sum(-1, dtype=torch.float64)", "terms.sum(-1)", "test_numbers.py::test_finite_mask_where_the_other_has_mass_gives_a_finite_divergence"),
    Fault("pair.py", "live = (grad != 0) & (saved[..., 4:5] != torch.inf)", "live = grad != 0", "test_numbers.py::test_special_rows"),
    Fault("pair.py", "live = (grad != 0) & (saved[..., 4:5] != torch.inf)", "live = saved[..., 4:5] != torch.inf", "test_numbers.py::test_zero_upstream_gradient_gives_zero_for_any_row"),
    Fault("pair.py", "live & (saved[..., :1] != -torch.inf) & (saved[..., 2:3] != -torch.inf)", "live & (saved[..., :1] != -torch.inf)", "test_numbers.py::test_special_rows"),
    Fault("pair.py", "both(*args)[0 if to_a else 1]", "both(*args)[0]", "test_gradients.py::test_several_ops_on_the_same_logits"),
    Fault("pair.py", "torch.where(live, scaled(gradient, temperature), 0)", "torch.where(live, gradient, 0)", "test_numbers.py::test_large_negative_logits_act_as_masks"),
    Fault("ops/topk_kl_div.py", "x = capped_tokens(x.to(math_dtype(x)), tokens, softcap)", "x = capped_tokens(x.to(math_dtype(x)), tokens + 1, softcap)", "test_softcap.py::test_empty_shard_has_no_mass"),
    Fault("ops/sample.py", "bits ^ torch.iinfo(torch.int64).max", "bits", "test_sample.py::test_offset_of_all_logits_costs_nothing"),
    Fault("ops/sample.py", "gumbel(state, column + start)", "gumbel(state, column)", "test_sample.py::test_every_layout_gives_the_same_draw"),
    Fault("ops/sample.py", "    ids = column + start\n", "    ids = column\n", "test_sample.py::test_every_layout_gives_the_same_draw"),
    Fault("ops/sample.py", "x = x * temperature.double().reciprocal()", "pass", "test_sample.py::test_draws_follow_the_softmax"),
    Fault("ops/sample.py", "torch.where(score != score, torch.inf, score)", "score", "test_sample.py::test_nan_of_either_sign_is_drawn"),
    Fault("ops/sample.py", "order << COLUMN_BITS", "order", "test_sample.py::test_draws_follow_the_softmax"),
    Fault("noise.py", "_mix(_mix(seed + GAMMA) + (row + 1) * GAMMA)", "_mix(seed + GAMMA) + (row + 1) * GAMMA", "test_sample.py::test_seeds_rows_and_columns_are_independent"),
    Fault("noise.py", "z = (z ^ _shifted(z, 27)) * FACTORS[1]", "z = z ^ _shifted(z, 27)", "test_sample.py::test_generator_is_splitmix64"),
    Fault("noise.py", "& ((1 << (64 - bits)) - 1)", "", "test_sample.py::test_generator_is_splitmix64"),
    Fault("numerics.py", "return softcap * (x / softcap).tanh()", "return softcap * (x / softcap)", "test_softcap.py::test_softcap_comes_before_temperature_and_padding"),
    Fault("numerics.py", "return 4 * e / (1 + e).square()", "return 1 - ((1 - e) / (1 + e)).square()", "test_softcap.py::test_values_and_gradients_keep_their_digits"),
    Fault("numerics.py", "torch.where(column < tokens, capped(x, softcap), -torch.inf)", "capped(x, softcap)", "test_softcap.py::test_softcap_comes_before_temperature_and_padding"),
    Fault("ops/argmax.py", "found = (x == maximum) | (x != x)", "found = x == maximum", "test_numbers.py::test_special_rows"),
    Fault("ops/argmax.py", "(first + start).to(x.dtype)", "first.to(x.dtype)", "test_layouts.py::test_even_uneven_and_empty_shards"),
    Fault("ops/argmax.py", "x.shape[-1]).amin(-1)", "-1).amax(-1)", "test_numbers.py::test_special_rows"),
    Fault("ops/cross_entropy.py", "loss - label_smoothing * merged[..., 3:]", "loss + label_smoothing * merged[..., 3:]", "test_numbers.py::test_special_rows"),
    Fault("ops/cross_entropy.py", "z_loss * lse.square()", "z_loss * lse", "test_numbers.py::test_empty_shards"),
    Fault("ops/cross_entropy.py", "c=c - smoothed,", "c=c,", "test_numbers.py::test_special_rows"),
    Fault("ops/cross_entropy.py", "1 + 2 * z_loss * saved", "1 + z_loss * saved", "test_numbers.py::test_special_rows"),
    Fault("ops/cross_entropy.py", "u=smoothed / sizes[-1]", "u=smoothed / sizes[0]", "test_options.py::test_padding_has_no_mass"),
    Fault("ops/cross_entropy.py", "count.clamp_min(1) if mean", "count if mean", "test_numbers.py::test_ignored_ids_give_zero_for_any_row"),
    Fault("ops/cross_entropy.py", "grad if weight is None else grad * weight", "grad", "test_numbers.py::test_special_rows"),
    Fault("ops/cross_entropy.py", "loss = torch.where(valid, loss, 0)", "loss = loss", "test_numbers.py::test_ignored_ids_give_zero_for_any_row"),
    Fault("ops/cross_entropy.py", "torch.cat([valid, ~passed], -1)", "torch.cat([valid, passed & False], -1)", "test_options.py::test_temperature_tensor_out_of_range_is_an_error"),
    Fault("ops/cross_entropy.py", "lse = scaled(maximum, temperature) + log_sum", "lse = maximum + log_sum", "test_options.py::test_temperature_divides_all_logits"),
    Fault("ops/cross_entropy.py", "a = masked_product(a, 1 + 2", "a = a * (1 + 2", "test_numbers.py::test_zero_upstream_gradient_gives_zero_for_any_row"),
    Fault("ops/entropy.py", "b=-grad)", "b=None)", "test_numbers.py::test_special_rows"),
    Fault("ops/entropy.py", "a=-masked_product(grad, saved[..., 2:3])", "a=-grad * saved[..., 2:3]", "test_numbers.py::test_zero_upstream_gradient_gives_zero_for_any_row"),
    Fault("ops/js_div.py", "return stats.zero_()", "return stats", "test_numbers.py::test_empty_shards"),
    Fault("ops/js_div.py", "log_m = m.log() + rounded_off", "log_m = m.log()", "test_numbers.py::test_jensen_shannon_is_accurate_near_beta_0_and_1"),
    Fault("ops/js_div.py", "torch.where(x < lowest, lowest, x)", "x", "test_numbers.py::test_special_rows"),
    Fault("ops/js_div.py", "torch.where(z < 1, z - (m - 1), 0)", "z - (m - 1)", "test_numbers.py::test_jensen_shannon_at_any_distance"),
    Fault("ops/js_div.py", "x.abs() < 0.5", "x.abs() < 4", "test_numbers.py::test_jensen_shannon_is_accurate_near_beta_0_and_1"),
    Fault("ops/js_div.py", "student, teacher, beta = teacher, student, 1 - beta", "pass", "test_numbers.py::test_jensen_shannon_is_accurate_near_beta_0_and_1"),
    Fault("ops/js_div.py", ".clamp_min(0), saved", ", saved", "test_numbers.py::test_divergence_is_never_negative"),
    Fault("ops/js_div.py", "(log_s_m - saved[..., 4:5])", "(log_s_m - saved[..., 5:6])", "test_numbers.py::test_special_rows"),
    Fault("ops/js_div.py", "torch.where(log_ratio > highest, highest, log_ratio)", "log_ratio", "test_numbers.py::test_jensen_shannon_of_a_denormal_probability"),
    Fault("pair.py", "c + s_a * cross_scale() * shift)", "c)", "test_numbers.py::test_empty_shards"),
    Fault("pair.py", "cross = torch.where(c == torch.inf, c, cross)", "cross = cross", "test_numbers.py::test_special_rows"),
    Fault("ops/kl_div.py", "(cross - log_sum_a + log_sum_b).clamp_min(0)", "cross - log_sum_a + log_sum_b", "test_numbers.py::test_divergence_is_never_negative"),
    Fault("ops/kl_div.py", "(p_a == 0) & (value >= 0)", "p_a == 0", "test_numbers.py::test_special_rows"),
    Fault("ops/kl_div.py", "slope = torch.where(without_mass, 0, p_a * (log_p_a - log_p_b - value))", "slope = p_a * (log_p_a - log_p_b - value)", "test_numbers.py::test_special_rows"),
    Fault("ops/logprobs.py", "grad = torch.where(not_ignored(index, ignore_index), grad, 0)", "pass", "test_numbers.py::test_ignored_ids_give_zero_for_any_row"),
    Fault("ops/logprobs_and_entropy.py", "results = log_p, both[..., -1]\n    return tuple(x.clone(memory_format=torch.contiguous_format) for x in results)", "return log_p, both[..., -1]", "test_numbers.py::test_special_rows"),
    Fault("ops/logprobs_and_entropy.py", "a=a - c.sum(-1, keepdim=True)", "a=a", "test_numbers.py::test_special_rows"),
    Fault("ops/topk_kl_div.py", "temperature).exp() / count.clamp_min(1)", "temperature).exp()", "test_options.py::test_ignored_ids_pad_a_list_to_k"),
    Fault("ops/topk_kl_div.py", "(value + rest.value).clamp_min(0)", "value + rest.value", "test_options.py::test_tail_is_never_negative"),
    Fault("ops/topk_kl_div.py", "empty & (q > eps * TAIL_NOISE)", "empty & (q > 0)", "test_numbers.py::test_empty_shards"),
    Fault("ops/topk_kl_div.py", "q.clamp_min(eps / TAIL_FLOOR).log()", "q.log()", "test_options.py::test_tail_is_never_negative"),
    Fault("ops/topk_kl_div.py", "rest.slope_p + rest.mass * a", "rest.slope_p", "test_numbers.py::test_special_rows"),
    Fault("ops/topk_kl_div.py", "slope_q + rest.slope_q", "slope_q", "test_numbers.py::test_special_rows"),
    Fault("ops/topk_kl_div.py", "off = (value == torch.inf) | (norm", "off = (value != value) | (norm", "test_numbers.py::test_special_rows"),
    Fault("ops/topk_kl_div.py", "owned = owned & not_ignored(ids, ignore_index)", "pass", "test_options.py::test_ignored_ids_pad_a_list_to_k"),
    Fault("ops/topk_kl_div.py", "to_teacher = zero_safe_product(grad.unsqueeze(-1), slopes)", "to_teacher = (grad.unsqueeze(-1) * slopes)", "test_numbers.py::test_zero_upstream_gradient_gives_zero_for_any_row"),
    Fault("ops/topk_kl_div.py", "terms = zero_safe_product(grad, slopes)", "terms = grad * slopes", "test_numbers.py::test_zero_upstream_gradient_gives_zero_for_any_row"),
    Fault("ops/topk_logprobs.py", "(0, k - found), value=sizes[0])", "(0, k - found), value=0)", "test_numbers.py::test_special_rows"),
    Fault("ops/topk_logprobs.py", "values, last = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)", "values, last = values.gather(-1, order).sort(dim=-1, descending=True)", "test_options.py::test_ties_go_to_the_lower_id"),
    Fault("ops/topk_logprobs.py", "(x_in == best.unsqueeze(-2)) | (x_in != x_in)", "x_in == best.unsqueeze(-2)", "test_options.py::test_topk_orders_nan_and_both_zeros_by_id"),
    Fault("ops/topk_logprobs.py", "bits = torch.where(bits < 0, bits ^ LOW_BITS, bits)", "pass", "test_numbers.py::test_large_negative_logits_act_as_masks"),
    Fault("ops/topk_logprobs.py", "x = torch.where(x == 0, 0, x.float())", "x = x.float()", "test_options.py::test_topk_orders_nan_and_both_zeros_by_id"),
    Fault("ops/topk_logprobs.py", "(columns + start).to(dtype)", "columns.to(dtype)", "test_numbers.py::test_empty_shards"),
    Fault("ops/topk_logprobs.py", "return log_p, ids, kept, saved", "return log_p, ids, ids, saved", "test_gradients.py::test_ids_of_the_result_may_be_edited_in_place"),
    Fault("ops/topk_logprobs.py", "column = torch.cat([inside, rest], -1)", "column = inside", "test_options.py::test_topk_finds_tokens_after_the_last_whole_chunk"),
    Fault("ops/topk_logprobs.py", "| (LOW_BITS - column)", "| column", "test_numbers.py::test_special_rows"),
    Fault("_private.py", "RuntimeSchemaInfo(is_tensor.index(False) if False in is_tensor else len(is_tensor))", "RuntimeSchemaInfo(len(is_tensor))", "test_options.py::test_each_option_matches_the_oracle"),
    Fault("_private.py", "return (disabled if \"torch._dynamo\" in sys.modules else fn)(*args, **kwargs)", "return disabled(*args, **kwargs)", "test_kernel.py::test_without_a_cache_directory"),
    Fault("_private.py", "    if torch._dynamo.config.disable:", "    if False:", "test_kernel.py::test_warm_kernel_runs_in_blocks_under_a_stance"),
    Fault("_private.py", "return torch.jit.is_tracing() or is_fx_symbolic_tracing()", "return torch.jit.is_tracing()", "test_composition.py::test_warm_kernels_are_traced"),
    Fault("_private.py", "return torch.ops.aten._unsafe_view(x, x.shape)", "return x", "test_gradients.py::test_results_may_be_edited_in_place"),
    Fault("row_blocks.py", "return (tokens - first).clamp(0, CHUNK_COLUMNS)", "return (tokens - first).clamp_min(0)", "test_numbers.py::test_special_rows_in_chunks_of_columns"),
    Fault("softmax.py", "x = chunked(x, -torch.inf)", "x = chunked(x, 0)", "test_numbers.py::test_special_rows_in_chunks_of_columns"),
    Fault("ops/argmax.py", "first = first + CHUNK_COLUMNS * torch.arange(x.shape[-1], device=x.device)", "pass", "test_numbers.py::test_special_rows_in_chunks_of_columns"),
    Fault("row_blocks.py", "missing = chunks * CHUNK_COLUMNS - x.shape[-1]", "missing = 0", "test_numbers.py::test_special_rows_in_chunks_of_columns"),
]
# fmt: on


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-k", metavar="TEXT", default="", help="only modules with TEXT in the path")
    parser.add_argument("--all", action="store_true", help="run the whole suite for every fault")
    args = parser.parse_args()
    faults = [fault for fault in FAULTS if args.k in fault.module]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / ROOT.name
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
        shutil.copy(ROOT / ".gitignore", copy)
        for test in dict.fromkeys(fault.test for fault in faults):
            if first_failure(copy, [f"tests/{test}"]) is not None:
                sys.exit(f"{test} fails without a fault")
        for number, fault in enumerate(faults, 1):
            failed = with_fault(copy, fault, [] if args.all else [f"tests/{fault.test}"])
            missed += failed is None
            print(f"{number:3} {fault.module}: {fault.sound!r} -> {fault.faulty!r}")
            print(f"    {'MISSED' if failed is None else failed}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults are caught")
    return missed > 0


def with_fault(copy: Path, fault: Fault, tests: Sequence[str]) -> str | None:
    """The first test that fails with the fault planted in ``copy``, or None."""
    module = copy / "dtensor_vocab" / fault.module
    source = module.read_text()
    if source.count(fault.sound) != 1:
        sys.exit(f"{fault.module}: expected {fault.sound!r} once, got {source.count(fault.sound)}")
    module.write_text(source.replace(fault.sound, fault.faulty))
    try:
        return first_failure(copy, tests)
    finally:
        module.write_text(source)


def first_failure(copy: Path, tests: Sequence[str]) -> str | None:
    """The first test that fails, or None where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no"]
    try:
        run = subprocess.run(
            [*command, "-rfE", *tests], cwd=copy, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if run.returncode == 0:
        return None
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else f"exit status {run.returncode}: {run.stderr.strip()[-300:]}"


if __name__ == "__main__":
    sys.exit(main())
