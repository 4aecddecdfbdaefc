"""Every example of the contract: only the import and the model's folder are changed, and what it claims is checked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from vllm import SamplingParams

from chatspace_lab import (
    AblationSpec,
    AddSpec,
    ChatResponse,
    LayerSteeringSpec,
    ProjectionCapSpec,
    SteeringSpec,
    VLLMSteerModel,
)
from tests.conftest import wait_until
from tests.oracle import Oracle, error

PROMPT = "Question: What is the capital of France? Answer:"
SAMPLING = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture
def direction(vector: torch.Tensor) -> torch.Tensor:
    return vector / vector.norm()


def rows(handle: Any, layer: int) -> torch.Tensor:
    return handle.captures[layer][0]["hidden"]


def prompt_tokens(model: VLLMSteerModel, prompt: str) -> int:
    return len(model.tokenizer(prompt)["input_ids"])


# -- quick start -----------------------------------------------------------------------------------------------------


def test_quick_start(model: VLLMSteerModel, vector: torch.Tensor) -> None:
    async def main() -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=16)
        baseline = await model.generate("Question: What is the capital of France? Answer:", sampling)
        assert "Paris" in baseline[0]

        steering_vector = torch.randn(model.hidden_size) * 100.0
        await model.set_layer_vector(4, steering_vector)
        steered = await model.generate("Question: What is the capital of France? Answer:", sampling)
        assert steered[0] != baseline[0]

        await model.clear_all_vectors()
        again = await model.generate("Question: What is the capital of France? Answer:", sampling)
        assert again == baseline

    asyncio.run(main())


@pytest.mark.engine
def test_quick_start_as_a_script_ends_cleanly(tmp_path: Any, demo_model_path: str) -> None:
    """The example never closes the model; its process must end all the same, and its engine with it."""
    script = tmp_path / "quick_start.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import torch
            import asyncio
            import psutil
            from vllm import SamplingParams
            from chatspace_lab import (
                VLLMSteerModel,
                VLLMSteeringConfig,
            )

            async def main():
                cfg = VLLMSteeringConfig(
                    model_name={demo_model_path!r},
                    tensor_parallel_size=1,
                    gpu_memory_utilization=0.9,
                    max_model_len=2048,
                )
                model = VLLMSteerModel(cfg, bootstrap_layers=(2, 4, 6))
                sampling = SamplingParams(temperature=0.0, max_tokens=64)
                baseline = await model.generate(
                    "Question: What is the capital of France? Answer:",
                    sampling
                )
                print("Baseline:", baseline[0])
                steering_vector = torch.randn(model.hidden_size) * 100.0
                await model.set_layer_vector(4, steering_vector)
                steered = await model.generate(
                    "Question: What is the capital of France? Answer:",
                    sampling
                )
                print("Steered:", steered[0])
                await model.clear_all_vectors()
                print("Children:", *[child.pid for child in psutil.Process().children(recursive=True)], ":")

            if __name__ == "__main__":
                asyncio.run(main())
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Paris" in done.stdout.split("Steered:")[0]
    children = [int(pid) for pid in done.stdout.split("Children:")[1].split(":")[0].split()]
    assert children
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in children))


# -- core concepts ---------------------------------------------------------------------------------------------------


def test_steering_specifications(model: VLLMSteerModel, vector: torch.Tensor, direction: torch.Tensor) -> None:
    unit_vec, direction_vec = direction, torch.flip(vector, [0])

    async def main() -> None:
        spec = SteeringSpec(
            layers={
                2: LayerSteeringSpec(
                    add=AddSpec(vector=unit_vec, scale=50.0),
                ),
                4: LayerSteeringSpec(
                    add=AddSpec(vector=unit_vec, scale=100.0),
                    projection_cap=ProjectionCapSpec(
                        vector=direction_vec,
                        min=-10.0,
                        max=10.0,
                    ),
                ),
            }
        )
        await model.apply_steering_spec(spec)
        current_spec = model.export_steering_spec()
        assert current_spec == spec
        assert current_spec.layers[4].add.scale == 100.0
        torch.testing.assert_close(current_spec.layers[4].projection_cap.vector, direction_vec / direction_vec.norm())

        _, handles = await model.generate(PROMPT, SAMPLING, capture_layers=[2, 4])
        await model.fetch_captures_batch(handles)
        along = rows(handles[0], 4) @ (direction_vec / direction_vec.norm())
        assert along.abs().max() <= 10.0 + 1e-3

    asyncio.run(main())


# -- steering methods ------------------------------------------------------------------------------------------------


async def captured(model: VLLMSteerModel, layer: int) -> torch.Tensor:
    """Return the prompt's rows at one layer."""
    _, handles = await model.generate(PROMPT, SAMPLING, capture_layers=[layer])
    await model.fetch_captures_batch(handles)
    return rows(handles[0], layer)[: handles[0].prompt_len]


