"""The generator a stage process keeps warm, and the policy it holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from forge_core.chat import load_tokenizer
from forge_core.config import GeneratorConfig
from forge_core.generator import Generator
from forge_core.jobs import EvaluateJob, RolloutJob
from forge_core.quantize_config import SchemeConfig
from forge_core.stages.workspace import Workspace
from forge_core.storage import sha256_file


@dataclass
class Engine:
    """A running vLLM engine, its tokenizer, and what it serves: a policy by digest, and what that was rounded to."""

    generator: Generator
    tokenizer: PreTrainedTokenizerBase
    config: GeneratorConfig
    architecture: str  # SHA-256 of the policy's config.json: other weights fit in only when it is the same
    served: tuple[str, SchemeConfig | None]


def engine_with(job: RolloutJob | EvaluateJob, workspace: Workspace) -> Engine:
    """An engine that serves exactly the job's policy: the warm one as it is or with new weights, or a new one."""
    config = job.generator.halved(job.memory_halvings)
    scheme = job.rounded_to if isinstance(job, RolloutJob) else None
    served = (job.policy.digest, scheme)
    engine: Engine | None = workspace.held.get("engine")
    if engine is not None and (engine.config, engine.served) == (config, served):
        return engine
    _, hf_dir = workspace.fetch(job.policy)
    with _rounded(hf_dir, scheme, workspace) as weights_dir:
        # The architecture includes how the weights are quantized.
        architecture = sha256_file(weights_dir / "config.json")
        is_swappable = engine is not None and (engine.config, engine.architecture) == (config, architecture)
        if engine is not None and is_swappable and engine.generator.is_reloadable:
            engine.generator.load_policy(weights_dir)
            engine.served = served
            return engine
        if engine is not None:
            engine.generator.close()
        generator = Generator(weights_dir, config=config, seed=job.seed % 2**31)
        engine = Engine(generator, load_tokenizer(hf_dir), config, architecture, served)
    workspace.held["engine"] = engine
    return engine


@contextmanager
def _rounded(hf_dir: Path, scheme: SchemeConfig | None, workspace: Workspace) -> Iterator[Path]:
    """A directory with the policy rounded to a scheme; the policy's own where there is none."""
    if scheme is None:
        yield hf_dir
        return
    from forge_core.quantization.rounding import round_policy  # its imports take seconds

    with workspace.directory() as directory:
        round_policy(hf_dir, directory, scheme)
        yield directory
