"""The command `gradreg`: one row per subcommand."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gradreg.errors import closest
from gradreg.experiments.environment import gradreg_version
from gradreg.experiments.failures import JobFailed

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True)
class Command:
    """A subcommand: `main()` of a module, which reads `sys.argv`.

    Args:
        module: Imported only when the command is called.
        summary: One line for the overview.
        needs: Packages without which it cannot work.
        extra: The extra of gradreg that brings them.
        config: Name of the primary configuration, if it is a Hydra program.
        interrupted: What to tell after Ctrl-C.
    """

    module: str
    summary: str
    needs: tuple[str, ...] = ()
    extra: str = "experiments"
    config: str | None = None
    interrupted: str = ""


COMMANDS = {
    "train": Command(
        "gradreg.experiments.train",
        "train heads over a shared base on collages, with and without a penalty",
        needs=("hydra", "sklearn", "matplotlib"),
        config="train",
        interrupted="The same command goes on from the last checkpoint.",
    ),
    "check": Command(
        "gradreg.experiments.check",
        "say who hears of the penalties of an experiment, who does not, and why",
        needs=("hydra", "sklearn"),
        config="check",
    ),
    "study": Command(
        "gradreg.experiments.studies.job",
        "reproduce published behavior of regularizers over several seeds",
        needs=("hydra", "sklearn", "matplotlib"),
        config="study",
        interrupted="The same command starts the study anew.",
    ),
    "summarize": Command(
        "gradreg.experiments.summarize", "table over seeds: mean and spread of finished runs", needs=("hydra",)
    ),
    "index": Command(
        "gradreg.experiments.attribution.index",
        "store training gradients, to ask which training examples matter",
        needs=("hydra",),
        config="index",
        interrupted="The same command goes on where it stopped.",
    ),
    "query": Command(
        "gradreg.experiments.attribution.query",
        "proponents and opponents of test examples: table, JSON, CSV and a page",
        needs=("hydra",),
        config="query",
    ),
    "attribute": Command(
        "gradreg.experiments.transformers.attribute",
        "which tokens or words an output of a language model came from: table, JSON, page",
        needs=("hydra", "transformers", "matplotlib"),
        extra="all",
        config="attribute",
    ),
    "similarity": Command(
        "gradreg.experiments.transformers.similarity",
        "why the gradients of two texts are as similar as they are: tokens, groups, what-ifs",
        needs=("hydra", "transformers"),
        extra="all",
        config="similarity",
    ),
    "attention": Command(
        "gradreg.experiments.transformers.attention",
        "attention and its gradients per layer, head and kind of token: table, figure, numbers",
        needs=("hydra", "matplotlib", "transformers"),
        extra="all",
        config="attention",
    ),
    "evaluate-tracin": Command(
        "gradreg.experiments.attribution.evaluate",
        "what TracIn's scores are worth on digits: LDS, flipped labels, removal",
        needs=("sklearn",),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand named by the first argument.

    Args:
        arguments: Those after the program name; None for `sys.argv`.

    Returns:
        The exit status.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if given else 2
    if given[0] in ("-V", "--version"):
        print(f"gradreg {gradreg_version()}")
        return 0
    name, rest = given[0], given[1:]
    if name not in COMMANDS:
        print(
            f"gradreg: unknown command {name!r}. Closest: {closest(name, COMMANDS)}.\n\n{_overview()}", file=sys.stderr
        )
        return 2
    command = COMMANDS[name]
    missing = [package for package in command.needs if importlib.util.find_spec(package) is None]
    if missing:
        print(
            f"gradreg {name} needs {', '.join(missing)}, which this Python does not have. Install the extra:\n"
            f"  pip install 'gradreg[{command.extra}]'",
            file=sys.stderr,
        )
        return 2
    if command.config and {"-h", "--help"} & set(rest):
        from gradreg.experiments.usage import usage

        explained = usage(command.config)
        if explained:
            print(explained, end="")
            return 0
    # On stderr, so that output such as `--cfg job` stays clean; early, for imports take seconds.
    print(f"gradreg {gradreg_version()} {name}: starting ...", file=sys.stderr, flush=True)
    # Hydra's parser refuses overrides on both sides of a flag; people write `gradreg train a=1 -m seed=0,1`.
    rest.sort(key=lambda argument: argument not in ("-m", "--multirun"))
    sys.argv = [f"gradreg {name}", *rest]
    if command.config:
        from gradreg.experiments.hints import null_lists

        refused = null_lists(rest, command.config)
        if refused:
            print("\n".join(refused), file=sys.stderr)
            return 1
    try:
        status = importlib.import_module(command.module).main()
    except JobFailed:
        raise  # Hydra took all overrides
    except SystemExit as stop:
        if stop.code and command.config:
            from gradreg.experiments.hints import override_hints

            for hint in override_hints(rest, command.config):
                print(hint, file=sys.stderr)
        raise
    except KeyboardInterrupt:
        print(f"\ngradreg {name}: interrupted. {command.interrupted}".rstrip(), file=sys.stderr)
        return 130  # what shells expect after Ctrl-C
    return status if isinstance(status, int) else 0


def _overview() -> str:
    rows = [f"  {name:<15} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: gradreg COMMAND [arguments]",
            "",
            *rows,
            "",
            "gradreg COMMAND --help explains a command, gradreg --version prints the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
