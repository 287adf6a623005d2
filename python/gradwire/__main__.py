"""`python -m gradwire`: the command where the scripts of the environment are not on PATH."""

from gradwire.cli import main

main(prog_name="python -m gradwire")