def test_additive_steering(model: VLLMSteerModel) -> None:
    async def main() -> None:
        before = await captured(model, 4)
        steering_vec = torch.randn(model.hidden_size) * 50.0
        await model.set_layer_vector(layer_idx=4, vector=steering_vec)
        assert error(await captured(model, 4), before + steering_vec) < 1e-4

        await model.clear_layer_vector(4)
        model.set_target_layer(4)
        await model.set_vector(steering_vec)
        assert error(await captured(model, 4), before + steering_vec) < 1e-4

        await model.clear_layer_vector(4)
        assert error(await captured(model, 4), before) < 1e-5
        assert not model.export_steering_spec()

    asyncio.run(main())


def test_projection_capping(model: VLLMSteerModel) -> None:
    async def main() -> None:
        before = await captured(model, 6)
        direction = torch.randn(model.hidden_size)
        unit = direction / direction.norm()
        await model.set_layer_projection_cap(
            layer_idx=6,
            vector=direction,
            min=-10.0,
            max=10.0,
        )
        after = await captured(model, 6)
        p = before @ unit
        assert error(after, before + (p.clamp(-10, 10) - p)[:, None] * unit) < 1e-4

        await model.clear_layer_projection_cap(6)
        assert error(await captured(model, 6), before) < 1e-5

    asyncio.run(main())


def test_projection_capping_acts_after_adding(model: VLLMSteerModel, direction: torch.Tensor) -> None:
    async def main() -> None:
        before = await captured(model, 6)
        await model.set_layer_projection_cap(6, direction, min=-1.0, max=1.0)
        await model.set_layer_vector(6, direction * 500.0)
        p = before @ direction + 500.0
        wanted = before + 500.0 * direction + (p.clamp(-1, 1) - p)[:, None] * direction
        assert error(await captured(model, 6), wanted) < 1e-4

    asyncio.run(main())


def test_component_ablation(model: VLLMSteerModel, direction: torch.Tensor) -> None:
    async def main() -> None:
        before = await captured(model, 8)
        component = (before @ direction)[:, None] * direction
        await model.set_layer_ablation(
            layer_idx=8,
            vector=direction,
            scale=0.1,
        )
        assert error(await captured(model, 8), before - 0.9 * component) < 1e-4

        await model.set_layer_ablation(
            layer_idx=8,
            vector=direction,
            scale=2.0,
        )
        assert error(await captured(model, 8), before + component) < 1e-4

        await model.clear_layer_ablation(8)
        assert error(await captured(model, 8), before) < 1e-5

    asyncio.run(main())


# -- activation capture ----------------------------------------------------------------------------------------------


def test_capture_with_generate(model: VLLMSteerModel) -> None:
    prompts = ["What is 2+2?", "What is the capital of France?"]

    async def main() -> None:
        results, handles = await model.generate(
            ["What is 2+2?", "What is the capital of France?"],
            SAMPLING,
            capture_layers=[2, 4, 6],
        )
        await model.fetch_captures_batch(handles)
        assert len(results) == len(handles) == 2
        for i, handle in enumerate(handles):
            assert list(handle.layer_indices) == [2, 4, 6]
            for layer_idx in handle.layer_indices:
                captures = handle.captures[layer_idx]
                assert len(captures) == 1  # one per worker
                hidden = captures[0]["hidden"]
                generated = handle.generated_len
                assert hidden.shape == (prompt_tokens(model, prompts[i]) + generated - 1, model.hidden_size)
                assert hidden.dtype == torch.float32

    asyncio.run(main())


