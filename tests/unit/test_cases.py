"""Users' troubles (shared/cases/cases.md of the design), each with the tests that have its whole kind.

Here because most kinds are tested where their room is tested, under a name that says what is right.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

CASES: dict[str, list[str]] = {
    "C001 split character": ["triton/test_contract.py::test_a_character_of_several_tokens_comes_whole", "engine/test_service_real.py::test_streamed_and_whole_text_are_the_same"],
    "C004 prompt leaks into output": ["engine/test_service_real.py::test_prompt_that_ends_inside_a_character_is_not_repeated"],
    "C006 client decodes pieces": ["unit/test_client_sse.py::test_one_byte_at_a_time_gives_the_same_events"],
    "C008 lone surrogate": ["triton/test_contract.py::test_lone_surrogate_in_json_is_refused_and_the_next_request_works"],
    "C009 raw bytes without length": ["triton/test_faults_clients.py::test_raw_bytes_without_their_length"],
    "C012 stop string over tokens": ["engine/test_service_real.py::test_no_piece_of_a_stop_string_is_sent"],
    "C014 empty first chunks": ["engine/test_service_real.py::test_text_held_back_for_a_long_stop_string_is_no_end", "triton/test_contract.py::test_tokens_without_text_wait_and_are_counted"],
    "C016 never stops": ["engine/test_service_real.py::test_chat_stops_at_its_end_of_turn"],
    "C018 control tokens in user text": ["triton/test_contract.py::test_bad_prompt_is_refused_by_name", "triton/test_contract.py::test_chat_template_and_ensemble"],
    "C020 opening tag in the prompt": ["engine/test_chat_output.py::test_reasoning_is_told_apart"],
    "C022 thinking cannot be switched off": ["triton/test_contract.py::test_chat_messages", "triton/test_contract.py::test_bad_prompt_is_refused_by_name"],
    "C024 content as a list": ["engine/test_service_real.py::test_content_as_parts_is_the_same_prompt"],
    "C026 template applied twice": ["engine/test_service_real.py::test_rendered_chat_sent_as_a_raw_prompt_is_not_templated_again"],
    "C027 broken JSON": ["triton/test_contract.py::test_bad_parameter_is_refused_by_name", "triton/test_contract.py::test_bad_requests_on_a_shared_stream_leave_the_good_ones_alone"],
    "C028 text for a boolean": ["triton/test_contract.py::test_bad_parameter_is_refused_by_name", "unit/test_service_sampling.py::test_values_are_taken_as_meant"],
    "C029 parameter dropped in silence": ["triton/test_contract.py::test_bad_parameter_is_refused_by_name", "triton/test_contract.py::test_sampling_parameters_as_tensor_and_as_request_parameters"],
    "C031 bias id outside the vocabulary": ["engine/test_service_real.py::test_what_would_harm_the_engine_never_reaches_it"],
    "C034 top_k odd": ["engine/test_service_real.py::test_what_would_harm_the_engine_never_reaches_it", "triton/test_contract.py::test_bad_parameter_is_refused_by_name"],
    "C036 limit over the context": ["triton/test_contract.py::test_a_limit_over_the_context_is_lowered_to_what_is_left"],
    "C039 default limit": ["triton/test_contract.py::test_default_limit_is_sixteen_tokens_and_shows_as_length"],
    "C041 bad schema": ["engine/test_service_real.py::test_what_would_harm_the_engine_never_reaches_it"],
    "C043 minus infinity in logprobs": ["engine/test_service_real.py::test_forbidden_tokens_leave_strict_json"],
    "C045 n=2 streams mixed": ["engine/test_service_real.py::test_several_sequences_are_whole", "triton/test_contract.py::test_several_sequences_are_elements_of_every_output"],
    "C048 empty prompt": ["engine/test_service_real.py::test_nearly_empty_prompts_are_answered_or_refused", "triton/test_contract.py::test_bad_prompt_is_refused_by_name"],
    "C050 prompt over the limit": ["engine/test_service_real.py::test_prompt_over_the_limit_is_refused_with_both_numbers"],
    "C053 message over the gRPC limit": ["triton/test_faults_clients.py::test_a_prompt_of_5_mb", "triton/test_clients.py::test_message_over_the_limit"],
    "C054 plain infer on a streaming model": ["triton/test_contract.py::test_plain_infer_says_which_model_can", "triton/test_clients.py::test_plain_infer_on_the_streaming_model"],
    "C055 no clear end": ["triton/test_contract.py::test_exactly_one_final_mark"],
    "C057 one bad request on a shared stream": ["triton/test_faults_clients.py::test_one_bad_request_on_a_shared_stream", "triton/test_faults_clients.py::test_one_bad_request_with_a_status_code"],
    "C058 value returned from execute": ["unit/test_service_placement.py::test_execute_always_returns_none"],
    "C062 prompt in the answer": ["triton/test_contract.py::test_prompt_is_in_front_unless_excluded", "triton/test_contract.py::test_streams_one_delta_a_token_without_the_prompt"],
    "C064 cancel in mid-stream": ["triton/test_faults_clients.py::test_cancel_stops_the_work", "engine/test_service_real.py::test_cancelled_request_leaves_the_engine_at_once"],
    "C066 HTTP client leaves": ["triton/test_faults_clients.py::test_an_http_client_that_leaves"],
    "C068 time limit not kept": ["triton/test_faults_clients.py::test_deadlines_hold"],
    "C070 unload after a stream": ["triton/test_faults_clients.py::test_reloads_under_traffic"],
    "C073 workers outlive the server": ["engine/test_ranks.py::test_two_ranks_give_the_tokens_of_one"],
    "C075 stop in mid-stream": ["triton/test_supervisor.py::test_sigterm_with_open_streams"],
    "C078 shared memory too small": ["triton/test_faults_machine.py::test_dev_shm_too_small"],
    "C080 two servers, one /dev/shm": ["triton/test_supervisor.py::test_two_servers_on_one_host"],
    "C081 GPU kind with TP": ["unit/test_service_placement.py::test_one_gpu_kind_with_several_ranks_is_refused_in_the_official_words"],
    "C083 fork after CUDA": ["unit/test_imports.py::test_nothing_of_ours_touches_cuda_or_vllm_when_it_is_imported"],
    "C085 text in model.json": ["unit/test_service_settings.py::test_bad_model_json_is_refused_by_name"],
    "C086 ready while dead": ["triton/test_supervisor.py::test_stub_killed", "triton/test_faults_engine.py::test_requests_while_the_engine_is_away_fail_at_once"],
    "C089 no engine metrics": ["engine/test_service_real.py::test_metrics_have_the_engines_numbers"],
    "C090 crash under load": ["triton/test_soak.py::test_soak"],
    "C092 greedy is not repeatable": ["engine/test_service_real.py::test_greedy_answer_in_company"],
    "C093 unknown LoRA": ["triton/test_contract.py::test_unknown_adapter_is_refused_with_the_known_ones", "engine/test_modalities_real.py::test_adapters_on_nvfp4_weights_by_list_and_by_request"],
    "C095 scale missing": ["unit/test_plugin_scales.py::test_a_scale_that_was_not_loaded_is_refused_by_name"],
    "C097 TP cuts a scale group": ["unit/test_plugin_scales.py::test_a_width_that_cuts_a_scale_group_is_refused_with_layer_width_and_group"],
    "C098 format not for this GPU": ["unit/test_plugin_formats.py::test_every_format_of_vllm_has_one_answer_on_volta"],
    "C100 overflow in half precision": ["engine/test_canary.py::test_the_load_is_refused_by_the_name_of_the_layer"],
    "C102 no code for sm_70": ["unit/test_docker_images.py::test_a_wheel_with_other_code_is_no_wheel_for_volta", "unit/test_docker_images.py::test_one_vllm_one_torch_one_nccl"],
    "C105 converted file, wrong order": ["unit/test_cases.py::test_our_tensor_names_are_known_to_the_gguf_converter"],
    "C107 input file malformed": ["triton/test_perf.py::test_prompts_with_marks_of_json"],
    "C109 tokens counted from text": ["triton/test_perf.py::test_the_server_counts_tokens"],
    "C112 first-token time of an empty chunk": ["unit/test_perf_exports.py::test_an_empty_first_response_is_not_the_first_token"],
}  # fmt: skip


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((TESTS / path).read_text())
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("case", CASES)
def test_each_trouble_has_its_test(case: str) -> None:
    assert CASES[case]
    for name in CASES[case]:
        path, function = name.split("::")
        assert function in functions(path), name


def test_our_tensor_names_are_known_to_the_gguf_converter() -> None:
    """llama.cpp's converter finds a tensor by its name alone, after the suffixes of NVFP4 are taken off."""
    import gguf

    suffixes = (".weight_packed", ".weight_scale", ".weight_global_scale", ".weight_scale_2", ".input_scale")
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    layer = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    whole = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for i in range(2):
        names += [f"model.layers.{i}.{part}{suffix}" for part in layer for suffix in suffixes]
        names += [f"model.layers.{i}.{part}.weight" for part in whole]
    targets: dict[str, str] = {}
    for name in names:
        stem = next(
            (name.removesuffix(s) for s in suffixes if name.endswith(s)), name.removesuffix(".weight")
        )
        target = known.get_name(stem)
        assert target is not None, name
        assert targets.setdefault(target, stem) == stem
    assert targets["blk.1.attn_q"] == "model.layers.1.self_attn.q_proj"
