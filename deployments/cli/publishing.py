"""`forge publish`, `rollback` and `history`: the pointer of a published name, moved by hand."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from rich.console import Console
from rich.table import Table

from forge_core import publication
from forge_core.artifacts import Manifest, Ref, read_manifest, resolve
from forge_core.comparison import PairedDifference
from forge_core.config import RunConfig
from forge_core.evaluations import compare
from forge_core.gates import GateResult, failures, judge
from forge_core.manifests import find, root_of, run_of
from forge_core.publication import Publication
from forge_core.runs import read_run
from forge_core.serve_config import ServeConfig
from forge_core.serving import follow


def publish(uri: str, name: str | None, *, force: bool, as_json: bool) -> None:
    """Publish a policy, unless a gate of its run's config says no."""
    policy = find(uri)
    if policy.kind != "policy":
        raise ValueError(f"{policy.uri} is a {policy.kind}; only a policy can be published")
    record, root = read_run(run_of(policy.uri)), root_of(policy.uri)
    config = record.settings()
    name = name or config.name
    champion = publication.champion(root, name)
    own = _evaluations(policy, config)
    metrics: dict[str, float | int] = {}
    for evaluation in own.values():
        metrics |= evaluation.summary
    results = _judged(policy, champion, own, config)
    if (failed := failures(results)) and not force:
        raise ValueError(
            f"{name} keeps its champion: {'; '.join(result.reason for result in failed)}. Add --force to publish anyway"
        )
    published = publication.publish(
        root,
        name,
        policy,
        run_id=record.run_id,
        metrics=metrics,
        gates=results,
        replaces=champion.version if champion else 0,
    )
    _follow_registry(root, name)
    newest = publication.champion(root, name)
    if newest != published and newest is not None:
        raise ValueError(
            f"{policy.uri} was published as version {published.version} before, and {name} points at version "
            f"{newest.version} since; use `forge rollback {name} --root {root} --to {published.version}`"
        )
    _say(published, f"{name} -> version {published.version}, {published.policy.uri}", as_json=as_json)


def rollback(root: str, name: str, to: int | None, *, as_json: bool) -> None:
    """Put back what was published before."""
    restored = publication.rollback(root, name, to=to)
    _follow_registry(root, name)
    _say(
        restored,
        f"{name} -> version {restored.version}, which restores version {restored.restores}, {restored.policy.uri}",
        as_json=as_json,
    )


def show_history(root: str, name: str, *, as_json: bool) -> None:
    """Every version of a name, newest first."""
    records = publication.history(root, name)[::-1]
    if not records:
        raise ValueError(f"{publication.published_uri(root, name)} has no history; check the name and --root")
    if as_json:
        sys.stdout.write("[" + ",\n".join(record.model_dump_json() for record in records) + "]\n")
        return
    table = Table("version", "published", "run", "policy", "", box=None, padding=(0, 1))
    for place, record in enumerate(records):
        said = ["champion"] if place == 0 else ["previous"] if record.version == records[0].previous else []
        said += [f"restores {record.restores}"] if record.restores else []
        said += ["gates failed"] if failures(record.gates) else []
        version, policy = str(record.version), record.policy.uri.rpartition("/")[2]
        table.add_row(version, record.published_at[:19], record.run_id, policy, ", ".join(said))
    Console().print(table)


def serve(root: str, name: str, port: int) -> None:
    """Serve a published name until Ctrl-C."""
    published = publication.champion(root, name)
    if published is None:
        raise ValueError(f"{publication.published_uri(root, name)} has no history; check the name and --root")
    generator = read_run(run_of(published.policy.uri)).settings().generator
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    with contextlib.suppress(KeyboardInterrupt):
        follow(
            ServeConfig(name=name, root=root, port=port, generator=generator),
            logging.getLogger("forge"),
            lambda _: None,
        )


def _evaluations(policy: Ref, config: RunConfig) -> dict[str, Manifest]:
    """The stored evaluations of a policy version, by name."""
    place = f"{run_of(policy.uri)}/evals/{policy.uri.rpartition('/')[2]}"
    found = {evaluation.name: read_manifest(f"{place}/{evaluation.name}") for evaluation in config.evals}
    return {name: manifest for name, manifest in found.items() if manifest is not None}


def _judged(
    policy: Ref, champion: Publication | None, own: dict[str, Manifest], config: RunConfig
) -> tuple[GateResult, ...]:
    if not config.gates.are_set:
        return ()
    missing = [evaluation.name for evaluation in config.evals if evaluation.name not in own]
    if missing:
        raise ValueError(f"{policy.uri} has no evaluation {', '.join(missing)}, which its gates look at; evaluate it")
    versus: dict[str, PairedDifference | None] = dict.fromkeys(own)
    if champion is not None and champion.policy != policy and config.gates.max_accuracy_drop is not None:
        others = _evaluations(champion.policy, config)
        for name, manifest in own.items():
            if name not in others:
                raise ValueError(
                    f"the champion {champion.policy.uri} has no evaluation {name} to be compared with; start the "
                    "same run_id again, which evaluates the champion and then publishes"
                )
            versus[name] = compare(others[name], manifest)["accuracy"]
    numbers: dict[str, float] = dict(resolve(policy).summary)
    for manifest in own.values():
        numbers |= manifest.summary
    return judge(config.gates, numbers, versus)


def _follow_registry(root: str, name: str) -> None:
    """Let MLflow's aliases follow; the pointer is moved already, so a server that does not answer is only said."""
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        return
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    from mlflow import MlflowClient

    from tasks.registry import follow_history

    try:
        follow_history(MlflowClient(), root, name)
    except Exception as error:
        sys.stderr.write(f"forge: the aliases in MLflow did not follow, they will at the next publication: {error}\n")


def _say(published: Publication, text: str, *, as_json: bool) -> None:
    sys.stdout.write((published.model_dump_json(indent=1) if as_json else text) + "\n")
