"""Owns the index of the scheduler's specification, a long table: the test or check that rules out each defect.
Never tests the engine: it proves that the index is complete,
and that a named test exists and fails when its rule breaks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS

TESTS = Path(__file__).resolve().parents[1]
SEEDS = {"S1": 14, "S2": 17, "S3": 7, "S4": 20, "S5": 25}
"""The number of defects of each of the five public designs, R1 to Rn. S1 openinfer #431, S2 mminf #81, S3 openinfer
#416, S4 ATOM, S5 FastDeploy #7038."""
NUM_INVARIANTS = 37
CHECKS = "support/invariants.py"
"""The file that names each invariant it checks, on every plan, step and event of the random lives of
test_state_machine.py. A test there shows that these lives reach what is to be checked."""

Evidence = str | tuple[str, ...]
"""`file::test`, below tests/, or CHECKS; otherwise a sentence:
why the defect cannot occur here, or what is still left open."""

DEFECTS: dict[str, Evidence] = {
    # --- S1: prefill across steps, admission for a whole life ---------------------------------------------------------
    "S1-R1": "engine/core/test_core.py::test_an_empty_prompt_is_refused_at_submit",
    "S1-R2": "engine/core/test_core.py::test_an_abort_in_any_state_frees_everything_at_once",
    "S1-R3": (
        "engine/scheduling/test_settings_act.py::test_i34_a_setting_of_the_engine_changes_a_plan",
        "serve_app/test_serve_run.py::test_the_log_says_what_the_engine_resolved_and_why",
    ),
    "S1-R4": "A rule of measurement: `python -m benchmarks.engine.mixed` compares budgets side by side in one process.",
    "S1-R5": (
        "benchmarks/engine/test_step.py::test_the_mixed_load_runs_on_any_executor_and_says_if_it_measured_anything",
    ),
    "S1-R6": (
        "benchmarks/engine/test_memory.py::test_every_answer_has_its_scripted_length_and_every_pool_was_tight",
        "benchmarks/engine/test_step.py::test_a_stream_that_fails_ends_the_mixed_load_and_is_no_good_figure",
    ),
    "S1-R7": (
        "engine/core/test_core.py::test_a_step_with_prefill_that_ran_out_of_memory_is_tried_again_with_half",
        "engine/core/test_core.py::test_a_second_failure_in_a_row_is_an_error_of_its_own_rows",
        "engine/core/test_mutation_gaps.py::test_the_prefill_limit_is_whole_again_once_the_engine_was_idle",
        "engine/build/test_gpu.py::test_the_largest_step_is_one_that_can_be_planned",
        "engine/build/test_gpu.py::test_a_step_that_does_not_fit_beside_the_weights_is_refused_at_the_start",
    ),
    "S1-R8": (
        "engine/core/test_core.py::test_a_lifetime_writes_one_kv_slot_less_than_its_tokens",
        "engine/test_config.py::test_the_longest_request_is_bounded_by_the_context_or_by_the_whole_kv_cache",
    ),
    "S1-R9": "engine/scheduling/test_batch_modes.py::test_decode_first_holds_prompts_back_and_no_longer_than_its_bound",
    "S1-R10": (
        "engine/core/test_core.py::test_tokens_depend_on_neither_chunking_nor_neighbours_nor_prefix_hits",
        "engine/execution/test_executor.py::test_the_random_number_of_a_sample_is_that_of_the_position_it_fills",
        "engine/execution/test_executor.py::test_seeded_sampling_does_not_depend_on_chunks_or_neighbours",
    ),
    "S1-R11": (
        "engine/core/test_core.py::test_end_of_sequence_ends_the_answer_is_counted_and_is_not_emitted",
        "engine/core/test_core.py::test_end_of_sequence_as_the_first_token_is_counted_the_same_way",
    ),
    "S1-R12": (
        "engine/test_config.py::test_an_executor_without_mixed_rows_serves_steps_that_are_never_mixed",
        "engine/scheduling/test_batch_modes.py::test_prefill_first_steps_are_pure_and_decoding_waits_no_longer_than_its_bound",
    ),
    "S1-R13": (
        "engine/core/test_defects.py::test_as_many_requests_as_there_are_seats_share_a_prefix_as_long_as_the_context",
        "engine/core/test_core.py::test_requests_that_share_a_prefix_share_its_blocks",
    ),
    "S1-R14": (
        "engine/core/test_core.py::test_a_fatal_executor_error_leaves_the_core",
        "engine/test_async_engine.py::test_a_fatal_executor_error_fails_every_stream_once_and_turns_health_false",
        "serve_app/api/test_end_to_end.py::test_a_dead_engine_is_unhealthy_and_refuses",
    ),
    # --- S2: two owners of chunking, mixed batches, spans that must not be cut ----------------------------------------
    "S2-R1": (
        "engine/test_load_snapshot.py::test_every_step_hits_a_graph_or_misses_for_a_reason",
        "engine/execution/gpu/test_model.py::test_hits_and_misses_of_captures_add_up_to_the_steps",
    ),
    "S2-R2": (
        "engine/execution/gpu/test_cuda_graph_buckets.py::test_every_batch_of_decode_rows_fits_a_decode_bucket_of_little_padding",
        "engine/execution/gpu/test_cuda_graph_buckets.py::test_what_no_bucket_holds_is_a_miss_with_its_reason",
        "engine/execution/gpu/test_cuda_graph_buckets.py::test_sizes_that_leave_a_hole_or_are_for_no_step_are_refused",
    ),
    "S2-R3": (
        "engine/test_load_snapshot.py::test_a_step_with_prefill_rows_beside_decode_rows_is_no_decode_step",
        "engine/execution/gpu/test_cuda_graph_buckets.py::test_a_last_chunk_of_one_token_alone_is_no_decode_step",
        "engine/execution/gpu/test_model.py::test_each_step_says_which_capture_it_was_or_why_none",
    ),
    "S2-R4": (
        "engine/scheduling/test_planner.py::test_the_chunk_that_completes_a_prompt_is_last_also_when_it_has_one_token",
        "engine/execution/test_executor.py::test_logits_equal_transformers_for_every_family_and_chunk_size",
    ),
    "S2-R5": (
        "engine/core/test_core.py::test_no_row_of_an_unfinished_prompt_asks_for_a_sample",
        "engine/execution/test_executor.py::test_each_row_kind_returns_what_it_should",
    ),
    "S2-R6": (
        "serve_app/test_serve_run.py::test_a_long_prompt_is_prefilled_while_streams_go_on",
        "serve_app/api/test_end_to_end.py::test_many_streams_at_once_each_get_their_own_answer",
    ),
    "S2-R7": (  # prompt log-probabilities are side outputs here; max_tokens 0 is a last chunk without a token
        "engine/execution/test_prompt_scoring.py::test_prompt_logprobs_come_in_one_event_after_scheduled_and_before_the_first_token",
        "engine/execution/test_prompt_scoring.py::test_max_tokens_0_computes_the_prompt_and_ends_by_length",
    ),
    "S2-R8": (
        "engine/scheduling/test_atomic_spans.py::test_i13_no_chunk_and_no_prefix_hit_ends_inside_a_span",
        "engine/core/test_mutation_gaps.py::test_a_chunk_that_is_short_of_memory_ends_before_the_span_that_it_cannot_finish",
    ),
    "S2-R9": "engine/core/test_defects.py::test_rows_as_many_as_their_tokens_and_as_a_block_holds_are_not_mixed_up",
    "S2-R10": "engine/test_config.py::test_what_the_executor_cannot_do_is_refused_and_not_done_by_halves",
    "S2-R11": "engine/core/test_engine_chunking.py::test_log_probabilities_of_a_prompt_are_those_of_all_its_chunks",
    "S2-R12": (
        "engine/scheduling/test_atomic_spans.py::test_a_span_that_no_step_could_take_is_refused_at_submit_and_never_queued",
        "engine/scheduling/test_atomic_spans.py::test_a_span_as_long_as_may_be_runs_also_with_endless_short_prompts_behind_it",
    ),
    "S2-R13": "engine/core/test_defects.py::test_nobody_decodes_before_a_last_chunk_whatever_its_cursors_say",
    "S2-R14": "engine/test_config.py::test_a_token_budget_that_decode_rows_could_use_up_is_refused",
    "S2-R15": (
        "engine/core/test_defects.py::test_seats_are_never_exceeded_in_any_mode",
        "engine/scheduling/test_planner.py::test_seats_are_never_exceeded_by_partial_prefills_and_decodes_together",
    ),
    "S2-R16": "Internal to the other project: a legacy selector returned its loop variable; we have one planner.",
    "S2-R17": (
        "engine/batch/test_logprobs.py::test_one_chunk_equals_the_single_pass_to_the_last_bit",
        "golden/test_prompt_logprobs.py::test_chunks_of_four_score_a_prompt_as_one_pass_does",
        "engine/execution/gpu/test_model.py::test_captured_and_padded_steps_give_the_logits_of_plain_ones",
    ),
    # --- S3: echo and prompt log-probabilities in chunks --------------------------------------------------------------
    "S3-R1": "engine/core/test_core.py::test_a_failed_step_fails_its_own_rows_and_nobody_else",
    "S3-R2": (
        "engine/execution/test_prompt_scoring.py::test_each_position_is_scored_by_one_chunk_and_the_last_scores_nothing",
        "engine/batch/test_logprobs.py::test_any_partition_of_a_prompt_scores_every_token_once_and_as_transformers_does",
        "engine/batch/test_logprobs.py::test_a_chunk_may_score_from_any_of_its_positions_on",
    ),
    "S3-R3": (
        "engine/execution/test_prompt_scoring.py::test_an_abort_in_the_middle_of_the_prompt_sends_nothing_and_keeps_nothing",
        "engine/execution/test_prompt_scoring.py::test_prompt_logprobs_are_sent_once_and_whole_after_a_preemption_at_any_moment",
    ),
    "S3-R4": (
        "serve_app/api/test_end_to_end.py::test_scores_of_a_prompt_in_many_chunks_are_those_of_a_prompt_in_one",
        "engine/batch/test_logprobs.py::test_a_prompt_of_any_length_holds_the_logits_of_few_positions_at_a_time",
    ),
    "S3-R5": (
        "serve_app/api/test_requests.py::test_a_field_that_would_change_the_answer_is_refused_by_name",
        "serve_app/api/test_requests.py::test_values_that_change_nothing_are_accepted",
        "serve_app/api/test_requests.py::test_max_completion_tokens_wins_over_max_tokens",
    ),
    "S3-R6": (
        "engine/execution/test_prompt_scoring.py::test_the_longest_prompts_are_accepted_with_max_tokens_0_and_one_token_more_is_refused",
    ),
    "S3-R7": (
        "engine/execution/test_prompt_scoring.py::test_positions_that_must_be_scored_are_computed_although_they_are_cached",
        "engine/execution/test_prompt_scoring.py::test_a_hit_does_not_reach_beyond_what_is_scored_after_a_preemption",
        "engine/execution/test_prompt_scoring.py::test_prompt_logprobs_are_the_same_for_every_budget_and_loop",
    ),
    # --- S4: resume before admit, a progress cursor, late output ------------------------------------------------------
    "S4-R1": "engine/scheduling/test_chunk_policy.py::test_a_prompt_that_is_partly_computed_has_a_seat",
    "S4-R2": (
        "engine/core/test_defects.py::test_what_happens_to_a_request_later_does_not_change_a_plan_that_was_launched",
        "engine/execution/test_prompt_scoring.py::test_each_token_carries_its_logprobs_exactly_where_they_were_asked_for",
        "engine/execution/test_prompt_scoring.py::test_a_prompt_of_one_token_has_no_prediction",
    ),
    "S4-R3": "A cost, which `benchmarks.engine.scheduler` measures; rows carry their requests: none is searched.",
    "S4-R4": (
        "engine/execution/test_executor.py::test_slots_and_positions_equal_a_naive_count",
        "Its cost is measured by `python -m benchmarks.engine.scheduler` (build_inputs).",
    ),
    "S4-R5": (
        "engine/batch/test_logprobs.py::test_a_step_that_asks_for_no_logits_computes_none",
        "The rest is typing, which mypy --strict checks.",
    ),
    "S4-R6": (
        "engine/core/test_defects.py::test_a_dry_run_is_what_the_step_then_carries_and_changes_nothing",
        "engine/scheduling/test_dry_run.py::test_the_shape_of_a_long_prompt_is_that_of_its_next_chunk_and_not_of_the_whole_prompt",
    ),
    "S4-R7": (
        "engine/scheduling/test_planner.py::test_the_chunk_that_completes_a_prompt_is_last_also_when_it_has_one_token",
        "engine/core/test_core.py::test_no_row_of_an_unfinished_prompt_asks_for_a_sample",
    ),
    "S4-R8": (
        "engine/core/test_overlap.py::test_a_step_of_prefill_alone_still_delivers_the_results_of_the_step_before",
        "engine/core/test_overlap.py::test_there_is_work_until_the_last_step_is_read_back",
        "engine/core/test_overlap.py::test_results_arrive_exactly_one_step_after_their_launch",
        "engine/lockstep/test_padding.py::test_a_rank_that_only_reads_back_makes_the_exchanges_of_the_step_that_others_launch",
    ),
    "S4-R9": (
        "engine/scheduling/test_preemption.py::test_whoever_is_preempted_goes_on_with_the_same_tokens",
        "golden/test_greedy_text.py::test_text_is_the_same_after_a_preemption_computes_it_again",
    ),
    "S4-R10": (
        "engine/scheduling/test_preemption.py::test_an_answer_that_is_computed_again_in_chunks_samples_after_the_last_one_only",
    ),
    "S4-R11": (
        "engine/core/test_core.py::test_a_prompt_that_is_still_being_chunked_lends_only_what_is_computed",
        "engine/core/test_core.py::test_a_failed_chunk_is_never_lent_to_others",
        "engine/core/test_overlap.py::test_a_chunk_is_lent_to_others_only_once_it_is_read_back",
    ),
    "S4-R12": (
        "engine/core/test_defects.py::test_a_hit_leaves_the_prefix_cached_for_the_next_and_nobody_writes_into_it",
        "engine/core/test_core.py::test_a_repeated_prompt_computes_only_its_last_block",
    ),
    "S4-R13": "engine/core/test_defects.py::test_a_begun_prompt_is_no_decode_row_while_prefill_is_held_back",
    "S4-R14": (
        "engine/core/test_drafts.py::test_a_preemption_drops_the_drafts_and_never_shortens_the_prompt",
        "engine/core/test_overlap.py::test_preempting_a_request_with_a_row_in_flight_discards_its_token_and_samples_the_same_again",
    ),
    "S4-R15": (
        "engine/core/test_defects.py::test_a_short_prompt_and_a_long_one_hold_each_other_up_no_longer_than_a_step",
        "engine/scheduling/test_designs.py::test_s4_decoding_waits_no_longer_than_its_bound",
    ),
    "S4-R16": "engine/core/test_defects.py::test_a_prompt_in_one_chunk_after_a_hit_keeps_its_last_token",
    "S4-R17": "engine/core/test_core.py::test_an_abort_in_any_state_frees_everything_at_once",
    "S4-R18": (
        "engine/core/test_core.py::test_what_the_kv_cache_can_never_hold_is_refused_with_its_capacity",
        "engine/test_async_engine.py::test_a_rejected_request_raises_before_its_first_event_and_takes_nothing",
    ),
    "S4-R19": (
        "kernels/cpu/test_attention.py::test_mixed_rows_match_the_reference",
        "kernels/cpu/test_attention.py::test_a_chunk_of_any_length_after_any_context_matches_the_reference",
        "kernels/triton/test_attention.py::test_a_row_has_its_splits_by_its_own_length",
        "kernels/triton/test_attention.py::test_decode_rows_of_a_captured_mixed_step_have_their_keys_split",
    ),
    "S4-R20": (
        "engine/scheduling/test_atomic_spans.py::test_a_span_that_no_step_could_take_is_refused_at_submit_and_never_queued",
    ),
    # --- S5: ratio reservation, one active chunk, retraction ----------------------------------------------------------
    "S5-R1": (
        "engine/scheduling/test_reservation.py::test_an_answer_is_clipped_once_for_admission",
        "engine/scheduling/test_reservation.py::test_answers_that_are_admitted_in_one_step_are_each_reserved",
    ),
    "S5-R2": (
        "engine/scheduling/test_reservation.py::test_the_ratio_falls_with_every_decode_step_also_while_requests_wait"
    ),
    "S5-R3": "engine/scheduling/test_chunk_policy.py::test_no_more_prompts_are_partly_computed_than_the_setting_says",
    "S5-R4": "engine/core/test_defects.py::test_a_request_is_admitted_while_a_step_is_in_flight",
    "S5-R5": "engine/core/test_core.py::test_a_traced_step_says_what_it_carried",
    "S5-R6": (
        "engine/scheduling/test_preemption.py::test_a_victim_has_no_row_in_the_step_that_takes_its_memory",
        "engine/scheduling/test_reservation.py::test_the_less_is_reserved_the_more_requests_run",
    ),
    "S5-R7": (
        "engine/scheduling/test_preemption.py::test_a_victim_has_no_row_in_the_step_that_takes_its_memory",
        "engine/scheduling/test_reservation.py::test_the_less_is_reserved_the_more_requests_run",
    ),
    "S5-R8": (
        "engine/scheduling/test_reservation.py::test_the_ratio_snaps_back_to_its_least_value_after_a_preemption_left_it_below",
    ),
    "S5-R9": "engine/scheduling/test_reservation.py::test_an_idle_engine_starts_over_with_the_first_ratio",
    "S5-R10": (
        "engine/scheduling/test_reservation.py::test_after_a_preemption_the_ratio_is_what_the_remaining_answers_used",
        "engine/scheduling/test_settings_act.py::test_i34_a_setting_changes_a_plan",
    ),
    "S5-R11": "engine/scheduling/test_reservation.py::test_a_lone_request_is_admitted_whatever_the_reservation_says",
    "S5-R12": "engine/scheduling/test_reservation.py::test_a_preempted_request_reserves_what_is_left_of_its_answer",
    "S5-R13": (
        "engine/core/test_defects.py::test_a_storm_of_preemptions_ends_and_computes_nothing_over_and_over",
        "engine/scheduling/test_preemption.py::test_a_step_that_preempts_admits_nobody_and_the_victim_keeps_its_place",
    ),
    "S5-R14": (
        "engine/scheduling/test_batch_modes.py::test_prefill_first_steps_are_pure_and_decoding_waits_no_longer_than_its_bound",
    ),
    "S5-R15": (
        "engine/core/test_drafts.py::test_a_step_reserves_one_token_and_its_drafts_for_each_decode_row_and_prefill_gets_the_rest",
        "engine/core/test_drafts.py::test_a_row_may_grow_by_several_blocks_at_once",
    ),
    "S5-R16": (
        "engine/core/test_mutation_gaps.py::test_blocks_that_a_prompt_holds_ahead_of_its_progress_are_not_lent_to_the_next_one",
        "engine/core/test_core.py::test_blocks_that_a_request_keeps_for_its_retry_are_not_given_to_others",
    ),
    "S5-R17": (
        "engine/core/test_defects.py::test_the_tail_of_a_prompt_and_the_next_one_fill_the_step",
        "engine/scheduling/test_designs.py::test_s5_has_one_active_chunk_and_fills_the_rest_of_its_step",
    ),
    "S5-R18": (
        "engine/scheduling/test_planner.py::test_a_request_that_waits_looks_its_prefix_up_once_an_epoch_and_not_once_a_step",
    ),
    "S5-R19": (  # a plan walks the queue once: each way to refuse a request ends in a plan
        "engine/test_load_snapshot.py::test_every_reason_has_its_scenario",
        "engine/scheduling/test_waiting.py::test_a_step_tests_no_more_misfits_than_its_bound",
    ),
    "S5-R20": (
        "engine/scheduling/test_preparing.py::test_a_request_that_ends_while_it_is_prepared_ends_once_and_leaves_nothing",
        "engine/scheduling/test_preparing.py::test_a_request_that_is_prepared_keeps_its_place_although_later_ones_ran_first",
    ),
    "S5-R21": (
        "engine/core/test_core.py::test_an_abort_in_any_state_frees_everything_at_once",
        "engine/scheduling/test_preparing.py::test_a_request_that_ends_while_it_is_prepared_ends_once_and_leaves_nothing",
    ),
    "S5-R22": (
        "engine/core/test_core.py::test_an_abort_in_any_state_frees_everything_at_once",
        "engine/core/test_engine_chunking.py::test_a_step_that_fails_in_a_later_chunk_fails_its_request_and_leaks_nothing",
    ),
    "S5-R23": "engine/core/test_defects.py::test_growth_evicts_only_the_blocks_that_it_takes",
    "S5-R24": (
        "engine/core/test_defects.py::test_an_answer_and_a_begun_prompt_that_hold_all_memory_both_get_to_their_ends",
    ),
    "S5-R25": (
        "engine/core/test_defects.py::test_under_long_prompts_and_short_answers_ratio_yields_what_full_does",
        "engine/core/test_defects.py::test_a_begun_prompt_is_no_victim_while_an_answer_can_be",
    ),
}