def test_capture_with_chat(model: VLLMSteerModel) -> None:
    async def main() -> None:
        messages = [{"role": "user", "content": "What is 2+2?"}]
        responses, handles = await model.chat(
            messages,
            sampling_params=SAMPLING,
            capture_layers=[2, 4, 6],
        )
        await model.fetch_captures_batch(handles)
        assert isinstance(responses, list)
        assert len(responses) == 1
        text = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert handles[0].token_ids[: len(expected)] == expected
        for layer_idx in handles[0].layer_indices:
            hidden = handles[0].captures[layer_idx][0]["hidden"]
            assert hidden.shape == (len(expected) + handles[0].generated_len - 1, model.hidden_size)

    asyncio.run(main())


def test_batch_chat_with_captures(model: VLLMSteerModel, hf: Oracle) -> None:
    async def main() -> None:
        conversations = [
            [{"role": "user", "content": "What is 2+2?"}],
            [{"role": "user", "content": "Explain quantum computing."}],
            [{"role": "user", "content": "Write a haiku."}],
        ]
        responses, handles = await model.chat(
            conversations,
            sampling_params=SAMPLING,
            capture_layers=[4],
        )
        await model.fetch_captures_batch(handles)
        assert len(responses) == 3
        for response, handle, conversation in zip(responses, handles, conversations, strict=True):
            hidden = handle.captures[4][0]["hidden"]
            assert hidden.shape[0] == handle.prompt_len + handle.generated_len - 1
            assert conversation[0]["content"] in model.tokenizer.decode(handle.token_ids)
            assert model.tokenizer.decode(handle.token_ids[handle.prompt_len :]) in response.generated + "<|im_end|>"
            assert error(hidden, hf.residuals(handle.token_ids)[4]) < 1e-4

    asyncio.run(main())


def test_splitting_activations_by_message(model: VLLMSteerModel) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "What is its population?"},
    ]

    async def main() -> None:
        responses, handles = await model.chat(
            messages,
            sampling_params=SAMPLING,
            capture_layers=[4],
        )
        await model.fetch_captures_batch(handles)
        handle = handles[0]
        assert len(handle.message_boundaries) == len(messages)
        for i, boundary in enumerate(handle.message_boundaries):
            msg_acts = handle.get_message_activations(
                message_idx=i,
                layer_idx=4,
            )
            assert (boundary.role, boundary.content) == (messages[i]["role"], messages[i]["content"])
            assert msg_acts.shape == (boundary.num_tokens, model.hidden_size)
            assert boundary.num_tokens == boundary.end - boundary.start
            assert model.tokenizer.decode(handle.token_ids[boundary.start : boundary.end]) == boundary.content
            assert torch.equal(msg_acts, rows(handle, 4)[boundary.start : boundary.end])
            assert torch.norm(msg_acts, dim=-1).mean() > 0

        last_user_idx = len(handle.message_boundaries) - 1
        full_acts = handle.get_message_activations(
            message_idx=last_user_idx,
            layer_idx=4,
            include_generated=True,
        )
        last = handle.message_boundaries[-1]
        assert full_acts.shape[0] == last.num_tokens + handle.generated_len - 1
        own = [*range(last.start, last.end), *range(handle.prompt_len, len(handle.token_ids))]
        assert torch.equal(full_acts, rows(handle, 4)[own])
        assert responses[0].generated

    asyncio.run(main())


