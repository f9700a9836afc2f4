"""The command `forge`: what people ask for by day and by night.

Every command imports what it needs when it runs, so that `forge --help` and completion answer at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    help="Post-training of language models: run it, look at it, publish it, roll it back.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Root = Annotated[str, typer.Option(envvar="FORGE_ROOT", help="Where artifacts live: a directory or any fsspec URI")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON for a script")]
Name = Annotated[str, typer.Argument(help="Published name, such as quickstart")]
RUN_HELP = "A run, {root}/{run_id}"
DEFAULT_ROOT = ".forge/store"


@app.command()
def doctor(root: Root = DEFAULT_ROOT, as_json: Json = False) -> None:
    """Check software, devices, memory, disk, storage, Prefect and MLflow; says what to do about each problem."""
    from deployments.cli import doctor as doctors

    checks = doctors.examine(root)
    doctors.show(checks, as_json=as_json)
    raise typer.Exit(doctors.exit_code(checks))


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A YAML file, e.g. deployments/configs/quickstart.yaml")],
    run_id: Annotated[str | None, typer.Option(help="Continue or name a run")] = None,
    seed: Annotated[int | None, typer.Option(help="Replace the config's seed")] = None,
    deployment: Annotated[
        str | None, typer.Option(help="Run it on a worker by this deployment, e.g. post-train/quickstart")
    ] = None,
) -> None:
    """Run a config: post-train, grpo, sft or evaluate, by whether it has a section `sft` and `grpo`."""
    from deployments.cli.running import run_config

    run_config(config, run_id=run_id, seed=seed, deployment=deployment)


@app.command()
def status(
    run: Annotated[str, typer.Argument(help=RUN_HELP)],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay until the run is done")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks with --follow")] = 5.0,
    as_json: Json = False,
) -> None:
    """Show the iterations and evaluations of a run."""
    from deployments.cli import status as shown

    shown.show(run, follow=follow, every=every, as_json=as_json)


@app.command()
def compare(
    run: Annotated[str, typer.Argument(help="A run, or one of its policies, {root}/{run_id}/policies/v0003")],
    other: Annotated[str, typer.Argument(help="The run or policy it is compared with")],
    plot: Annotated[Path, typer.Option(help="Where the curves of both go, as PNG")] = Path("compare.png"),
    as_json: Json = False,
) -> None:
    """Compare two runs (their newest policies) or two policies problem by problem, and the curves of their metrics."""
    from deployments.cli import compare as compared

    compared.show(run, other, plot, as_json=as_json)


@app.command("eval-harness")
def eval_harness(
    policy: Annotated[str, typer.Argument(help="A policy version, a published name or a run, by its URI")],
    tasks: Annotated[str, typer.Option(help="Tasks of lm-evaluation-harness, with commas between them")],
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the policy's chat template")] = False,
    num_fewshot: Annotated[int | None, typer.Option(help="Worked examples; the task's own number if unset")] = None,
    limit: Annotated[int | None, typer.Option(help="Problems of each task; all if unset")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus completion, tokens")] = None,
    seed: Annotated[int, typer.Option(help="Of worked examples and sampling")] = 0,
    include_path: Annotated[Path | None, typer.Option(help="Directory of your own task files")] = None,
    num_concurrent: Annotated[int, typer.Option(help="Requests at once")] = 32,
    python: Annotated[
        str, typer.Option(help="Interpreter that has lm_eval, where it is not this one")
    ] = sys.executable,
    as_json: Json = False,
) -> None:
    """Serve a policy with vLLM, run benchmarks of lm-evaluation-harness against it, and keep their results."""
    from deployments.cli.harness import run_harness
    from deployments.lm_eval import HarnessSettings

    settings = HarnessSettings(
        tasks=tuple(tasks.split(",")),
        is_chat=chat,
        num_fewshot=num_fewshot,
        limit=limit,
        max_model_len=max_model_len,
        seed=seed,
    )
    run_harness(
        policy,
        settings,
        python=python,
        include_path=include_path,
        num_concurrent=num_concurrent,
        as_json=as_json,
    )


@app.command()
def lineage(
    uri: Annotated[str, typer.Argument(help="An artifact, a published name or a run; with --example a run or root")],
    influenced: Annotated[bool, typer.Option(help="What was made from it instead")] = False,
    example: Annotated[str | None, typer.Option(help="What this example of a dataset did")] = None,
    as_json: Json = False,
) -> None:
    """Say what made an artifact, or what was made from it."""
    from forge_core.lineage import describe

    if influenced and example is not None:
        fail("--influenced and --example are two questions; ask one of them")
    text, model = describe(uri, influenced=influenced, example=example)
    sys.stdout.write(model.model_dump_json(indent=1) + "\n" if as_json else text)


@app.command()
def publish(
    policy: Annotated[str, typer.Argument(help="A policy version, {root}/{run_id}/policies/v0003, or a run")],
    name: Annotated[str | None, typer.Option(help="Published name; that of the run's config if unset")] = None,
    force: Annotated[bool, typer.Option(help="Publish although a gate is not passed; the record says so")] = False,
    as_json: Json = False,
) -> None:
    """Publish a policy by hand, through the gates of its run's config as its stored evaluations tell."""
    from deployments.cli import publishing

    publishing.publish(policy, name, force=force, as_json=as_json)


@app.command()
def rollback(
    name: Name,
    root: Root = DEFAULT_ROOT,
    to: Annotated[int | None, typer.Option(help="Version to put back; the previous one if unset")] = None,
    as_json: Json = False,
) -> None:
    """Put back what was published before."""
    from deployments.cli import publishing

    publishing.rollback(root, name, to, as_json=as_json)


@app.command()
def history(name: Name, root: Root = DEFAULT_ROOT, as_json: Json = False) -> None:
    """Show what a name has pointed at, newest first."""
    from deployments.cli import publishing

    publishing.show_history(root, name, as_json=as_json)


@app.command()
def serve(
    name: Name,
    root: Root = DEFAULT_ROOT,
    port: Annotated[int, typer.Option(help="Port to listen on, on this machine alone")] = 8000,
) -> None:
    """Serve what a name points at, with the engine settings of its run, until Ctrl-C; promotions are followed."""
    from deployments.cli.publishing import serve as serve_published

    serve_published(root, name, port)


@app.command()
def gc(
    root: Annotated[str, typer.Argument(help="Where artifacts live")] = DEFAULT_ROOT,
    run: Annotated[str | None, typer.Option(help="Look at this run alone")] = None,
    older_than_hours: Annotated[float, typer.Option(help="Age of the newest object of a thing")] = 24.0,
    delete: Annotated[bool, typer.Option(help="Delete what is shown")] = False,
) -> None:
    """Show or delete what no manifest promises."""
    from forge_core.gc import report

    for line in report(root, run_id=run, older_than_hours=older_than_hours, delete=delete):
        sys.stdout.write(f"{line}\n")


def fail(message: str) -> NoReturn:
    """End with a message and status 1."""
    sys.stderr.write(f"forge: {message}\n")
    raise typer.Exit(1)


def main() -> None:
    """Run the command line; what a user can mend is one line and no traceback."""
    try:
        app(prog_name="forge")
    except (RuntimeError, ValueError, OSError) as error:
        sys.exit(f"forge: {error}")


if __name__ == "__main__":
    main()
