"""Which test proves which of the cases that must hold, numbered as in the list of cases; each named test exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

CASES: dict[int, tuple[str, list[str]]] = {
    1: ("waves of fingerprints", ["scheduler/test_paths.py::test_waves_of_requests"]),
    2: (
        "warm prefixes",
        [
            "scheduler/test_paths.py::test_cached_prefixes",
            "scheduler/test_paths.py::test_only_the_answer_is_captured_from_a_warm_prefix",
        ],
    ),
    3: ("chunked prefill", ["scheduler/test_paths.py::test_chunked_prefill"]),
    4: ("different layers in one batch", ["scheduler/test_paths.py::test_different_layers_in_one_batch"]),
    5: (
        "every layer",
        [
            "engine/test_architectures.py::test_architecture",
            "engine/test_oracle.py::test_every_layer_and_operation",
            "scheduler/test_cases.py::test_what_each_layer_adds",
        ],
    ),
    6: (
        "right, refused by name, or used with a warning",
        [
            "runtime/test_deviations.py::*",
            "runtime/test_compared.py::*",
            "engine/test_architectures.py::test_architecture",
        ],
    ),
    7: (
        "however an answer ends",
        [
            "engine/test_behaviour.py::test_ends_of_answers",
            "scheduler/test_paths.py::test_rows_are_prompt_plus_generated_minus_one",
            "scheduler/test_paths.py::test_rows_after_a_stop_token_and_after_an_end_of_sequence",
            "engine/test_stream.py::test_leaving_early_aborts_and_keeps_the_captures_so_far",
        ],
    ),
    8: ("preemption", ["scheduler/test_crowded.py::test_preemption"]),
    9: (
        "samples of one prompt",
        [
            "scheduler/test_paths.py::test_samples_of_one_prompt",
            "engine/test_behaviour.py::test_samples_have_their_own_rows",
        ],
    ),
    10: (
        "fetching in any way",
        [
            "engine/test_behaviour.py::test_fetching_in_any_way",
            "engine/test_behaviour.py::test_fetching_at_once_from_many_tasks",
            "engine/test_behaviour.py::test_after_close",
            "engine/test_processes.py::test_closing",
        ],
    ),
    11: ("captures that nobody fetches", ["engine/test_behaviour.py::test_300_captures_that_nobody_fetches"]),
    12: ("an outlier", ["scheduler/test_cases.py::test_an_outlier_of_thirty_thousand"]),
    13: (
        "cap and ablation act on the whole stream",
        [
            "engine/test_oracle.py::test_every_layer_and_operation",
            "engine/test_oracle.py::test_the_orthogonal_part_does_not_move",
        ],
    ),
    14: ("exactly + v, once", ["engine/test_behaviour.py::test_set_clear_set_adds_the_vector_once"]),
    15: (
        "where it applies",
        ["scheduler/test_paths.py::test_where_it_applies", "scheduler/test_cases.py::test_one_message_is_steered"],
    ),
    16: (
        "changed scales, and a vector edited in place",
        [
            "engine/test_behaviour.py::test_set_clear_set_adds_the_vector_once",
            "engine/test_behaviour.py::test_a_vector_edited_in_place",
        ],
    ),
    17: (
        "one prompt under many steerings",
        [
            "scheduler/test_paths.py::test_one_prompt_under_many_steerings",
            "scheduler/test_paths.py::test_the_end_of_a_cached_answer_is_not_taken_for_a_steered_prompt",
            "engine/test_oracle.py::test_prefix_caching_never_mixes_steerings",
        ],
    ),
    18: ("tasks and threads under load", ["scheduler/test_paths.py::test_threads_and_tasks_under_load"]),
    19: (
        "compiled, a warm cache, a plain engine",
        [
            "engine/test_oracle.py::test_compiled",
            "scheduler/test_cases.py::test_a_compile_cache_that_a_plain_engine_left",
            "engine/test_processes.py::test_a_plain_engine_beside_ours_is_untouched",
        ],
    ),
    20: (
        "clear errors at every entry point",
        [
            "scheduler/test_cases.py::test_a_bad_spec_at_every_entry_point",
            "scheduler/test_cases.py::test_bad_arguments_of_a_layers_own_methods",
            "engine/test_behaviour.py::test_arguments_that_cannot_be_used",
            "steering/test_specs.py::test_vectors_that_cannot_be_used",
            "steering/test_specs.py::test_a_zero_vector_has_no_direction",
            "steering/test_specs.py::test_bounds",
            "engine/test_config.py::test_what_cannot_work",
        ],
    ),
    21: ("one bad request among eight", ["engine/test_behaviour.py::test_one_bad_request_among_eight"]),
    22: (
        "every way to steer, on every way to ask",
        [
            "engine/test_oracle.py::test_session_and_request_are_the_same",
            "engine/test_stream.py::test_a_stream_follows_the_session",
            "session/test_lab.py::test_twins_answer_as_the_coroutines_do",
        ],
    ),
    23: (
        "ids of a chat",
        [
            "scheduler/test_cases.py::test_ids_of_a_chat_are_those_that_the_engine_saw",
            "test_chat.py::test_tokens_are_those_of_the_template",
            "test_chat.py::test_no_second_beginning_of_sequence",
        ],
    ),
    24: (
        "messages in templates",
        [
            "test_chat.py::test_a_default_system_message_belongs_to_nobody",
            "test_chat.py::test_contents_that_could_be_mistaken",
            "test_chat.py::test_a_template_that_trims",
            "test_chat.py::test_a_template_that_strips_earlier_thinking",
            "test_chat.py::test_a_template_that_repeats_a_message",
            "test_chat.py::test_a_template_that_reorders",
        ],
    ),
    25: ("nothing is cut in silence", ["engine/test_behaviour.py::test_nothing_is_cut_in_silence"]),
}


@pytest.mark.parametrize("case", list(CASES))
def test_every_case_has_its_test(case: int) -> None:
    for name in CASES[case][1]:
        file, _, function = name.partition("::")
        tree = ast.parse((Path(__file__).parents[1] / file).read_text())
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
        assert found if function == "*" else function in found, name


def test_all_of_them() -> None:
    assert list(CASES) == list(range(1, 26))