def test_captured_length(model: VLLMSteerModel) -> None:
    """A prompt of 15 tokens that generates 10 has 24 rows: the last token is sampled and never processed."""

    async def main() -> None:
        prompt = {"prompt_token_ids": model.tokenizer("one two three four five six seven eight " * 2)["input_ids"][:15]}
        sampling = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
        outputs, handles = await model.generate(prompt, sampling, capture_layers=[0, 29], raw_output=True)
        await model.fetch_captures_batch(handles)
        handle = handles[0]
        assert rows(handle, 0).shape == rows(handle, 29).shape == (24, model.hidden_size)
        assert handle.positions == list(range(24))
        assert handle.token_ids == [*prompt["prompt_token_ids"], *outputs[0].outputs[0].token_ids[:-1]]

    asyncio.run(main())


def test_slicing_captured_activations(model: VLLMSteerModel) -> None:
    prompt = PROMPT

    async def main() -> None:
        results, handles = await model.generate(
            prompt,
            sampling_params=SamplingParams(max_tokens=50),
            capture_layers=[4],
        )
        await model.fetch_captures_batch(handles)
        full_hidden = handles[0].captures[4][0]["hidden"]

        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.model_name)
        prompt_tokens = tokenizer(prompt, return_tensors="pt")
        prompt_len = prompt_tokens.input_ids.shape[1]

        prefill_acts = full_hidden[:prompt_len]
        decode_acts = full_hidden[prompt_len:]
        assert prefill_acts.shape == (prompt_len, model.hidden_size)
        assert decode_acts.shape == (handles[0].generated_len - 1, model.hidden_size)
        assert handles[0].token_ids[:prompt_len] == prompt_tokens.input_ids[0].tolist()
        # Drawn at temperature 1: it may end at once, and within a character.
        answer = tokenizer.decode(handles[0].token_ids[prompt_len:], skip_special_tokens=True)
        assert len(results) == 1
        assert answer.startswith(results[0])

    asyncio.run(main())


def test_comparing_messages_in_a_conversation(model: VLLMSteerModel) -> None:
    messages = [
        {"role": "system", "content": "You are a math tutor."},
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "2+2 equals 4."},
        {"role": "user", "content": "What is 10*10?"},
    ]

    async def main() -> None:
        _, handles = await model.chat(
            messages,
            sampling_params=SAMPLING,
            capture_layers=[4, 8, 12],
        )
        await model.fetch_captures_batch(handles)
        handle = handles[0]
        user_msg_indices = [i for i, b in enumerate(handle.message_boundaries) if b.role == "user"]
        assert user_msg_indices == [1, 3]
        for layer in [4, 8, 12]:
            acts_1 = handle.get_message_activations(user_msg_indices[0], layer)
            acts_2 = handle.get_message_activations(user_msg_indices[1], layer)
            mean_1 = acts_1.mean(dim=0)
            mean_2 = acts_2.mean(dim=0)
            cos_sim = F.cosine_similarity(mean_1.unsqueeze(0), mean_2.unsqueeze(0)).item()
            assert 0.5 < cos_sim < 1.0

        system_acts = handle.get_message_activations(0, layer_idx=4)
        first_user_acts = handle.get_message_activations(1, layer_idx=4)
        assert system_acts.shape[0] == len(model.tokenizer("You are a math tutor.")["input_ids"])
        assert first_user_acts.shape[0] == len(model.tokenizer("What is 2+2?")["input_ids"])

    asyncio.run(main())


def test_analyzing_steering_effects_with_generate(model: VLLMSteerModel) -> None:
    prompt, sampling = PROMPT, SAMPLING

    async def main() -> None:
        baseline_results, baseline_handles = await model.generate(
            prompt,
            sampling,
            capture_layers=[4],
        )
        await model.fetch_captures_batch(baseline_handles)
        baseline_acts = baseline_handles[0].captures[4][0]["hidden"]

        steering_vec = torch.randn(model.hidden_size) * 50.0
        await model.set_layer_vector(4, steering_vec)

        steered_results, steered_handles = await model.generate(
            prompt,
            sampling,
            capture_layers=[4],
        )
        await model.fetch_captures_batch(steered_handles)
        steered_acts = steered_handles[0].captures[4][0]["hidden"]

        delta = (steered_acts - baseline_acts)[: baseline_handles[0].prompt_len]
        torch.testing.assert_close(delta, steering_vec.expand_as(delta), rtol=0, atol=1e-2)
        for i in range(min(5, baseline_acts.shape[0])):
            cos_sim = F.cosine_similarity(baseline_acts[i].unsqueeze(0), steered_acts[i].unsqueeze(0), dim=-1).item()
            wanted = baseline_acts[i] + steering_vec
            assert cos_sim == pytest.approx(F.cosine_similarity(baseline_acts[i], wanted, dim=0).item(), abs=1e-4)
        assert steered_results != baseline_results

    asyncio.run(main())