INVARIANTS: dict[str, Evidence] = {
    # --- safety -------------------------------------------------------------------------------------------------------
    "I-1": (
        CHECKS,
        "golden/test_greedy_text.py::test_greedy_text_is_the_same_for_every_chunk_budget_and_any_neighbours",
    ),
    "I-2": (
        CHECKS,
        "engine/scheduling/test_planner.py::test_prefill_chunks_fill_the_budget_in_arrival_order",
        "engine/scheduling/test_planner.py::test_every_decoding_request_has_a_row_in_every_step_while_a_long_prompt_is_prefilled",
    ),
    "I-3": CHECKS,
    "I-4": CHECKS,
    "I-5": CHECKS,
    "I-6": CHECKS,
    "I-7": CHECKS,
    "I-8": CHECKS,
    "I-9": (
        CHECKS,
        "engine/scheduling/test_state_slots.py::test_tokens_are_those_of_a_model_without_state",
        "engine/models/test_recurrent_state.py::test_moves_are_made_in_their_order_then_restores_and_saves_at_the_end",
        "golden/test_hybrid_families.py::test_a_hit_starts_from_the_snapshot_of_its_prefix_and_nowhere_else",
    ),
    "I-10": (
        CHECKS,
        "engine/core/test_mutation_gaps.py::test_a_block_is_freed_by_victims_only_if_nobody_else_holds_it",
        "engine/scheduling/test_block_manager.py::test_releasing_twice_raises_and_names_the_block",
    ),
    "I-11": (
        CHECKS,
        "engine/scheduling/test_block_manager.py::test_a_salt_keeps_equal_prompts_apart",
        "engine/test_multimodal_inputs.py::test_two_salts_share_neither_blocks_nor_contents",
    ),
    "I-12": (CHECKS, "engine/execution/test_executor.py::test_slots_and_positions_equal_a_naive_count"),
    "I-13": (
        CHECKS,
        "engine/scheduling/test_atomic_spans.py::test_i13_no_chunk_and_no_prefix_hit_ends_inside_a_span",
    ),
    "I-14": (
        CHECKS,
        "engine/execution/test_prompt_scoring.py::test_prompt_logprobs_are_the_same_for_every_budget_and_loop",
    ),
    "I-15": (
        CHECKS,
        "engine/scheduling/test_reservation.py::test_what_a_request_was_promised_is_given_back_when_it_is_aborted",
    ),
    "I-16": (
        CHECKS,
        "engine/scheduling/test_reservation.py::test_after_a_preemption_the_ratio_is_what_the_remaining_answers_used",
    ),
    "I-17": (
        "engine/scheduling/test_reservation.py::test_answers_that_are_admitted_in_one_step_are_each_reserved",
        "engine/scheduling/test_reservation.py::test_a_preempted_request_reserves_what_is_left_of_its_answer",
        "engine/scheduling/test_designs.py::test_s5_admits_beside_the_share_of_running_answers_and_those_admitted_now_in_full",
    ),
    "I-18": (
        CHECKS,
        "engine/scheduling/test_preemption.py::test_retract_takes_the_shortest_answer_and_then_the_longest_prompt",
        "engine/core/test_defects.py::test_a_begun_prompt_is_no_victim_while_an_answer_can_be",
        "engine/scheduling/test_preemption.py::test_retract_takes_the_shorter_answer_whatever_the_prompts",
    ),
    # --- liveness -----------------------------------------------------------------------------------------------------
    "I-19": CHECKS,
    "I-20": (  # and EngineCore asserts it before every step: "live requests, but nothing to run"
        "engine/core/test_defects.py::test_an_answer_and_a_begun_prompt_that_hold_all_memory_both_get_to_their_ends",
        "engine/test_state_machine.py::test_the_lives_above_reach_what_they_are_to_check",
    ),
    "I-21": (
        CHECKS,
        "engine/scheduling/test_preemption.py::test_younger_answers_never_take_the_last_block_from_the_oldest_prompt",
    ),
    "I-22": CHECKS,
    "I-23": (CHECKS, "engine/scheduling/test_planner.py::test_a_request_is_overtaken_no_more_often_than_its_bound"),
    "I-24": "engine/core/test_defects.py::test_a_storm_of_preemptions_ends_and_computes_nothing_over_and_over",
    "I-25": "engine/core/test_defects.py::test_the_tail_of_a_prompt_and_the_next_one_fill_the_step",
    # --- events and errors --------------------------------------------------------------------------------------------
    "I-26": (
        CHECKS,
        "engine/test_async_engine.py::test_an_id_in_use_is_refused_until_its_request_has_ended",
    ),
    "I-27": (
        CHECKS,
        "engine/scheduling/test_atomic_spans.py::test_spans_that_overlap_or_are_empty_or_outside_the_prompt_are_refused",
    ),
    "I-28": CHECKS,
    "I-29": CHECKS,
    "I-30": (
        CHECKS,
        "engine/core/test_drafts.py::test_stop_tokens_stay_banned_until_min_tokens",
    ),
    "I-31": (
        CHECKS,
        "engine/test_load_snapshot.py::test_every_step_hits_a_graph_or_misses_for_a_reason",
    ),
    "I-32": (
        CHECKS,
        "engine/core/test_defects.py::test_a_dry_run_is_what_the_step_then_carries_and_changes_nothing",
        "engine/lockstep/test_padding.py::test_a_step_that_fails_half_way_makes_the_rest_of_its_exchanges",
        "engine/lockstep/test_padding.py::test_a_rank_with_fewer_passes_than_others_makes_as_many",
    ),
    "I-33": (CHECKS, "engine/core/test_overlap.py::test_tokens_and_ends_are_those_of_the_plain_loop"),
    "I-34": (
        "engine/scheduling/test_settings_act.py::test_i34_a_setting_changes_a_plan",
        "engine/scheduling/test_settings_act.py::test_i34_a_setting_of_the_engine_changes_a_plan",
    ),
    "I-35": (
        CHECKS,
        "engine/core/test_drafts.py::test_published_blocks_hold_accepted_tokens_only",
        "engine/core/test_drafts.py::test_a_preemption_drops_the_drafts_and_never_shortens_the_prompt",
    ),
    "I-36": (  # a cost, which `python -m benchmarks.engine.scheduler` measures; its tests check what it measures
        "benchmarks/engine/test_scheduler.py::test_a_measurement_starts_with_the_load_it_is_named_after",
        "benchmarks/engine/test_scheduler.py::test_the_last_line_is_one_document_with_a_cell_for_each_load_and_phase",
    ),
    "I-37": (
        CHECKS,
        "engine/core/test_kv_tiers.py::test_what_the_cache_has_lost_is_loaded_instead_of_computed",
        "engine/core/test_kv_tiers.py::test_after_a_failed_load_the_rest_is_computed",
        "engine/core/test_kv_tiers.py::test_running_requests_come_before_loads_when_memory_runs_out",
    ),
}

