"""Thirty ways in which evaluations of others went wrong, and the tests that keep them out of ours.

Each line names who had the fault and which tests would find it here; that those tests exist is
itself tested. What no other file holds is below.
"""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from oracles import MUTANTS

from posbench.evaluation import _totals

FOLDER = Path(__file__).parent

PITFALLS: dict[int, tuple[str, list[str]]] = {
    1: ("targets shifted by one (transformers #30975)", [
        "test_scoring: test_only_the_next_token_is_the_target",
        "test_scoring: test_each_loss_is_that_of_the_token_after_its_input",
        "test_evaluation: test_a_uniform_model_has_the_perplexity_of_its_vocabulary",
        "test_protocols: test_targets_contexts_and_windows_are_as_defined",
    ]),
    2: ("the last window dropped (transformers #7938, parameter-golf #124)", [
        "test_protocols: test_no_target_is_dropped_at_the_end",
        "test_evaluation: test_a_last_block_that_is_shorter_counts_by_its_size",
    ]),
    3: ("window means averaged without weights (transformers #34138, YaRN)", [
        "test_evaluation: test_nonoverlap_weighs_targets_not_windows",
        "test_protocols: test_sliding_has_the_exact_mean",
    ]),
    4: ("mean of perplexities (evaluate #551)", [
        "test_evaluation: test_losses_are_averaged_before_they_become_a_perplexity",
    ]),
    5: ("padding scored (axolotl #3988, evaluate #636); nothing is padded here", [
        "test_scoring: test_batch_size_changes_no_loss",
        "test_model: test_losses_of_a_row_do_not_depend_on_other_rows",
    ]),
    6: ("first token missing or doubled (lm-eval #3333, transformers #40524); none is added here", [
        "test_evaluation: test_no_window_crosses_a_document",
        "test_data: test_tokens_are_the_documents_under_their_names",
    ]),
    7: ("batch size changes the result, or costs targets where memory is short", [
        "test_evaluation: test_batch_size_changes_no_number",
        "test_evaluation: test_too_little_memory_costs_rows_of_a_batch_never_targets",
        "test_scoring: test_a_batch_that_does_not_fit_loses_no_target",
    ]),
    8: ("other targets at each length or for each encoding (KERPLE, DAPE, marin #6277)", [
        "test_evaluation: test_targets_are_the_same_whatever_is_asked_and_however_it_is_computed",
        "test_targets: test_the_lengths_asked_for_do_not_move_targets_up_to_four_times",
        "test_targets: test_digest_does_not_depend_on_how_windows_cut_the_targets",
        "test_report: test_different_targets_are_not_silently_compared",
    ]),
    9: ("the early-token effect taken for skill", [
        "test_evaluation: test_early_tokens_pass_for_skill_in_nonoverlap_but_not_in_controlled",
        "test_derived: test_a_model_that_forgets_gains_nothing_from_2x_to_4x",
    ]),
    10: ("a cumulative mean hides a cliff (YaRN)", [
        "test_derived: test_a_cliff_at_the_training_length_is_found_there",
        "test_evaluation: test_a_cliff_at_the_training_length_falls_between_two_buckets",
    ]),
    11: ("a learned table overrun (nanochat #514)", [
        "test_evaluation: test_a_table_ends_where_it_ends",
        "test_contract: test_finite_up_to_the_stated_maximum_and_refused_beyond",
    ]),
    12: ("a cache not grown, or wrong afterwards (unsloth #3578, #10681, gpt-neox #652)", [
        "test_evaluation: test_order_of_lengths_changes_no_bit",
        "test_contract: test_the_order_of_lengths_changes_nothing",
        "test_extension: test_every_extension_is_plain_rope_at_s_one",
    ]),
    13: ("losses that are not finite dropped (fairseq)", [
        "test_evaluation: test_a_loss_that_is_not_a_number_is_never_dropped",
        "test_evaluation: test_an_infinite_loss_is_counted_too",
        "test_derived: test_a_loss_that_is_not_finite_is_an_infinite_loss_of_context",
    ]),
    14: ("positions and logits in 16 bits (candle #3520, gpt-neox #1016)", [
        "test_contract: test_tables_are_exact_whatever_the_dtype",
        "test_contract: test_neighbouring_positions_differ_in_a_bfloat16_model",
        "test_scoring: test_half_precision_logits_are_scored_in_float32",
    ]),
    15: ("sums in float32 (OLMo-core)", [
        "test_pitfalls: test_sums_stay_exact_past_what_float32_can_count",
    ]),
    16: ("a perplexity that overflows", [
        "test_evaluation: test_a_loss_too_large_for_a_perplexity_is_kept",
        "test_results: test_json_is_strict_even_with_infinities",
    ]),
    17: ("dropout left on, or the mode changed", [
        "test_evaluation: test_dropout_is_off_and_the_mode_is_left_as_it_was",
        "test_scoring: test_the_mode_is_left_as_it_was",
    ]),
    18: ("bytes and tokens mixed up (lingua #46)", [
        "test_evaluation: test_bits_per_byte_of_bytes_is_the_loss_in_bits",
        "test_evaluation: test_bits_per_byte_counts_the_bytes_of_targets_alone",
        "test_tokenizer: test_round_trip_and_byte_lengths_are_exact",
    ]),
    19: ("text of the test that was trained on", [
        "test_corpus: test_splits_hold_every_document_once_and_stay_when_one_is_added",
        "test_corpus: test_a_text_that_stands_twice_is_kept_once_under_the_first_name",
    ]),
    20: ("random numbers that one encoding takes from another", [
        "test_fairness: test_weights_that_are_not_the_encodings_start_equal",
        "test_fairness: test_the_first_batches_are_equal_for_all_encodings",
    ]),
    21: ("absolute positions left on beside relative ones (x-transformers #70)", [
        "test_contract: test_shift_of_all_positions",
        "test_diagnostics: test_distances_alone_do_not_feel_a_shift",
        "test_contract: test_parameter_count_is_the_documented_formula",
    ]),
    22: ("a model that sees the future", [
        "test_contract: test_causal",
        "test_attention: test_every_kernel_refuses_to_see_the_future",
    ]),
    23: ("a fast kernel that is not the formula", [
        "test_contract: test_fast_path_is_the_dense_oracle_forward_and_gradient",
        "test_attention: test_the_chosen_kernel_is_the_oracle_forward_and_gradient",
    ]),
    24: ("documents without a target (streaming-llm #77)", [
        "test_evaluation: test_documents_too_short_are_a_status_with_numbers",
        "test_targets: test_too_short_documents_are_counted_out_loud",
    ]),
    25: ("a stride or a length that leaves tokens out", [
        "test_targets: test_a_stride_beyond_the_shortest_window_is_refused",
        "test_targets: test_targets_longer_than_the_shortest_window_are_refused",
        "test_targets: test_a_window_of_one_token_is_refused",
        "test_cli: test_a_mistake_gets_one_message_and_exit_2",
    ]),
    26: ("a choice made on test lengths; the one search there is reads validation text", [
        "test_longrope_search: test_only_validation_documents_are_read",
    ]),
    27: ("significance claimed from one seed", [
        "test_report: test_what_is_missing_is_said",
    ]),
    28: ("TensorBoard points doubled, or at the wrong step", [
        "test_board: test_steps_of_an_evaluation_are_lengths",
        "test_board: test_writing_again_doubles_nothing_and_leaves_nothing_stale",
        "test_board: test_a_resumed_run_has_each_point_once_in_its_files",
        "test_tb_export: test_a_rebuilt_evaluation_is_the_one_seen_live",
    ]),
    29: ("the first length beyond training left out (DeepMind)", [
        "test_evaluation: test_buckets_cover_every_position_once",
        "test_derived: test_effective_length_ends_at_the_first_excess",
    ]),
    30: ("a task whose filler holds its keys (zoology #29)", [
        "test_tasks: test_every_question_has_one_answer_and_it_is_the_marked_one",
    ]),
}  # fmt: skip

NAMED = [each for _, tests in PITFALLS.values() for each in tests]


@pytest.mark.parametrize("named", NAMED)
def test_the_test_that_is_named_exists(named: str) -> None:
    file, name = named.split(": ")
    tree = ast.parse((FOLDER / f"{file}.py").read_text())
    assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}


def test_all_thirty_are_there() -> None:
    assert list(PITFALLS) == list(range(1, 31))
    assert len(set(NAMED)) == len(NAMED)
    assert all(tests for _, tests in PITFALLS.values())


def test_sums_stay_exact_past_what_float32_can_count() -> None:
    """float32 stops counting ones at 2^24."""
    count = 2**24 + 1000
    ones = np.ones(count)
    assert _totals(np.zeros(count, np.int64), ones).tolist() == [count]
    assert ones.sum() == count
    assert np.cumsum(ones, dtype=np.float32)[-1] == 2**24
    assert "sums in float32" in MUTANTS  # the losses of the evaluator itself