def test_analyzing_steering_effects_with_chat(model: VLLMSteerModel) -> None:
    async def main() -> None:
        messages = [{"role": "user", "content": "Explain the concept of recursion."}]
        baseline_resp, baseline_handles = await model.chat(
            messages,
            sampling_params=SAMPLING,
            capture_layers=[4],
        )
        await model.fetch_captures_batch(baseline_handles)
        baseline_acts = baseline_handles[0].captures[4][0]["hidden"]

        steering_vec = torch.randn(model.hidden_size) * 50.0
        await model.set_layer_vector(4, steering_vec)

        steered_resp, steered_handles = await model.chat(
            messages,
            sampling_params=SAMPLING,
            capture_layers=[4],
        )
        await model.fetch_captures_batch(steered_handles)
        steered_acts = steered_handles[0].captures[4][0]["hidden"]

        delta = (steered_acts - baseline_acts)[: baseline_handles[0].prompt_len]
        torch.testing.assert_close(delta, steering_vec.expand_as(delta), rtol=0, atol=1e-2)
        assert baseline_resp[0][:100] == baseline_resp[0].full_text()[:100]
        assert steered_resp[0][:100] != baseline_resp[0][:100]

    asyncio.run(main())


# -- concurrent capture ----------------------------------------------------------------------------------------------


def test_concurrent_capture_with_generate(model: VLLMSteerModel, hf: Oracle) -> None:
    sampling = SAMPLING

    async def analyze_multiple_prompts() -> None:
        prompts = [
            "What is the capital of France?",
            "Explain quantum computing.",
            "Write a haiku about programming.",
        ]
        tasks = [
            model.generate(
                [prompt],
                sampling,
                capture_layers=[2, 4, 6],
            )
            for prompt in prompts
        ]
        results = await asyncio.gather(*tasks)
        all_handles = [handles[0] for texts, handles in results]
        await model.fetch_captures_batch(all_handles)
        for i, handle in enumerate(all_handles):
            assert handle.token_ids[: handle.prompt_len] == model.tokenizer(prompts[i])["input_ids"]
            wanted = hf.residuals(handle.token_ids)
            for layer in [2, 4, 6]:
                hidden = handle.captures[layer][0]["hidden"]
                assert error(hidden, wanted[layer]) < 1e-4

    asyncio.run(analyze_multiple_prompts())


def test_concurrent_capture_with_batch_conversations(model: VLLMSteerModel, hf: Oracle) -> None:
    async def main() -> None:
        conversations = [
            [{"role": "user", "content": "What is the capital of France?"}],
            [{"role": "user", "content": "Explain quantum computing."}],
            [{"role": "user", "content": "Write a haiku about programming."}],
        ]
        responses, handles = await model.chat(
            conversations,
            sampling_params=SAMPLING,
            capture_layers=[2, 4, 6],
        )
        await model.fetch_captures_batch(handles)
        for i, (response, handle) in enumerate(zip(responses, handles, strict=True)):
            assert response[:50] == str(response)[:50]
            assert handle.message_boundaries[0].content == conversations[i][0]["content"]
            wanted = hf.residuals(handle.token_ids)
            for layer in [2, 4, 6]:
                assert error(handle.captures[layer][0]["hidden"], wanted[layer]) < 1e-4

    asyncio.run(main())


