"""Lineage in MLflow's words: from a metric to a manifest, and from a registered model to everything that made it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from forge_core.artifacts import Manifest, Ref, sha256_json
from forge_core.lineage import Lineage
from forge_core.manifests import short_name
from forge_core.plan import Plan
from forge_core.shards import is_part

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

MAX_DIGEST_CHARS = 36  # of a dataset in MLflow; the whole one is the input's tag `forge.digest`


def manifest_tags(manifest: Manifest) -> dict[str, str]:
    """Tags of a stage run: the artifact it made last, and from what."""
    inputs = {name: f"{ref.uri} {ref.digest}" for name, ref in manifest.inputs.items()}
    return {"forge.output": f"{manifest.uri} {manifest.digest}", "forge.inputs": json.dumps(inputs)}


def model_tags(policy: Ref, plan: Plan, lineage: Lineage) -> dict[str, str]:
    """Tags of a model version: which policy it is, and what it was made from."""
    nodes = lineage.nodes
    starts = [digest for digest, node in nodes.items() if node.stage == "start"]
    return {
        "forge.digest": policy.digest,
        "forge.uri": policy.uri,
        "forge.run_id": plan.run_id,
        "forge.base_policy_digest": starts[0] if starts else "unknown",
        "forge.dataset_digests": ",".join(sorted(digest for digest, node in nodes.items() if node.kind == "dataset")),
        "forge.num_rollout_sets": str(
            sum(node.kind == "rollouts" and not is_part(node.uri) for node in nodes.values())
        ),
        "forge.num_broken_links": str(sum(node.problem is not None for node in nodes.values())),
        "forge.config_digest": sha256_json(plan.config.model_dump(mode="json")),
    }


def dataset_input(ref: Ref) -> DatasetInput:
    """A dataset or rollout set as a dataset of MLflow, by reference: nothing is read."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    scheme = ref.uri.partition("://")[0]
    # What MetaDataset(resolve_dataset_source(uri)) would say, without its warning about equivalent sources.
    dataset = Dataset(
        name=short_name(ref.uri),
        digest=ref.digest[:MAX_DIGEST_CHARS],
        source_type="local" if scheme == "file" else scheme,
        source=json.dumps({"uri": ref.uri}),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", ref.kind), InputTag("forge.digest", ref.digest)])
