"""Which tests are slow: `make test` leaves them out, `make test-all` and `.ci/run` have them.

A test is slow where its file or folder is listed here, where its parameter is a family that is not representative
(`helpers.families`), where it needs a browser, or where it is itself marked with `pytest.mark.slow`.
"""

from __future__ import annotations

# Folders and files, from the folder tests/.
SLOW = (
    "clients/",  # other libraries load what was saved
    "exports/",  # exporters and compilers
    "equivalence/test_criteria_published.py",
    "equivalence/test_discovery.py",
    "equivalence/test_kill_and_resume.py",
    "equivalence/test_real_model.py",
    "unit/test_benchmarks.py",
    "unit/test_card_snippets.py",  # programs of their own
    "unit/test_compare_on_ray.py",
    "unit/test_distributed.py",
    "unit/test_distributed_training.py",
    "unit/test_docs.py",  # every example of the documentation is run
    "unit/test_finetune_runs.py",
    "unit/test_latency.py",  # builds a table of times for each family
    "unit/test_layerwise_runs.py",
    "unit/test_reproduce_all_attention.py",  # trains
    "unit/test_reproduce_gates.py",
    "unit/test_random_kills.py",
    "unit/test_train_runs.py",
    "unit/test_twin.py",  # small models of many architectures
    "unit/test_vocabulary_runs.py",
)
# Single tests of other files: they start Pythons that import torch, export, or repeat whole runs.
SLOW_TESTS = (
    "equivalence/test_after_surgery.py::test_torch_compile",
    "equivalence/test_greedy.py::test_the_same_order_as_the_oracle_down_to_no_heads[t5",
    "equivalence/test_greedy.py::test_two_runs_are_identical[t5",
    "equivalence/test_neuron_checkpoints.py::test_experts_are_layers_of_their_own",
    "equivalence/test_neuron_criteria.py::test_experts_are_told_apart_by_sample",
    "equivalence/test_plain_checkpoints.py::test_code_that_a_config_names_is_neither_run_nor_named_again",
    "equivalence/test_portable_checkpoints.py::test_every_auto_class_that_serves_the_config_is_mapped",
    "equivalence/test_repair.py::test_a_resumed_run_is_the_same_byte_for_byte",
    "equivalence/test_repair.py::test_the_model_of_an_earlier_step_has_the_repairs_of_that_step",
    "unit/test_budget_points.py::test_a_run_that_was_killed_at_a_point_goes_on_and_has_all_models",
    "unit/test_budget_points.py::test_the_last_point_is_the_model_that_the_clock_was_content_with",
    "unit/test_cli_budgets.py::test_json_and_tables_of_several_points",
    "unit/test_compare.py::test_a_criterion_with_its_own_compensation_has_a_run_of_its_own",
    "unit/test_compare.py::test_a_row_says_what_its_curve_says",
    "unit/test_compare_studies.py::test_at_a_budget_the_models_at_the_end_are_compared",
    "unit/test_demo.py::test_plain_transformers_runs_what_the_demo_shows",
    "unit/test_demo.py::test_the_fast_model_is_said_as_its_run_has_it",
    "unit/test_examples.py::test_a_classifier_is_pruned_to_its_budget",
    "unit/test_examples.py::test_a_language_model_is_pruned_to_its_budget",
    "unit/test_finetune.py::test_a_full_disk_is_said",
    "unit/test_finetune.py::test_a_killed_training_goes_on_to_the_same_weights",
    "unit/test_finetune.py::test_batches_examples_and_data_sets_are_the_same",
    "unit/test_layerwise.py::test_layers_one_by_one_are_the_whole_model[bart",
    "unit/test_layerwise.py::test_layers_one_by_one_are_the_whole_model[t5",
    "unit/test_lazy.py::test_rooms_import_first",
    "unit/test_lazy.py::test_the_program_imports_nothing_heavy_to_help_or_to_refuse",
    "unit/test_learned_gates.py::test_training_closes_heads_that_do_not_matter",
    "unit/test_methods.py::test_a_run_goes_on_where_it_was_interrupted",
    "unit/test_python_api.py::test_a_comparison_at_a_budget",
    "unit/test_python_api.py::test_a_comparison_is_that_of_the_command_line",
    "unit/test_repair_runs.py::test_an_interrupted_run_goes_on_to_the_same_bytes",
    "unit/test_repair_runs.py::test_compare_runs_each_name_with_its_own_compensation",
    "unit/test_report_exports.py::test_an_export_as_it_is_made",
    "unit/test_report_files.py::test_every_figure_is_written_in_every_format",
    "unit/test_report_snippets.py::test_the_code_for_every_task_runs",
    "unit/test_reproduce.py::test_table_1_equals_the_published_one",
    "unit/test_reproduce.py::test_the_protocol_runs_on_stand_ins_and_its_runs_are_drawn",
    "unit/test_rescore.py::test_a_run_goes_further_as_if_it_had_never_stopped",
    "unit/test_rescore.py::test_a_run_that_an_earlier_version_began_goes_on_as_it_began",
    "unit/test_rescore.py::test_a_run_that_was_killed_goes_on_byte_for_byte",
    "unit/test_rounds.py::test_a_killed_run_goes_on_to_the_same_model",
    "unit/test_rounds.py::test_budgets_of_parameters_memory_and_units",
    "unit/test_rounds.py::test_experts_are_pruned_and_left_without_repair",
    "unit/test_rounds.py::test_rounds_repair_towards_the_dense_model",
    "unit/test_run_directory.py::test_a_finished_run_is_taken_further_and_back",
    "unit/test_run_directory.py::test_a_finished_run_whose_journal_lost_lines_is_not_taken_as_it_is",
    "unit/test_run_directory.py::test_a_resumed_run_is_the_same_byte_for_byte",
    "unit/test_score.py::test_scores_of_shards_add_up[deberta-v3",
    "unit/test_score.py::test_several_criteria_in_one_call_equal_each_alone[deberta-v3",
    "unit/test_verified_removals.py::test_prune_warns_of_what_it_leaves_whole",
)
# Tests of these that are run all the same: one kill, one resume, one export.
FAST = (
    "equivalence/test_kill_and_resume.py::test_a_killed_run_ends_as_one_that_was_left_alone[same-data]",
    "equivalence/test_kill_and_resume.py::test_ctrl_c_ends_with_a_sentence_and_the_same_command_goes_on",
    "exports/test_onnx_openvino.py::test_uneven_models_agree_with_pytorch[bert]",
)


def is_slow(name: str) -> bool:
    """Whether a test is slow by its file: `name` is its id, from the folder tests/."""
    return name.startswith((*SLOW, *SLOW_TESTS)) and name not in FAST