def test_multi_layer_analysis(model: VLLMSteerModel, hf: Oracle) -> None:
    prompt, sampling = PROMPT, SAMPLING

    async def main() -> None:
        all_layers = list(range(model.layer_count))
        results, handles = await model.generate(
            prompt,
            sampling,
            capture_layers=all_layers,
        )
        await model.fetch_captures_batch(handles)
        layer_norms = {}
        for layer_idx in all_layers:
            hidden = handles[0].captures[layer_idx][0]["hidden"]
            layer_norms[layer_idx] = torch.norm(hidden, dim=-1).mean().item()

        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        plt.plot(list(layer_norms.keys()), list(layer_norms.values()))
        plt.xlabel("Layer")
        plt.ylabel("Mean Activation Norm")
        plt.title("Activation Magnitude Across Layers")
        plt.show()

        assert len(layer_norms) == 30
        wanted = hf.residuals(handles[0].token_ids).norm(dim=-1).mean(dim=-1)
        assert list(layer_norms.values()) == pytest.approx(wanted.tolist(), rel=1e-4)
        assert results[0]

    asyncio.run(main())


def test_validating_against_huggingface(model: VLLMSteerModel) -> None:
    # An answer that ends by itself: then the text leaves out the last token, as the captures do.
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    sampling = SamplingParams(temperature=0.0, max_tokens=64)

    async def main() -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        hf_model = AutoModelForCausalLM.from_pretrained(
            model.model_name,
            torch_dtype=torch.float32,
            device_map="cpu",
        )
        hf_tokenizer = AutoTokenizer.from_pretrained(model.model_name)

        vllm_results, vllm_handles = await model.generate(
            prompt,
            sampling,
            capture_layers=[4],
        )
        await model.fetch_captures_batch(vllm_handles)
        vllm_acts = vllm_handles[0].captures[4][0]["hidden"]

        full_text = prompt + vllm_results[0]
        inputs = hf_tokenizer(full_text, return_tensors="pt").to("cpu")

        hf_captures = {}

        def capture_hook(module: Any, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            hf_captures[4] = hidden.detach().cpu()

        handle = hf_model.model.layers[4].register_forward_hook(capture_hook)
        with torch.no_grad():
            hf_model(**inputs)
        handle.remove()

        hf_acts = hf_captures[4].squeeze(0)
        cos_sim = F.cosine_similarity(vllm_acts.flatten().unsqueeze(0), hf_acts.flatten().unsqueeze(0), dim=-1).item()
        mae = torch.mean(torch.abs(vllm_acts - hf_acts)).item()
        assert cos_sim == pytest.approx(1.0, abs=1e-6)
        assert mae < 1e-4

    asyncio.run(main())


# -- concurrency -----------------------------------------------------------------------------------------------------


def test_concurrent_generation(model: VLLMSteerModel) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=4)

    async def generate_many(model: VLLMSteerModel, prompts: list[str], sampling: SamplingParams) -> list[str]:
        tasks = [
            model.generate(prompt, sampling)
            for prompt in prompts
        ]  # fmt: skip
        results = await asyncio.gather(*tasks)
        return [r[0] for r in results]

    async def main() -> None:
        prompts = [f"Prompt {i}" for i in range(10)]
        results = await generate_many(model, prompts, sampling)
        assert results == await model.generate(prompts, sampling)
        assert all(isinstance(result, str) and result for result in results)

    asyncio.run(main())


def test_steering_update_waits_for_generation(model: VLLMSteerModel, vector: torch.Tensor) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    new_steering_vec = vector * 100.0

    async def main() -> None:
        unsteered = await model.generate("Write a long story...", sampling)

        gen_task = asyncio.create_task(model.generate("Write a long story...", sampling))
        await model.set_layer_vector(4, new_steering_vec)
        assert not model._steering.lock._readers  # the update was applied after the generation had ended
        result = await gen_task
        assert result == unsteered
        assert await model.generate("Write a long story...", sampling) != unsteered

    asyncio.run(main())


# -- advanced features -----------------------------------------------------------------------------------------------


