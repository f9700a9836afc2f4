"""The model registry of MLflow: a version for every policy that was to be published, and aliases that follow.

`challenger` is the last policy that was to be published, whether its gates let it or not; `champion` and `previous` are
what the history of the published name says. The champion among the quantized forms of a policy is also the alias
`quantized` of the policy's own model, so that `models:/NAME@quantized` stands beside `models:/NAME@champion`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_core import publication
from forge_core.gates import GateResult, failures
from forge_core.publication import QUANTIZED_SUFFIX

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


def version_of(
    client: MlflowClient, name: str, hf_uri: str, *, run_id: str | None = None, tags: dict[str, str] | None = None
) -> ModelVersion:
    """The registered version of a policy's files, made when there is none; tags are set either way."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    # A tracking server refuses file:// sources outside its own artifacts; local:// is fsspec's other name for them.
    source = hf_uri.replace("file://", "local://", 1)
    # The same policy published from another run is another version: the files of that one may go.
    found = [version for version in client.search_model_versions(f"name = '{name}'") if version.source == source]
    if not found:
        return client.create_model_version(name, source, run_id, tags=tags)
    for key, value in (tags or {}).items():
        client.set_model_version_tag(name, found[0].version, key, value)
    return found[0]


def gate_tags(results: tuple[GateResult, ...]) -> dict[str, str]:
    """Tags that say how a policy fared at its gates; none when there were none."""
    if not results:
        return {}
    failed = ", ".join(result.gate for result in failures(results))
    return {"forge.gates": f"failed: {failed}" if failed else "passed"} | {
        f"forge.gate.{result.gate}": result.reason for result in results
    }


def follow_history(client: MlflowClient, root: str, name: str) -> None:
    """Set the aliases `champion`, `previous` and `quantized` to what the history of a published name says.

    Looked at once more at the end, so that of several that do this at once the last one leaves the truth.
    """
    while True:
        newest = publication.champion(root, name)
        for alias, record in (("champion", newest), ("previous", publication.previous(root, name))):
            if record is not None:
                version = version_of(client, name, record.hf_uri)
                client.set_registered_model_alias(name, alias, version.version)
            elif alias in client.get_registered_model(name).aliases:
                client.delete_registered_model_alias(name, alias)
        if newest is not None and name.endswith(QUANTIZED_SUFFIX):
            model = name.removesuffix(QUANTIZED_SUFFIX)
            client.set_registered_model_alias(model, "quantized", version_of(client, model, newest.hf_uri).version)
        if publication.champion(root, name) == newest:
            return
