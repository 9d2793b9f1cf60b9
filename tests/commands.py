"""The command line, run in this process."""

from typer.testing import CliRunner

from rgate_integrations.cli.main import app


def rgate(*arguments, stdin=""):
    """Run a command, whatever becomes of it."""
    return CliRunner().invoke(app, [str(each) for each in arguments], input=stdin)


def printed(*arguments, stdin=""):
    """Run a command that succeeds; returns what it prints."""
    done = rgate(*arguments, stdin=stdin)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output