INDEX = {**DEFECTS, **INVARIANTS}


def evidence_of(name: str) -> tuple[str, ...]:
    found = INDEX[name]
    return (found,) if isinstance(found, str) else found


def named_by(name: str) -> list[str]:
    return [entry for entry in evidence_of(name) if "::" in entry]


def test_every_defect_and_every_invariant_of_the_specification_has_its_entry_in_order() -> None:
    assert list(DEFECTS) == [f"{seed}-R{n}" for seed, count in SEEDS.items() for n in range(1, count + 1)]
    assert list(INVARIANTS) == [f"I-{n}" for n in range(1, NUM_INVARIANTS + 1)]


@pytest.mark.parametrize("name", INDEX)
def test_what_the_index_names_exists(name: str) -> None:
    for entry in evidence_of(name):
        if entry == CHECKS:
            assert re.search(rf"\b{name}\b", (TESTS / CHECKS).read_text()), f"{CHECKS} does not name {name}"
        elif "::" in entry:
            file, test = entry.split("::")
            assert re.search(rf"^(async )?def {test}\(", (TESTS / file).read_text(), flags=re.MULTILINE), entry
        else:
            assert re.fullmatch(r"[A-Z][^.].{20,}\.", entry), f"not a sentence: {entry}"


def test_every_invariant_is_checked_by_something_that_runs() -> None:
    assert [name for name in INVARIANTS if not named_by(name) and CHECKS not in evidence_of(name)] == []