def test_steering_context_manager(model: VLLMSteerModel, vector: torch.Tensor) -> None:
    prompts, sampling, vec = [PROMPT, "The sea is"], SAMPLING, vector

    async def main() -> None:
        baseline = await model.generate(prompts, sampling)
        spec = SteeringSpec(layers={4: LayerSteeringSpec(add=AddSpec(vector=vec, scale=100.0))})

        async with model.steering(spec):
            results = await model.generate(prompts, sampling)
            assert model.export_steering_spec() == spec
        assert all(one != other for one, other in zip(results, baseline, strict=True))

        assert not model.export_steering_spec()
        assert await model.generate(prompts, sampling) == baseline

    asyncio.run(main())


def test_steering_stack(model: VLLMSteerModel, vector: torch.Tensor) -> None:
    prompts, sampling = [PROMPT], SAMPLING
    baseline_spec = SteeringSpec.at(2, AddSpec(vector, 0.5))
    intervention_spec = SteeringSpec.at(4, AddSpec(vector, 60.0))
    alternative_spec = SteeringSpec.at(10, AblationSpec(vector, -5.0))

    async def main() -> None:
        plain = await captured(model, 10)
        await model.push_steering_spec(baseline_spec)
        await model.apply_steering_spec(intervention_spec)
        results_1 = await model.generate(prompts, sampling)
        await model.apply_steering_spec(alternative_spec)
        results_2 = await model.generate(prompts, sampling)
        assert results_1 != results_2
        assert model.export_steering_spec() == alternative_spec

        await model.pop_steering_spec()
        assert not model.export_steering_spec()  # what was in force before the push
        results_baseline = await model.generate(prompts, sampling)
        assert results_baseline not in (results_1, results_2)
        assert error(await captured(model, 10), plain) < 1e-5

    asyncio.run(main())


# -- chat ------------------------------------------------------------------------------------------------------------


def test_basic_chat(model: VLLMSteerModel) -> None:
    async def main() -> None:
        messages = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is the capital of France?"},
        ]
        sampling = SamplingParams(temperature=0.7, max_tokens=128, seed=0)
        responses = await model.chat(
            messages,
            sampling_params=sampling,
        )
        response = responses[0]
        assert isinstance(responses, list)
        assert isinstance(response, ChatResponse)
        assert response.full_text() == response.generated
        assert response.generated
        assert response.has_prefill is False
        assert response.prefill == ""

    asyncio.run(main())


def test_batched_conversations(model: VLLMSteerModel) -> None:
    conversations = [
        [
            {"role": "user", "content": "What is 2+2?"},
        ],
        [
            {"role": "system", "content": "You are a math tutor."},
            {"role": "user", "content": "Explain the Pythagorean theorem."},
        ],
    ]

    async def main() -> None:
        responses = await model.chat(
            conversations,
            temperature=0.7,
            max_tokens=256,
        )
        assert isinstance(responses, list)
        assert len(responses) == 2
        for i, response in enumerate(responses):
            assert isinstance(response, str)
            assert f"Conversation {i}: {response}" == f"Conversation {i}: {response.full_text()}"

        together = await model.chat(conversations, temperature=0.0, max_tokens=16)
        alone = [(await model.chat(one, temperature=0.0, max_tokens=16))[0] for one in conversations]
        assert together == alone

    asyncio.run(main())


def test_sampling_keywords(model: VLLMSteerModel) -> None:
    messages = [{"role": "user", "content": "What is 2+2?"}]

    async def main() -> None:
        responses = await model.chat(
            messages,
            temperature=0.8,
            top_p=0.95,
            max_tokens=100,
        )
        assert responses[0].generated
        by_keyword = await model.chat(messages, temperature=0.8, top_p=0.95, seed=7, max_tokens=16)
        by_object = await model.chat(
            messages, sampling_params=SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=16)
        )
        assert by_keyword == by_object

    asyncio.run(main())


