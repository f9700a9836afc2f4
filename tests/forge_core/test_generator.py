"""The engine returns what it sampled, from the weights it was given, whatever else it is doing."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from forge_core.chat import encode_prompt
from forge_core.config import FreshPolicyConfig, GeneratorConfig, GrpoConfig, SamplingConfig
from forge_core.generator import Completion, Generator, Logprob, sampled_logprobs
from forge_core.policies import build_fresh_policy

SHAPE = FreshPolicyConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=96)
CONFIG = GeneratorConfig(max_num_seqs=32, max_model_len=256)
SAMPLING = SamplingConfig(max_tokens=12)

Rollouts = list[list[Completion]]


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> list[Path]:
    """Two policies of one shape; their weights are scaled up, so that the two disagree about the next token."""
    paths = [tmp_path_factory.mktemp(f"policy{seed}") for seed in (0, 1)]
    for seed, path in enumerate(paths):
        build_fresh_policy(path, SHAPE, seed)
        tensors = load_file(path / "model.safetensors")
        tensors["model.embed_tokens.weight"] *= 3
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return paths


@pytest.fixture(scope="module")
def engine(policies) -> Generator:
    # One engine for the whole module: closing an engine ends vLLM's process groups, those of any other engine too.
    return Generator(policies[0], config=CONFIG, seed=0)


@pytest.fixture
def generator(engine, policies) -> Generator:
    """The engine, serving the first policy."""
    engine.load_policy(policies[0])
    return engine


@pytest.fixture(scope="module")
def prompts(policies) -> list[list[int]]:
    """20 prompts of 7 to 150 tokens, so that some fill more than one block of the prefix cache."""
    tokenizer = AutoTokenizer.from_pretrained(policies[0])
    texts = ["=" * (144 if number % 5 == 0 else 1) + f"{number}+7" for number in range(20)]
    return [encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts]


def sample(generator: Generator, prompts: list[list[int]], *, seed: int = 0, num_completions: int = 3) -> Rollouts:
    seeds = [1000 * seed + index for index in range(len(prompts))]
    return generator.generate(prompts, num_completions=num_completions, sampling=SAMPLING, seeds=seeds)


def largest_logprob_error(policy: Path, prompts: list[list[int]], rollouts: Rollouts, temperature: float) -> float:
    """Largest distance of a returned log-prob from log_softmax(logits / temperature) in transformers."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    worst = 0.0
    for prompt, group in zip(prompts, rollouts, strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt, *completion.token_ids]])  # [1, L]
            with torch.no_grad():
                logprobs = torch.log_softmax(model(ids).logits[0] / temperature, dim=-1)  # [L, V]
            # Position i holds the distribution of token i + 1.
            expected = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            worst = max(worst, (expected - torch.tensor(completion.logprobs)).abs().max().item())
    return worst


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_the_trainer_at_the_sampling_temperature(generator, policies, prompts, temperature):
    sampling = SamplingConfig(max_tokens=12, temperature=temperature)
    rollouts = generator.generate(prompts, num_completions=2, sampling=sampling, seeds=list(range(20)))
    assert largest_logprob_error(policies[0], prompts, rollouts, temperature) < 1e-4


def test_training_config_refuses_truncated_sampling():
    with pytest.raises(ValueError, match="training rollouts need top_p=1"):
        GrpoConfig(sampling=SamplingConfig(top_p=0.9))


def test_every_token_has_a_logprob_and_completions_are_cut_at_max_tokens(generator, prompts):
    completions = [completion for group in sample(generator, prompts) for completion in group]
    assert len(completions) == 20 * 3
    assert all(len(completion.logprobs) == len(completion.token_ids) for completion in completions)
    assert all(math.isfinite(logprob) and logprob <= 0 for item in completions for logprob in item.logprobs)
    truncated = [completion for completion in completions if completion.finish_reason == "length"]
    assert truncated
    assert {len(completion.token_ids) for completion in truncated} == {12}


def test_missing_logprob_becomes_nan_and_never_zero():
    rows = [{5: Logprob(-0.5)}, None, {8: Logprob(-0.25)}]  # nothing for token 6, another token's for token 7
    values = sampled_logprobs([5, 6, 7, 8], rows)
    assert values[0] == -0.5
    assert [math.isnan(value) for value in values] == [False, True, True, True]
    assert all(math.isnan(value) for value in sampled_logprobs([5, 6], None))


