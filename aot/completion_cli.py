"""Shell completion."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the code that makes a shell complete commands, options, architectures and kernels.

    For bash: `eval "$(sonata-aot completion bash)"` in ~/.bashrc; for zsh the same in ~/.zshrc; for
    fish: `sonata-aot completion fish > ~/.config/fish/completions/sonata-aot.fish`.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # click has these three
    # Its `source` method would first run bash to ask for its version.
    complete = kind(ctx.find_root().command, {}, "sonata-aot", "_SONATA_AOT_COMPLETE")
    click.echo(complete.source_template % complete.source_vars())
