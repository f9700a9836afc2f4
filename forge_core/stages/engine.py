"""The generator a stage process keeps warm, and the policy it holds."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from forge_core.artifacts import Kind
from forge_core.chat import load_tokenizer
from forge_core.config import GeneratorConfig
from forge_core.generator import Generator
from forge_core.jobs import EvaluateJob, RolloutJob
from forge_core.stages.workspace import Workspace

logger = logging.getLogger(__name__)


@dataclass
class Engine:
    """A running vLLM engine, its tokenizer, and the digest of the policy it serves."""

    generator: Generator
    tokenizer: PreTrainedTokenizerBase
    config: GeneratorConfig
    architecture: str  # SHA-256 of the policy's config.json: other weights fit in only when it is the same
    policy_digest: str
    kind: Kind = "policy"


def engine_with(job: RolloutJob | EvaluateJob, workspace: Workspace) -> Engine:
    """An engine that serves exactly the job's policy: the warm one as it is or with new weights, or a new one."""
    policy, config = job.policy, job.generator.halved(job.memory_halvings)
    engine: Engine | None = workspace.held.get("engine")
    if engine is not None and (engine.config, engine.policy_digest) == (config, policy.digest):
        return engine
    manifest, hf_dir = workspace.fetch(policy)
    architecture = manifest.sha256_of("config.json")
    # Weights are swapped in place among unquantized policies only: the scales of others are baked into the engine.
    is_swappable = engine is not None and engine.kind == policy.kind == "policy"
    if engine is not None and is_swappable and (engine.config, engine.architecture) == (config, architecture):
        engine.generator.load_policy(hf_dir)
        engine.policy_digest = policy.digest
        return engine
    if engine is not None:
        engine.generator.close()
    generator = Generator(hf_dir, config=config, seed=job.seed % 2**31)
    engine = Engine(generator, load_tokenizer(hf_dir), config, architecture, policy.digest, policy.kind)
    workspace.held["engine"] = engine
    return engine