def test_completion_that_ends_by_itself_keeps_its_eos(generator, policies, prompts):
    tokenizer = AutoTokenizer.from_pretrained(policies[0])
    sampling = SamplingConfig(max_tokens=64, temperature=2.0)
    groups = generator.generate(prompts, num_completions=4, sampling=sampling, seeds=list(range(20)))
    stopped = [item for group in groups for item in group if item.finish_reason == "stop"]
    assert stopped
    assert all(item.token_ids[-1] == tokenizer.eos_token_id for item in stopped)
    assert all(tokenizer.eos_token_id not in item.token_ids[:-1] for group in groups for item in group)
    assert all(item.text == tokenizer.decode(item.token_ids, skip_special_tokens=True) for item in stopped)


def test_stop_string_ends_a_completion_and_stays_out_of_its_text(generator, policies, prompts):
    tokenizer = AutoTokenizer.from_pretrained(policies[0])
    plain = sample(generator, prompts[:1], num_completions=1)[0][0]
    stop = tokenizer.decode([plain.token_ids[4]])
    first = next(index for index, token in enumerate(plain.token_ids) if tokenizer.decode([token]) == stop)
    sampling = SamplingConfig(max_tokens=12, stop=(stop,))
    stopped = generator.generate(prompts[:1], num_completions=1, sampling=sampling, seeds=[0])[0][0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == plain.token_ids[: first + 1]
    assert stop not in stopped.text


def test_greedy_completion_does_not_depend_on_the_seed(generator, prompts):
    greedy = SamplingConfig(max_tokens=12, temperature=0)
    first, second = generator.generate([prompts[1]] * 2, num_completions=1, sampling=greedy, seeds=[5, 6])
    assert first == second


def test_rollouts_depend_on_the_seed_of_the_prompt_and_on_nothing_else_in_the_batch(generator, prompts):
    rollouts = sample(generator, prompts)
    assert sample(generator, prompts) == rollouts  # the prefix cache is warm by now
    seeds = list(range(20))
    backwards = generator.generate(prompts[::-1], num_completions=3, sampling=SAMPLING, seeds=seeds[::-1])
    assert backwards[::-1] == rollouts
    alone = [sample_one(generator, prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    assert alone == rollouts
    assert sample(generator, prompts, seed=1) != rollouts


def sample_one(generator: Generator, prompt: list[int], seed: int) -> list[Completion]:
    return generator.generate([prompt], num_completions=3, sampling=SAMPLING, seeds=[seed])[0]


def test_prompts_that_do_not_fit_in_one_step_are_sampled_like_alone(generator):
    # 20 x 240 = 4800 prompt tokens, more than a step takes (4096): one prompt would be split, were that allowed.
    long_prompts = [[1] + [20 + number] * 239 for number in range(20)]
    rollouts = sample(generator, long_prompts)
    assert sample_one(generator, long_prompts[17], 17) == rollouts[17]


def test_neighbouring_seeds_of_one_prompt_share_no_completion(generator, prompts):
    # vLLM numbers the samples of a request seed, seed + 1, ...: unhashed, seeds 0 to 3 would share most of theirs.
    groups = generator.generate([prompts[1]] * 4, num_completions=4, sampling=SAMPLING, seeds=[0, 1, 2, 3])
    assert len({completion.token_ids for group in groups for completion in group}) == 16


def test_swapped_weights_are_used_and_no_cached_prefix_survives(generator, policies, prompts):
    before = sample(generator, prompts)  # fills the prefix cache with the first policy's keys and values
    generator.load_policy(policies[1])
    swapped = sample(generator, prompts)
    assert swapped != before
    # The embeddings are tied to the output layer, of which a CPU engine keeps a packed copy: both must have changed.
    assert largest_logprob_error(policies[1], prompts, swapped, 1.0) < 1e-4
    generator.load_policy(policies[0])
    assert sample(generator, prompts) == before


def test_another_process_started_on_the_policy_samples_the_same_bits(generator, policies, prompts, tmp_path):
    generator.load_policy(policies[1])
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    # Two threads and other batch sizes there: neither may show in the numbers.
    code = (
        "import json, sys; from pathlib import Path; from forge_core.config import *; "
        "import forge_core.generator as g; policy, seeds = Path(sys.argv[1]), list(range(20)); "
        "prompts = json.loads(Path(sys.argv[2]).read_text()); "
        "config = GeneratorConfig(max_num_seqs=8, max_model_len=256, overrides={'enable_prefix_caching': False}); "
        "generator = g.Generator(policy, config=config, seed=9); sampling = SamplingConfig(max_tokens=12); "
        "out = generator.generate(prompts, num_completions=3, sampling=sampling, seeds=seeds); "
        "print(json.dumps([[[c.token_ids, c.logprobs] for c in group] for group in out]))"
    )
    command = [sys.executable, "-c", code, str(policies[1]), str(tmp_path / "prompts.json")]
    result = subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    elsewhere = json.loads(result.stdout.splitlines()[-1])
    here = [[[list(c.token_ids), list(c.logprobs)] for c in group] for group in sample(generator, prompts)]
    assert elsewhere == here


@pytest.fixture
def other(policies, tmp_path) -> Path:
    """A copy of the second policy, for a test to damage."""
    return Path(shutil.copytree(policies[1], tmp_path / "other"))


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.scale"] = tensors.pop("model.norm.weight")


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.embed_tokens.weight"] = torch.zeros(100, 64)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rename, r"lacks the tensor model\.norm\.weight|has an unexpected tensor model\.norm\.scale"),
        (drop, r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        (reshape, r"model\.embed_tokens\.weight with shape \(100, 64\), not \(101, 64\)"),
    ],
)
def test_policy_with_other_tensors_is_refused_and_the_old_one_stays_served(generator, prompts, other, damage, message):
    before = sample(generator, prompts)
    tensors = load_file(other / "model.safetensors")
    damage(tensors)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        generator.load_policy(other)
    assert sample(generator, prompts) == before


def test_truncated_policy_is_refused_and_the_old_one_stays_served(generator, prompts, other):
    before = sample(generator, prompts)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        generator.load_policy(other)
    assert sample(generator, prompts) == before


def test_policy_with_other_architecture_settings_is_refused(generator, other):
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    with pytest.raises(ValueError, match=r"rms_norm_eps=1e-05 in config\.json, not 1e-06"):
        generator.load_policy(other)


def test_stored_copy_of_a_tied_output_layer_is_accepted(generator, prompts, policies, other):
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    generator.load_policy(other)
    with_copy = sample(generator, prompts)
    generator.load_policy(policies[1])
    assert sample(generator, prompts) == with_copy


def test_prompt_that_leaves_no_room_is_refused(generator, prompts):
    fits, too_long = [1] * 244, [1] * 245  # 256 - 12 = 244
    generator.generate([fits], num_completions=1, sampling=SAMPLING, seeds=[0])
    with pytest.raises(ValueError, match=r"prompt 1 has 245 tokens; .* at most 244 fit: raise generator"):
        generator.generate([prompts[0], too_long], num_completions=1, sampling=SAMPLING, seeds=[0, 1])


@pytest.mark.parametrize(
    ("batch", "seeds", "sampling", "message"),
    [
        ([[]], [0], SAMPLING, "prompt 0 is empty"),
        ([[1]], [], SAMPLING, "1 prompts came with 0 seeds"),
        ([[1]], [0], SamplingConfig(temperature=0.001), "use 0 for greedy"),
        ([[1]], [0], SamplingConfig(temperature=0), "0 with 2 completions, all equal; ask for 1"),
    ],
)
def test_request_that_cannot_be_sampled_is_refused(generator, batch, seeds, sampling, message):
    with pytest.raises(ValueError, match=message):
        generator.generate(batch, num_completions=2, sampling=sampling, seeds=seeds)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"gpu_memory_utilisation": 0.5}, "did you mean gpu_memory_utilization"),
        ({"max_num_seqs": 8}, r"set generator\.max_num_seqs"),
        ({"logprobs_mode": "raw_logprobs"}, "stays processed_logprobs"),
        ({"zzzz": 1}, "see vLLM's EngineArgs"),
    ],
)
def test_override_that_vllm_does_not_have_or_that_is_ours_is_refused(policies, overrides, message):
    with pytest.raises(ValueError, match=message):
        Generator(policies[0], config=CONFIG.model_copy(update={"overrides": overrides}), seed=0)