def proven() -> dict[str, set[str]]:
    """Map each code to the tests that failed when one of its fixes was taken out, as tests/mutations.md records."""
    rows = re.findall(r"^\| (.+?) \| .+ \| `([^`\[]+).*` \|$", (TESTS / "mutations.md").read_text(), re.MULTILINE)
    caught = {name: f"engine/{test}" for name, test in rows}
    found: dict[str, set[str]] = {}
    for mutation in MUTATIONS:
        for code in mutation.codes:
            found.setdefault(code, set()).add(caught.get(mutation.name, "nothing"))
    return found


@pytest.mark.parametrize("name", sorted(INDEX.keys() & proven().keys()))
def test_a_test_that_the_index_names_fails_when_the_rule_is_broken(name: str) -> None:
    """Applies to each code whose rule a mutation breaks.
    `make test-mutations` runs the tests named here before any other."""
    catchers = proven()[name]
    assert catchers & set(named_by(name)), f"broken, {name} is noticed by {catchers}, which it does not name"


def test_every_regression_test_of_defects_is_in_the_index_and_names_a_defect_it_is_there_for() -> None:
    text = (TESTS / "engine/core/test_defects.py").read_text()
    named = dict(re.findall(r'^def (test_\w+)\([^"]*"""([^"]*)"""', text, flags=re.MULTILINE))
    assert set(named) == set(re.findall(r"^def (test_\w+)\(", text, flags=re.MULTILINE))
    for test, docstring in named.items():
        places = {name for name in INDEX if f"engine/core/test_defects.py::{test}" in named_by(name)}
        claimed = set(re.findall(r"\b(?:S\d-R|I-)\d+\b", docstring))
        assert claimed, test
        assert claimed == places, test