def test_custom_chat_template_options(model: VLLMSteerModel) -> None:
    messages = [{"role": "user", "content": "What is 2+2?"}]

    async def main() -> None:
        responses = await model.chat(
            messages,
            sampling_params=SAMPLING,
            chat_options={
                "add_generation_prompt": True,
                "chat_template": "custom_template",
            },
        )
        assert isinstance(responses[0], ChatResponse)

        template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
        _, handles = await model.chat(
            messages, sampling_params=SAMPLING, capture_layers=[0], chat_options={"chat_template": template}
        )
        await model.fetch_captures_batch(handles)
        handle = handles[0]
        assert model.tokenizer.decode(handle.token_ids[: handle.prompt_len]) == "[user] What is 2+2?\n"

    asyncio.run(main())


def test_assistant_response_prefilling(model: VLLMSteerModel) -> None:
    sampling = SAMPLING

    async def main() -> None:
        prefill = '{"explanation": "'
        messages = [
            {"role": "user", "content": "Explain quantum computing in JSON format"},
            {"role": "assistant", "content": prefill},
        ]
        responses = await model.chat(
            messages,
            sampling_params=sampling,
            chat_options={
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
        )
        response = responses[0]
        assert response.has_prefill is True
        assert response.prefill == prefill
        assert response.full_text() == prefill + response.generated
        assert response == response.full_text()
        assert response.generated
        assert not response.generated.startswith(prefill)

        messages.append(response.to_message())
        assert messages[-1] == {"role": "assistant", "content": prefill + response.generated}

        reasoning_prefill = "<think>\n"
        messages_with_reasoning = [
            {"role": "user", "content": "Solve this problem step by step"},
            {"role": "assistant", "content": reasoning_prefill},
        ]
        reasoning_responses, handles = await model.chat(
            messages_with_reasoning,
            sampling_params=sampling,
            chat_options={
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
            capture_layers=[4],
        )
        assert reasoning_responses[0].full_text().startswith("<think>\n")
        await model.fetch_captures_batch(handles)
        prompt = model.tokenizer.decode(handles[0].token_ids[: handles[0].prompt_len])
        assert prompt.endswith("<|im_start|>assistant\n<think>\n")

    asyncio.run(main())


def test_token_level_details(model: VLLMSteerModel) -> None:
    from vllm import RequestOutput

    messages = [{"role": "user", "content": "What is 2+2?"}]

    async def main() -> None:
        outputs = await model.chat(
            messages,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=12, logprobs=2),
            raw_output=True,
        )
        assert len(outputs) == 1
        for output in outputs:
            assert isinstance(output, RequestOutput)
            text = output.outputs[0].text
            token_ids = output.outputs[0].token_ids
            logprobs = output.outputs[0].logprobs
            assert model.tokenizer.decode(token_ids, skip_special_tokens=True) == text
            assert len(logprobs) == len(token_ids)
            assert all(token in entry for token, entry in zip(token_ids, logprobs, strict=True))

    asyncio.run(main())


def test_combining_chat_with_steering(model: VLLMSteerModel, vector: torch.Tensor) -> None:
    sampling, steering_vec = SAMPLING, vector * 50

    async def main() -> None:
        messages = [{"role": "user", "content": "Write a formal email."}]
        plain = await model.chat(messages, sampling_params=sampling)
        await model.set_layer_vector(4, steering_vec)
        responses = await model.chat(
            messages,
            sampling_params=sampling,
        )
        assert responses != plain
        await model.clear_all_vectors()
        assert await model.chat(messages, sampling_params=sampling) == plain

    asyncio.run(main())


def test_multi_turn_conversations(model: VLLMSteerModel) -> None:
    sampling = SAMPLING

    async def main() -> None:
        conversation = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is Python?"},
        ]
        responses = await model.chat(conversation, sampling_params=sampling)
        first_response = responses[0]

        conversation.append(first_response.to_message())
        conversation.append({"role": "user", "content": "Tell me more about it."})

        responses = await model.chat(conversation, sampling_params=sampling)
        assert responses[0].full_text()
        assert conversation[2] == {"role": "assistant", "content": first_response.full_text()}

    asyncio.run(main())


def test_facts_of_the_model(model: VLLMSteerModel, demo_model_path: str) -> None:
    assert (model.hidden_size, model.layer_count, model.model_name) == (576, 30, demo_model_path)
